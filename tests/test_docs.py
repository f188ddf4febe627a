"""Everything that the README, docs/ and examples name exists, and their commands run."""

import ast
import importlib.util
import json
import re
import shlex
import shutil
import subprocess

import pytest

from benchmarks import plot
from scripts.docs import tables
from scripts.prepare._corpora import read_yaml
from tests.end_to_end.commands import PLUGIN, ROOT, prepare_python, run
from tests.scripts.evaluate.saved_memory_models import write_all

PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "scripts/README.md")),
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "examples").glob("*/*.md")),
    ]
}
DOCS = ROOT / "docs"


def links(text):
    return re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text)


def test_the_page_of_options_is_up_to_date():
    page = PAGES["docs/options.md"]
    assert tables.options_page(page) == page, "run python -m scripts.docs.tables"


@pytest.mark.slow
def test_the_page_of_presets_has_their_sizes(tmp_path):
    assert tables.main(["--output", str(tmp_path)]) == 0
    written = (tmp_path / "presets.md").read_text(encoding="utf-8")
    assert written == PAGES["docs/presets.md"], "run python -m scripts.docs.tables"


def test_pages_and_the_picture_show_the_recorded_speed(tmp_path):
    rows = json.loads((DOCS / "speed.json").read_text(encoding="utf-8"))
    table = [line for line in PAGES["docs/speed.md"].splitlines() if line.startswith("| [")]
    quoted = re.findall(r"\| (\d+\.\d+)\W \| (\d+\.\d+)\W \|$", PAGES["README.md"], re.MULTILINE)
    for row, line, numbers in zip(rows, table, quoted, strict=True):
        figures = [row["training"], row["evaluation"]]
        written = [re.search(r"\d+\.\d+", cell)[0] for cell in line.strip("|").split("|")[1:3]]
        assert figures == list(map(float, written)), line
        assert [round(figure, 1) for figure in figures] == list(map(float, numbers)), line
    assert plot.main(["--output", str(tmp_path / "speed.png")]) == 0
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings_and_commands_exist(page):
    for target in links(PAGES[page]):
        assert target.startswith("https://") or ((ROOT / page).parent / target).exists(), target
    for target, anchor in re.findall(r"\]\(([^)#]*)#([^)]*)\)", PAGES[page]):
        path = (ROOT / page).parent / target if target else ROOT / page
        headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert anchor in [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings]
    for module in re.findall(r"python\s+-m\s+(scripts\.\w+\.[a-z]\w*)", PAGES[page]):
        assert importlib.util.find_spec(module), module
    for corpus in re.findall(r"scripts\.prepare ([a-z]\w*)", PAGES[page]):
        assert corpus in read_yaml("corpora.yaml"), corpus


def test_the_lines_of_python_run():
    (code,) = re.findall(r"```python\n(.*?)```", PAGES["README.md"], re.DOTALL)
    names = {}
    exec(code, names)
    assert names["y"].shape == names["x"].shape


@pytest.fixture(scope="module")
def pages_run(tmp_path_factory):
    """Run the pages' commands in a folder; return it, the commands' names and what they printed."""
    folder = tmp_path_factory.mktemp("pages")
    for name in ("fairseq_plugins", "scripts"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "quickstart").mkdir()
    prepare_python(folder / "quickstart" / "data")
    pages = [PAGES[page] for page in ("README.md", "docs/evaluation.md", "docs/training.md")]
    names, logs = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for command in re.findall(r"```sh\n(.*?)```", "".join(pages), re.DOTALL):
            command = re.sub(r"--max-update \d+", "--max-update 3", command)
            pipe, _, words = command.rpartition(" | ")
            # shlex would return an escaped line end as a word
            name, *words = shlex.split(words.replace("\\\n", " "))
            text = subprocess.check_output(["bash", "-c", pipe], text=True, encoding="utf-8")
            # this process has loaded the plugin from PLUGIN
            assert (folder / words[words.index("--user-dir") + 1]).samefile(PLUGIN)
            words[words.index("--user-dir") + 1] = PLUGIN
            names.append(name.removeprefix("fairseq-"))
            logs.append(run(name, *words, text=text))
    return folder, names, logs


@pytest.mark.slow
def test_commands_of_the_pages_run_in_order(pages_run):
    folder, names, logs = pages_run
    assert names == "train eval-lm interactive interactive generate train".split()
    assert (folder / "checkpoints" / "checkpoint_last.pt").exists()
    assert re.search(r"^D-0\t\S+\tdef", logs[2], re.MULTILINE)
    assert re.findall(r"^D-\d+\t\S+\t(.*)$", logs[3], re.MULTILINE) == ["def f(x):", "x += 1"]
    assert len(re.findall(r"^H-\d+\t", logs[4], re.MULTILINE)) >= 8


@pytest.mark.slow
def test_python_page_runs_on_trained_models(pages_run, monkeypatch, capsys):
    folder, _, _ = pages_run
    # stand in for the output of make quickstart-translation
    output = folder / "quickstart" / "translation"
    output.mkdir()
    made = write_all(output)
    shutil.copytree(made / "pairs", made / "checkpoints")
    shutil.copy(made / "pairs.pt", made / "checkpoints" / "checkpoint_best.pt")
    (made / "data" / "bpe").mkdir(parents=True)
    (made / "data" / "bpe" / "codes").write_text("#version: 0.2\nt o</w>\n", encoding="utf-8")
    monkeypatch.chdir(folder)
    capsys.readouterr()
    names = {}
    for code in re.findall(r"```python\n(.*?)```", PAGES["docs/python.md"], re.DOTALL):
        # the model that stands in does not know the words
        lenient = '"quickstart/translation/checkpoints", allow_unknown=True'
        exec(code.replace('"quickstart/translation/checkpoints"', lenient), names)
    printed = capsys.readouterr().out
    assert printed.startswith(f"{names['score']}\n['")
    assert len(ast.literal_eval(printed.splitlines()[-1])) == 2
    assert names["both"].log_probs == pytest.approx(names["score"].log_probs, abs=1e-5)
