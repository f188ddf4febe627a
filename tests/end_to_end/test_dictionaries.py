"""Every command refuses a checkpoint with other dictionaries than those of its training."""

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


def fit(paper, data, folder, *options):
    """Return the words of a training with the data of ``data``."""
    return training_command({"text": data, "pairs": data}, paper, folder, *options)


def finetune(paper, data, path):
    start = ("--finetune-from-model", path, "--max-update", 1)
    return fit(paper, data, path.with_name("new"), *start)


@pytest.mark.parametrize(
    ("paper", "command"),
    [
        (TRANSLATION, lambda paper, data, path: translation_command(data, path)),
        (TRANSLATION, lambda paper, data, path: fit(paper, data, path.parent, "--max-update", 21)),
        (TRANSLATION, finetune),
        (RECURRENT, lambda paper, data, path: evaluation_command(data, path)),
        (MEMORY, finetune),
    ],
    ids=["generate", "train", "finetune", "evaluate", "finetune a memory"],
)
def test_a_command_refuses_a_dictionary_in_another_order(
    corpora, trained, tmp_path, paper, command
):
    data = corpora["pairs" if paper == TRANSLATION else "text"]
    other = reverse(data, tmp_path / "other")
    path = shutil.copytree(trained(paper), tmp_path / "model") / "checkpoint_last.pt"
    assert REFUSED in run(*command(paper, other, path), fails=True)
    with pytest.raises(ValueError, match=REFUSED):
        fairseq_plugins.load(path, other)
    run(*command(paper, data, path))


def test_a_resumed_training_says_why_a_checkpoint_does_not_fit(corpora, trained, tmp_path):
    folder = shutil.copytree(trained(RECURRENT), tmp_path / "model")
    resume = fit(RECURRENT, corpora["text"], folder, "--max-update", 21)
    printed = run(*resume, "--decoder-ffn-embed-dim", 24, fails=True)
    *_, last = printed.strip().splitlines()
    assert last.startswith("ValueError: Cannot load model parameters"), last
    for name in ("checkpoint_last.pt", "size mismatch", "fc1.weight", "more); give the options"):
        assert name in last, last
    resume = fit(RECURRENT, reverse(corpora["text"], tmp_path / "other"), folder)
    *_, last = run(*resume, "--max-update", 21, fails=True).strip().splitlines()
    assert REFUSED in last, last


def test_averages_keep_the_digest(data, trained, tmp_path):
    """scripts.convert.average, and the average of --store-ema, also kept in single precision."""
    paths = sorted(trained(MEMORY).glob("checkpoint_*_*.pt"))[:2]
    mean, ema = tmp_path / "mean.pt", tmp_path / "ema"
    assert average.main([*map(str, paths), "--output", str(mean)]) == 0
    options = ("--store-ema", "--ema-decay", 0.5, "--bf16", "--ema-fp32", "--max-update")
    # twice: the average is restored, too
    for updates in (2, 4):
        run(*fit(MEMORY, data, ema, *options, updates))
    expected = {"source": [], "target": []}
    for path in (paths[0], mean, ema / "checkpoint_last.pt"):
        for name, tensor in read_tensors(path).items():
            if "dictionary_version" in name:
                expected[name.rpartition(".")[2]].append(tensor)
    for digests in expected.values():
        assert len(digests) == 5
        assert all(digest.equal(digests[0]) for digest in digests)
