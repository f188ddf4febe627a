"""Every command refuses a checkpoint with other dictionaries than those of its training."""

import re
import shutil

import pytest

import fairseq_plugins
from scripts.convert import average
from tests.end_to_end.commands import evaluation_command, run
from tests.end_to_end.trainings import read_tensors, training_command, translation_command

REFUSED = "was trained with another dictionary than the source dictionary of DATA"
TRANSLATION, RECURRENT, MEMORY = "weighted_transformer", "transformer_xl", "product_key_memory"


def reverse(data, folder):
    """Copy a data folder, with the symbols of its dictionaries in reverse order."""
    other = shutil.copytree(data, folder)
    for path in other.glob("dict.*txt"):
        path.write_text("\n".join(path.read_text().splitlines()[::-1]) + "\n")
    return other


def command_words(command, paper, data, path, new):
    """Return the words of a command that reads a checkpoint with the data of ``data``."""
    corpora = {"text": data, "pairs": data}
    if command == "evaluate":
        return evaluation_command(data, path)
    if command == "generate":
        return translation_command(data, path)
    if command == "train":
        return training_command(corpora, paper, path.parent, "--max-update", 21)
    start = ("--finetune-from-model", path, "--max-update", 1)
    return training_command(corpora, paper, new, *start)


@pytest.mark.parametrize(
    ("paper", "command"),
    [
        *((TRANSLATION, command) for command in ("generate", "train", "finetune")),
        (RECURRENT, "evaluate"),
        (MEMORY, "train"),
    ],
)
def test_a_command_refuses_a_dictionary_in_another_order(
    corpora, trained, tmp_path, paper, command
):
    data = corpora["pairs" if paper == TRANSLATION else "text"]
    other, new = reverse(data, tmp_path / "other"), tmp_path / "new"
    path = shutil.copytree(trained(paper), tmp_path / "model") / "checkpoint_last.pt"
    printed = run(*command_words(command, paper, other, path, new), fails=True)
    assert REFUSED in printed
    assert not list(new.glob("*.pt"))
    with pytest.raises(ValueError, match=REFUSED):
        fairseq_plugins.load(path, other)
    run(*command_words(command, paper, data, path, new))


def test_averages_keep_the_digest(data, trained, tmp_path):
    """scripts.convert.average, and the average of --store-ema, also kept in single precision."""
    paths = sorted(trained(MEMORY).glob("checkpoint_*_*.pt"))[:2]
    mean, ema = tmp_path / "mean.pt", tmp_path / "ema"
    assert average.main([*map(str, paths), "--output", str(mean)]) == 0
    options = ("--store-ema", "--ema-decay", 0.5, "--bf16", "--ema-fp32", "--max-update")
    # twice: the average is restored, too
    for updates in (2, 4):
        run(*training_command({"text": data}, MEMORY, ema, *options, updates))
    tensors = read_tensors(ema / "checkpoint_last.pt")
    digests = {name: x for name, x in tensors.items() if "dictionary_version" in name}
    assert len(digests) == 6
    assert all(digests[name].equal(x) for name, x in read_tensors(mean).items() if name in digests)
    for name, value in digests.items():
        assert value.equal(tensors["/model/" + re.sub(".*/", "", name)])
    # the data that the mean was trained on is accepted, and no other
    other = reverse(data, tmp_path / "other")
    for folder, fails in ((data, False), (other, True)):
        words = command_words("finetune", MEMORY, folder, mean, tmp_path / folder.name)
        assert (REFUSED in run(*words, fails=fails)) == fails


def test_training_refuses_folders_with_different_dictionaries(pairs, tmp_path):
    same = shutil.copytree(pairs, tmp_path / "same")
    other = reverse(pairs, tmp_path / "other")

    def fit(folder, second):
        corpora = {"pairs": f"{pairs}:{second}"}
        return training_command(corpora, TRANSLATION, folder, "--max-update", 1)

    run(*fit(tmp_path / "model", same))
    printed = run(*fit(tmp_path / "refused", other), fails=True)
    assert re.search(rf"DATA has {pairs}/(\S+) and {other}/\1, which differ: bin", printed)
    assert not list((tmp_path / "refused").glob("*.pt"))
