"""What all commands share: options, errors, signals, files, checkpoints and child processes."""

import math
import os
import signal
import subprocess
import sys
import zipfile

import pytest
import torch

from scripts._shared.checkpoints import checkpoint_options, read_checkpoint
from scripts._shared.command_line import (
    NamedFile,
    check_at_least,
    exit_status,
    parse_named_files,
    parse_numbers,
)
from scripts._shared.commands import ROOT, run_child
from scripts._shared.files import atomic_write
from scripts.quickstart.language_model import bigram_bits_per_character

COMMANDS = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "scripts").glob("[a-z]*/[a-z]*.py"))
    if "__main__" in path.read_text(encoding="utf-8")
]
COMMANDS += ["scripts.inspect", "scripts.prepare"]
SLOW = ("numpy", "torch", "fairseq", "sacremoses", "matplotlib")
HELPED = f"""
import runpy, sys
for name in {COMMANDS}:
    sys.argv = [name, "--help"]
    try:
        runpy.run_module(name, run_name="__main__")
    except SystemExit as ended:
        assert ended.code == 0, name
    slow = [module for module in {SLOW} if module in sys.modules]
    assert not slow, f"{{name}} imports {{slow}}"
"""


def test_help_imports_nothing_slow():
    assert len(COMMANDS) > 10
    words = [sys.executable, "-c", HELPED]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_parse_named_files_takes_a_file_with_an_equals_sign_and_no_label_twice(tmp_path):
    odd = tmp_path / "a=b.pt"
    odd.touch()
    assert parse_named_files("--checkpoint", [str(odd)]) == [NamedFile(str(odd), odd)]
    with pytest.raises(ValueError, match="--checkpoint has 'XL' more than once: "):
        parse_named_files("--checkpoint", ["XL=x.pt", "XL=y.pt"])


def test_parse_numbers_returns_them_sorted_within_their_bounds():
    assert parse_numbers("--step", "30,4,30", 0) == [4, 30]
    for text in ("3,,4", "0,3", "nan"):
        with pytest.raises(ValueError, match=f"--step is '{text}': give numbers of at least 1"):
            parse_numbers("--step", text, 1)
    with pytest.raises(ValueError, match="--batch-size is 0: it must be at least 1"):
        check_at_least(1, stride=1, max_tokens=None, batch_size=0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_kill_ends_a_command_as_ctrl_c_does_unless_nohup_set_it_aside(number, capsys):
    before = signal.signal(number, signal.SIG_DFL)
    try:
        assert exit_status(lambda: signal.raise_signal(number), "what is done is kept") == 130
        assert capsys.readouterr().err == "\ninterrupted; what is done is kept\n"
        assert signal.getsignal(number) == signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN)
        assert exit_status(lambda: signal.raise_signal(number)) == 0
    finally:
        signal.signal(number, before)


def test_run_child_gives_a_child_its_input_in_utf_8_and_says_how_one_failed(tmp_path):
    run_child(["cat"], tmp_path / "log", "caf\u00e9\n")
    assert (tmp_path / "log").read_text(encoding="utf-8") == "caf\u00e9\n"
    with pytest.raises(ValueError, match=r"(?s)sh ended with exit status 3: .*\n +no space"):
        run_child(["sh", "-c", "echo no space; exit 3"], tmp_path / "log")


def test_atomic_write_keeps_the_old_file_after_an_error(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def write_half():
        with atomic_write(path) as partial:
            partial.write_text("ne")
            assert path.read_text() == "old"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert ([*tmp_path.iterdir()], path.read_text()) == ([path], "old")


STATE = {"cfg": {"model": {"_name": "a"}, "task": None}, "model": {"weight": torch.arange(4096.0)}}


@pytest.mark.parametrize("archive", [True, False], ids=["archive", "before PyTorch 1.6"])
def test_read_checkpoint_returns_what_was_written_and_names_other_files(tmp_path, archive):
    path = tmp_path / "last.pt"
    torch.save(STATE, path, _use_new_zipfile_serialization=archive)
    state = read_checkpoint(path)
    assert torch.equal(state["model"]["weight"], STATE["model"]["weight"])
    assert checkpoint_options(state, "model") == {"_name": "a"}
    assert checkpoint_options(state, "task") == checkpoint_options(state, "other") == {}
    content = path.read_bytes()
    for cut in (0, 4, 30, 100, len(content) // 2):
        path.write_bytes(content[:cut])
        with pytest.raises(ValueError, match=r"^--checkpoint .*last\.pt .*(cut short|damaged)"):
            read_checkpoint(path)
    os.mkfifo(tmp_path / "pipe")
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as other:
        other.writestr("x.txt", "text")
    for name in ("pipe", "other.zip", "none"):
        with pytest.raises(ValueError, match=f"^--checkpoint .*{name}.*: name one that f"):
            read_checkpoint(tmp_path / name)


def test_bigram_bits_per_character_equals_a_count_by_hand():
    # counts in training, with a newline before the text: 2 each of newline-a, a-b and b-newline
    for test, probabilities in {
        "ab\n": [3 / 5] * 3,
        "aa": [3 / 5, 1 / 5],
        "\nb": [1 / 5] * 2,
    }.items():
        bits = -sum(map(math.log2, probabilities)) / len(test)
        assert bigram_bits_per_character("ab\nab\n", test) == pytest.approx(bits)
