"""Every command refuses a checkpoint with other dictionaries than those of its training."""

import re
import shutil

import pytest

from tests.end_to_end.commands import ALL, USER_DIR, run
from tests.end_to_end.trainings import training_command, translation_command


def reverse(data, folder):
    """Copy a data folder, with the symbols of its dictionaries in reverse order."""
    other = shutil.copytree(data, folder)
    for path in other.glob("dict.*.txt"):
        path.write_text("\n".join(path.read_text().splitlines()[::-1]) + "\n")
    return other


@pytest.mark.parametrize("command", ["generate", "validate", "train", "finetune"])
def test_another_order_of_symbols_is_refused(pairs, trained, tmp_path, command):
    other, new = reverse(pairs, tmp_path / "other"), tmp_path / "new"
    model = shutil.copytree(trained("weighted_transformer"), tmp_path / "own")
    path = model / "checkpoint_last.pt"
    fit = ({"pairs": other}, "weighted_transformer")
    words = {
        "generate": translation_command(other, path),
        "validate": (
            *("fairseq-validate", other, *USER_DIR, "--task", "translation", "--path", path),
            *("--cpu", "--max-tokens", 200, *ALL),
        ),
        "train": training_command(*fit, model, "--max-update", 21),
        "finetune": training_command(*fit, new, "--finetune-from-model", path, "--max-update", 1),
    }[command]
    printed = run(*words, fails=True)
    assert ".pt was trained with another dictionary than the source dictionary of DATA" in printed
    assert not list(new.glob("*.pt"))


def test_folders_of_a_training_have_one_dictionary(pairs, tmp_path):
    same = shutil.copytree(pairs, tmp_path / "same")
    other = reverse(pairs, tmp_path / "other")

    def fit(folder, second):
        corpora = {"pairs": f"{pairs}:{second}"}
        return training_command(corpora, "weighted_transformer", folder, "--max-update", 1)

    run(*fit(tmp_path / "model", same))
    printed = run(*fit(tmp_path / "none", other), fails=True)
    assert re.search(rf"DATA has {pairs}/(\S+) and {other}/\1, which differ: bin", printed)
    assert not list((tmp_path / "none").glob("*.pt"))
