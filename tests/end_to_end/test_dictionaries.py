"""A checkpoint is used with the dictionaries of its training, in whichever command."""

import shutil

import pytest

from tests.end_to_end.commands import ALL, USER_DIR, evaluate, run

# fairseq's own model, under the plugin
TRANSLATION = (
    *("--task", "translation", "--arch", "transformer_tiny", "--optimizer", "adam"),
    *("--max-tokens", 200),
)
TRAINING = ("--cpu", *ALL, "--disable-validation", "--no-epoch-checkpoints", "--lr", 0.01)


def fit(data, folder, *options, fails=False):
    words = (*USER_DIR, *TRANSLATION, *TRAINING, "--save-dir", folder, *options)
    return run("fairseq-train", data, *words, fails=fails)


def reverse(data, name, folder):
    """A copy of a data folder with the symbols of one dictionary in another order."""
    other = shutil.copytree(data, folder)
    lines = (other / name).read_text().splitlines()
    (other / name).write_text("\n".join(lines[::-1]) + "\n")
    return other


@pytest.fixture(scope="module")
def pairs(make_pairs):
    return make_pairs("en", "de")


@pytest.fixture(scope="module")
def model(pairs, tmp_path_factory):
    """Folder of a translation model after two updates."""
    folder = tmp_path_factory.mktemp("model")
    fit(pairs, folder, "--max-update", 2)
    return folder


@pytest.mark.parametrize(
    ("command", "side"),
    [
        ("generate", "source"),
        ("interactive", "target"),
        ("validate", "source"),
        ("train", "target"),
        ("finetune", "source"),
    ],
)
def test_translation(pairs, model, tmp_path, side, command):
    language = {"source": "en", "target": "de"}[side]
    other = reverse(pairs, f"dict.{language}.txt", tmp_path / "other")
    path = model / "checkpoint_last.pt"
    if command == "train":
        own = shutil.copytree(model, tmp_path / "own")
        printed = fit(other, own, "--max-update", 3, fails=True)
    elif command == "finetune":
        start = ("--finetune-from-model", path, "--max-update", 1)
        printed = fit(other, tmp_path / "new", *start, fails=True)
        assert not list((tmp_path / "new").glob("*.pt"))
    else:
        size = ("--max-tokens", 200) if command == "validate" else ()
        words = (other, *USER_DIR, *TRANSLATION[:2], "--path", path, "--cpu", *size, *ALL)
        printed = run(f"fairseq-{command}", *words, text="the cat\n", fails=True)
    assert f".pt was trained with another dictionary than the {side} dictionary of DATA" in printed


def test_a_text_that_is_scored(data, checkpoint, tmp_path):
    printed = evaluate(reverse(data, "dict.txt", tmp_path / "other"), checkpoint, fails=True)
    assert "was trained with another dictionary than the source dictionary of DATA" in printed


def test_folders_of_a_training_have_one_dictionary(pairs, tmp_path):
    same = shutil.copytree(pairs, tmp_path / "same")
    fit(f"{pairs}:{same}", tmp_path / "model", "--max-update", 1)
    other = reverse(pairs, "dict.de.txt", tmp_path / "other")
    folder = tmp_path / "none"
    printed = fit(f"{pairs}:{other}", folder, "--max-update", 1, fails=True)
    assert f"DATA has {pairs}/dict.de.txt and {other}/dict.de.txt, which differ: bin" in printed
    assert not list(folder.glob("*.pt"))
