"""A preparation is whole or not there, and knows what it was made from."""

import io
import time
from functools import partial

import pytest
from tqdm import tqdm

from scripts.prepare import __main__ as preparation
from scripts.prepare import _lines
from tests.scripts.prepare.prepared import contents, write_files
from tests.scripts.refusals import refused


@pytest.fixture
def words(tmp_path):
    for language in ("en", "de"):
        write_files(tmp_path, {f"one.{language}": "a small text\n" * 9})
    parts = [
        word for part in ("train", "valid", "test") for word in (f"--{part}", tmp_path / "one")
    ]
    return ("translation", "--source-lang", "en", "--target-lang", "de", *parts, "--workers", 1)


def test_a_second_run_does_nothing_and_another_option_or_text_is_refused(prepare, words, tmp_path):
    assert prepare(*words, "--bpe-size", 9)[0] == 0
    before = contents(tmp_path / "out")
    (tmp_path / "one.de").touch()
    assert prepare(*words, "--bpe-size", 9)[1] == f"{tmp_path}/out: complete\n"
    for option, value, was in (("bpe-size", 8, 9), ("max-length", 7, 250)):
        message = f"{tmp_path}/out was prepared with another --{option} ({was}, now {value})"
        assert refused(prepare(*words, "--bpe-size", 9, f"--{option}", value), message)
    # of the same size
    write_files(tmp_path, {"one.de": "a large text\n" * 9})
    assert refused(prepare(*words, "--bpe-size", 9), "with another --train")
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize(("error", "status"), [(OSError(28, "full"), 1), (KeyboardInterrupt, 130)])
def test_a_stopped_preparation_leaves_nothing_and_starts_again(
    prepare, words, tmp_path, monkeypatch, error, status
):
    def stop(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(preparation, "binarize_pairs", stop)
        assert prepare(*words)[0] == status
    assert not list(tmp_path.glob("out*"))
    # left by a killed run
    write_files(tmp_path / "out.partial-1", {"bin/dict.txt": ""})
    assert prepare(*words)[0] == 0
    assert [path.name for path in tmp_path.glob("out*")] == ["out"]
    assert not (tmp_path / "out" / "raw").exists()


def test_a_folder_with_other_files_is_refused(prepare, words, tmp_path):
    write_files(tmp_path / "out", {"notes.txt": "mine"})
    assert refused(prepare(*words), f"{tmp_path}/out has files")
    assert contents(tmp_path / "out") == {"notes.txt": b"mine"}


def test_a_corpus_is_found_by_name(call):
    status, printed, _ = call(preparation.main, "--list")
    assert (status, "\nenwik8 " in printed) == (0, True)
    assert refused(call(preparation.main, "enwiki8"), "there is no corpus enwiki8", "enwik8?")


def test_progress_shows_what_another_program_has_written(tmp_path, monkeypatch):
    terminal = io.StringIO()
    bar = partial(tqdm, unit_scale=True, disable=False, file=terminal)
    monkeypatch.setattr(_lines, "progress", bar)
    with _lines.folder_progress(tmp_path / "bin"):
        # the first readings find no folder
        time.sleep(1.1)
        write_files(tmp_path, {"bin/train.bin": 2048 * "x", "bin/valid.bin": 2048 * "x"})
        for _ in range(300):
            if "write bin: 4.10kB" in terminal.getvalue():
                return
            time.sleep(0.1)
    pytest.fail(terminal.getvalue())
