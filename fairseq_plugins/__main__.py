"""``fairseq-plugins COMMAND ...``: prepare, convert, evaluate, inspect, recipe and benchmarks.

A wheel has the repository's folders ``scripts`` and ``benchmarks`` in ``_commands``. The words of a
command are the path of its module: ``fairseq-plugins evaluate recl`` is
``python -m scripts.evaluate.recl``.
"""

import ast
import pkgutil
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER / "_commands" if (FOLDER / "_commands").is_dir() else FOLDER.parent
# they serve the repository itself
LEFT_OUT = ("docs", "quickstart")


def main() -> None:
    """Run the command that the first words name with the words after them."""
    # before the current folder, which may have scripts of its own
    sys.path.insert(0, str(ROOT))
    words, name = sys.argv[1:], "scripts"
    if words[:1] == ["benchmarks"]:
        name = words.pop(0)
    while words and words[0].isidentifier() and _path(f"{name}.{words[0]}"):
        name += f".{words.pop(0)}"
    if name == "scripts" or not _is_command(name):
        print("usage: fairseq-plugins COMMAND ...; each command has --help\n")
        print(*_describe_commands(), f"  {'benchmarks':28} {_summarise('benchmarks')}", sep="\n")
        sys.exit(bool(words) and words[0] not in ("-h", "--help"))
    sys.argv[1:] = words
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _path(name: str) -> Path | None:
    """Return the file of a module, or None if there is no command of this name."""
    folder = ROOT.joinpath(*name.split("."))
    files = (folder / "__main__.py", folder / "__init__.py", folder.with_suffix(".py"))
    hidden = any(part.startswith("_") or part in LEFT_OUT for part in name.split("."))
    return None if hidden else next((file for file in files if file.is_file()), None)


def _is_command(name: str) -> bool:
    path = _path(name)
    return path is not None and path.name != "__init__.py"


def _summarise(name: str) -> str:
    path = _path(name)
    docstring = ast.get_docstring(ast.parse(path.read_text("utf-8"))) if path else None
    return (docstring or "").partition("\n")[0]


def _describe_commands(folder: str = "scripts") -> Iterator[str]:
    """Yield a line for each command in a folder: its words, and what it does."""
    for module in sorted(pkgutil.iter_modules([str(ROOT / folder)]), key=lambda each: each.name):
        name = f"{folder}/{module.name}".replace("/", ".")
        if _is_command(name):
            words = " ".join(name.split(".")[1:])
            yield f"  {words:28} {_summarise(name)}"
        elif _path(name):
            yield from _describe_commands(f"{folder}/{module.name}")


if __name__ == "__main__":
    main()
