"""On a full or read-only disk existing files stay, and errors of scripts name the file."""

import os
import resource
import shutil
import signal

import pytest

from tests.end_to_end.commands import Command
from tests.end_to_end.trainings import assert_refused, training_command

pytestmark = pytest.mark.slow
NOBODY = 65534


def limit_file_size():
    """Limit the size of each file, like a quota; the command's output is a file, too, and fits."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


def drop_privileges():
    """Become a user without permissions."""
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


@pytest.mark.parametrize("limit", [limit_file_size, drop_privileges])
@pytest.mark.parametrize("command", ["fairseq-train", "convert.average", "prepare.number_names"])
def test_what_cannot_be_written_is_named_and_what_was_there_stays(
    corpora, trained, tmp_path, command, limit
):
    last = trained("transformer_xl") / "checkpoint_last.pt"
    output = tmp_path / "output"
    output.mkdir()
    words = {
        "fairseq-train": training_command(
            *(corpora, "transformer_xl", output, "--max-update", 24, "--save-interval-updates", 2)
        ),
        "convert.average": (
            *("scripts.convert.average", last, last.with_name("checkpoint_1_4.pt")),
            *("--output", output / "average.pt"),
        ),
        "prepare.number_names": (
            *("scripts.prepare.number_names", "--output", output / "x", "--train", 2000),
            *("--valid", 20, "--test", 20),
        ),
    }[command]
    kept = output / "checkpoint_last.pt"
    shutil.copy(last, kept)
    before = kept.read_bytes()
    if limit is drop_privileges:
        output.chmod(0o555)
    status, printed = Command(*words, before=limit).wait()
    output.chmod(0o755)
    assert kept.read_bytes() == before
    if command == "fairseq-train":
        # fairseq's own error, which may leave a part of the new file
        assert status > 0
        return
    assert_refused(status, printed, str(output))
    left = [path.name for path in output.rglob("*") if path != kept]
    assert not [name for name in left if ".tmp" in name or ".partial" in name]
