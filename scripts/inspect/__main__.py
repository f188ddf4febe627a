r"""Look inside a model: one page for the browser, in one file that needs nothing else.

    python -m scripts.inspect CHECKPOINT --text FILE --log train.log --output page.html
    python -m scripts.inspect CHECKPOINT --source "two dogs run" --target "zwei hunde laufen"
    python -m scripts.inspect --log all=1.log plain=2.log --data DATA/bin --picture curves.png

The page shows a text token by token, coloured by its loss, and what each token read: earlier tokens
by layer and head, persistent vectors, slots of memories, a source sentence; also spans, branch
weights and learning curves. Without --text or --source it takes --split from --data, by default the
data of the training. It shows --tokens tokens from --start on, and reads those before, too.
--picture draws one figure of the page, by Chromium.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from scripts._shared.command_line import (
    check_at_least,
    command_parser,
    exit_status,
    parse_named_files,
)
from scripts._shared.commands import short
from scripts._shared.files import atomic_write, write_text

# sections of page.html.j2
FIGURES = ("text", "distances", "alignment", "encoder", "spans", "persistent", "memory", "branches")
FIGURES = (*FIGURES, "curves")
FOLDER = Path(__file__).parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER_OPTIONS = """
    --headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking
    --disable-component-update --disable-sync --hide-scrollbars --virtual-time-budget=10000
    --force-device-scale-factor=2
""".split()
PICTURE_WIDTH = 900


def read_content(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return all that the page shows."""
    content: dict[str, Any] = {
        "title": "Learning curves",
        "lead": "How the trainings went, from their logs.",
        "facts": [],
        "unit": "bits a token",
        "charts": {},
    }
    if arguments.checkpoint is not None:
        # imports fairseq, which takes seconds
        from scripts.inspect._content import describe_model

        pair = arguments.source, arguments.target
        content = describe_model(
            arguments.checkpoint,
            *(arguments.data, arguments.text, pair, arguments.split),
            *(arguments.tokens, arguments.start),
        )
    elif arguments.data is not None:
        from fairseq_plugins.units import loss_unit, read_units

        content["unit"] = loss_unit(read_units(arguments.data).unit)
    if arguments.log:
        # also imports fairseq, for the name of a unit
        from scripts.inspect._curves import learning_curves

        charts = learning_curves(parse_named_files("--log", arguments.log), content["unit"])
        content["curves"] = list(charts)
        content["charts"] |= charts
    return content


def format_page(content: dict[str, Any]) -> str:
    """Return the page."""
    from jinja2 import Environment, FileSystemLoader
    from markupsafe import Markup

    environment = Environment(loader=FileSystemLoader(FOLDER), autoescape=True)
    data = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    style, script = (
        (FOLDER / name).read_text(encoding="utf-8") for name in ("page.css", "page.js")
    )
    return environment.get_template("page.html.j2").render(
        page=content,
        # nothing in a script element may look like its end
        data=Markup(data.replace("<", "\\u003c")),
        style=Markup(style),
        script=Markup(script),
    )


def draw_picture(page: Path, figure: str, picture: Path) -> None:
    """Write one figure of a page as a PNG."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise ValueError(
            f"--picture needs one of {', '.join(BROWSERS)}: install Chromium (apt-get install "
            "chromium), or take a screenshot of the page"
        )
    with tempfile.TemporaryDirectory() as folder:

        def browse(*options: str) -> str:
            words = [browser, *BROWSER_OPTIONS, f"--user-data-dir={folder}/profile", *options]
            words.append(f"{page.resolve().as_uri()}?figure={figure}")
            return subprocess.run(words, capture_output=True, text=True, check=True).stdout

        # the page writes its height into the document
        document = browse(f"--window-size={PICTURE_WIDTH},600", "--dump-dom")
        height = re.search(r'data-height="([1-9]\d*)"', document)
        if height is None:
            raise ValueError(f"--figure is {figure}: the page of this model does not have it")
        # the browser goes by the name's ending
        drawn = Path(folder, "picture.png")
        browse(f"--window-size={PICTURE_WIDTH},{height[1]}", f"--screenshot={drawn}")
        with atomic_write(picture) as partial:
            shutil.copyfile(drawn, partial)


def inspect(arguments: argparse.Namespace) -> None:
    """Write the page, and the picture that is asked for."""
    check_at_least(1, tokens=arguments.tokens)
    check_at_least(0, start=arguments.start)
    if arguments.checkpoint is None and not arguments.log:
        raise ValueError("there is nothing to show: give a CHECKPOINT, or --log")
    content = read_content(arguments)
    write_text(arguments.output, format_page(content))
    size = arguments.output.stat().st_size / 2**20
    print(f"written to {short(arguments.output.resolve())} ({size:.1f} MB): open it in a browser")
    if arguments.picture is not None:
        draw_picture(arguments.output, arguments.figure, arguments.picture)
        print(f"{arguments.figure} written to {short(arguments.picture.resolve())}")


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = command_parser(__doc__)
    add = parser.add_argument
    text = "checkpoint, or folder with checkpoint_best.pt; none for learning curves alone"
    add("checkpoint", nargs="?", type=Path, metavar="CHECKPOINT", help=text)
    text = "folder that fairseq-preprocess wrote, with the dictionaries (those of the training)"
    add("--data", type=Path, help=text)
    add("--text", type=Path, metavar="FILE", help="text to show, as a file in UTF-8")
    add("--source", metavar="SENTENCE", help="sentence for a translation model")
    text = "its translation (the model's own)"
    add("--target", metavar="SENTENCE", help=text)
    add("--split", default="test", help="part of the data to show without a text (test)")
    add("--tokens", type=int, default=2000, help="tokens of the text to show (2000)")
    text = "first token to show, at the start of its segment (0)"
    add("--start", type=int, default=0, help=text)
    text = "logs of fairseq-train, with their labels"
    add("--log", nargs="+", action="extend", metavar="[LABEL=]PATH", help=text)
    add("--output", type=Path, default=Path("page.html"), help="the page (page.html)")
    add("--picture", type=Path, metavar="PNG", help="draw one figure into this file, too")
    add("--figure", choices=FIGURES, default="curves", help="figure for --picture (curves)")
    parsed = parser.parse_args(arguments)
    return exit_status(lambda: inspect(parsed), output=parsed.output)


if __name__ == "__main__":
    sys.exit(main())
