"""A disk that is full or read-only: an error that names the file, and what was there stays."""

import hashlib
import os
import resource
import shutil
import signal

import pytest

from tests.end_to_end.commands import Command
from tests.robustness.trainings import assert_refused, training

pytestmark = pytest.mark.slow
NOBODY = 65534


def no_room():
    limit_files(0)


def little_room():
    limit_files(20_000)


def limit_files(size):
    """Let no file grow beyond a size, as a quota does; the output is a file, too, and fits."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def be_nobody():
    """Become a user without permissions."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def words_of(corpora, trained, command, output):
    last = trained / "transformer_xl" / "checkpoint_last.pt"
    return {
        "fairseq-train": lambda: training(
            *(corpora, "transformer_xl", output, "--max-update", 12, "--save-interval-updates", 2)
        ),
        "convert.average": lambda: (
            *("scripts.convert.average", last, last.with_name("checkpoint_1_4.pt")),
            *("--output", output / "average.pt"),
        ),
        "prepare.number_names": lambda: (
            *("scripts.prepare.number_names", "--output", output / "x", "--train", 2000),
            *("--valid", 20, "--test", 20),
        ),
        "plot.branch_weights": lambda: (
            *("scripts.plot.branch_weights", "--output", output / "x"),
            *("--checkpoint", trained / "weighted_transformer"),
        ),
    }[command]()


@pytest.mark.parametrize("limit", [little_room, be_nobody])
@pytest.mark.parametrize(
    "command", ["fairseq-train", "convert.average", "prepare.number_names", "plot.branch_weights"]
)
def test_what_cannot_be_written_is_named_and_what_was_there_stays(
    corpora, trained, tmp_path, command, limit
):
    output = tmp_path / "output"
    output.mkdir()
    kept = output / "checkpoint_last.pt"
    shutil.copy(trained / "transformer_xl" / "checkpoint_last.pt", kept)
    before = hashlib.sha256(kept.read_bytes()).digest()
    if limit is be_nobody:
        output.chmod(0o555)
    status, printed = Command(*words_of(corpora, trained, command, output), before=limit).wait()
    output.chmod(0o755)
    assert_refused(status, printed, str(output))
    assert hashlib.sha256(kept.read_bytes()).digest() == before
    left = [path.name for path in output.rglob("*") if path != kept]
    assert not [name for name in left if ".tmp" in name or ".partial" in name]
