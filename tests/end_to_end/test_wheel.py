"""The built wheel, in an environment and a folder without the repository."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = "def f(x):\n    return x + 1\n\n" * 60
TRAINING = """fairseq-train data/bin --user-dir fairseq_plugins --task segment_language_modeling
    --arch transformer_xl --decoder-layers 1 --decoder-embed-dim 16 --decoder-attention-heads 2
    --decoder-ffn-embed-dim 16 --tokens-per-sample 16 --batch-size 2 --optimizer adam --lr 0.01
    --max-update 3 --no-epoch-checkpoints --cpu"""
EVALUATION = """fairseq-eval-lm data/bin --user-dir fairseq_plugins --task segment_language_modeling
    --path checkpoints/checkpoint_last.pt --tokens-per-sample 16 --gen-subset test --cpu"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The programs of an environment with the wheel, and with this one's other packages."""
    folder = tmp_path_factory.mktemp("wheel")
    # setuptools builds in the sources
    names = ("fairseq_plugins", "scripts", "benchmarks", "examples")
    names += ("pyproject.toml", "setup.py", "README.md", "LICENSE")
    sources = folder / "sources"
    sources.mkdir()
    for name in names:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, sources / name)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = ("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, sources)
    subprocess.run([*pip, *build], check=True)
    environment = folder / "environment"
    venv.create(environment)
    (site,) = environment.glob("lib/python*/site-packages")
    (wheel,) = folder.glob("*.whl")
    subprocess.run(
        [*pip, "--python", environment / "bin" / "python", "install", "--no-deps", wheel],
        check=True,
    )
    # a path in a .pth file; Python reads no .pth files there, so not this repository's either
    (site / "others.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    for name, module in (("train", "train"), ("eval-lm", "eval_lm"), ("preprocess", "preprocess")):
        program = environment / "bin" / f"fairseq-{name}"
        program.write_text(
            f"#!{environment}/bin/python\nfrom fairseq_cli.{module} import cli_main\ncli_main()\n"
        )
        program.chmod(0o755)
    return environment / "bin"


@pytest.mark.slow
def test_a_wheel_prepares_trains_evaluates_and_inspects(programs, tmp_path):
    (plugin,) = programs.parent.glob("lib/python*/site-packages/fairseq_plugins")
    read = [path for path in (ROOT / "scripts").rglob("*.*") if path.suffix in (".yaml", ".j2")]
    assert all((plugin / "_commands" / path.relative_to(ROOT)).is_file() for path in read)

    def run(line):
        # fairseq finds the plugin beside itself; here, it is elsewhere
        line = line.replace("--user-dir fairseq_plugins", f"--user-dir {plugin}")
        environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
        environment.pop("PYTHONPATH", None)
        done = subprocess.run(
            line.split(), cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout + done.stderr

    (tmp_path / "text.py").write_text(TEXT)
    (tmp_path / "scripts").mkdir()  # a user's own
    run("fairseq-plugins prepare text --input text.py --unit characters --output data")
    run(TRAINING)
    assert "Perplexity" in run(EVALUATION)
    run("fairseq-plugins inspect checkpoints --text text.py --output page.html")
    assert "text.py" in (tmp_path / "page.html").read_text()
    shown = run("fairseq-plugins recipe transformer_xl/enwik8_base show DATA OUT")
    assert "fairseq-plugins prepare" in shown
    assert "python -m scripts" not in shown
    listed = run("fairseq-plugins")
    for name in ("prepare", "convert checkpoint", "evaluate recl", "inspect", "recipe"):
        assert f"\n  {name}" in listed
    assert "usage: fairseq-plugins evaluate recl" in run("fairseq-plugins evaluate recl --help")
    assert "--first" in run("fairseq-plugins benchmarks --help")
