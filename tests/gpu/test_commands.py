"""fairseq's commands on a GPU against a CPU in fp32: training, resuming, scoring, generation."""

import functools
import re

import pytest

from tests.end_to_end.commands import evaluation_command, loss, run
from tests.end_to_end.trainings import TRAININGS, logged, training_command, translation_command

SAVED, UPDATES = 10, 20
# tolerances of losses in nats per token: against fp32 on a CPU in training, against the same run
# in the first update after resuming, against fp32 on a CPU in evaluation
TOLERANCES = {
    "fp32": (0.005, 0.001, 0.001),
    "bf16": (0.1, 0.02, 0.001),
    "fp16": (0.02, 0.005, 0.01),
    "amp": (0.02, 0.002, 0.01),
}
NATS = 0.6931471805599453


def losses(printed):
    updates = sorted((k, v) for k, v in logged(printed).items() if k[0] == "train_inner")
    return [float(values["loss"]) * NATS for _, values in updates]


def train(corpora, paper, folder, device, precision, *options):
    words = training_command(corpora, paper, folder, "--dropout", 0, "--attention-dropout", 0)
    words += ("--max-update", UPDATES, "--disable-validation", "--distributed-world-size", 1)
    if paper == "transformer_xl":
        # the published value, for which the tolerances hold
        words = [*words, "--init-std", 0.02]
    flags = {"fp32": [], "fp16": ["--fp16", "--fp16-no-flatten-grads"]}
    return run(*without_cpu(words, device), *options, *flags.get(precision, [f"--{precision}"]))


def without_cpu(words, device):
    return words if device == "cpu" else [word for word in words if word != "--cpu"]


def words_for(device, precision, words):
    """Adapt the words of a command that loads a checkpoint to a device and precision."""
    half = ["--fp16"] if precision in ("fp16", "amp") else []
    return [*without_cpu(words, device), "--distributed-world-size", 1, *half]


@pytest.fixture(scope="module")
def on_cpu(corpora, tmp_path_factory):
    """Return a function that computes a paper's training losses on the CPU in fp32."""
    folder = tmp_path_factory.mktemp("cpu")
    return functools.cache(
        lambda paper: losses(train(corpora, paper, folder / paper, "cpu", "fp32", "--no-save"))
    )


@pytest.mark.parametrize(
    ("device", "precision"),
    [
        pytest.param("cpu", "bf16", marks=pytest.mark.slow),
        *(pytest.param("cuda", precision, marks=pytest.mark.gpu) for precision in TOLERANCES),
    ],
)
@pytest.mark.parametrize("paper", TRAININGS)
def test_train_resume_evaluate_generate(paper, device, precision, corpora, on_cpu, tmp_path):
    in_training, after, in_evaluation = TOLERANCES[precision]
    saving = ("--save-interval-updates", SAVED, "--no-epoch-checkpoints")
    trained = losses(train(corpora, paper, tmp_path, device, precision, *saving))
    assert len(trained) == UPDATES
    assert trained == pytest.approx(on_cpu(paper), abs=in_training)

    (checkpoint,) = tmp_path.glob(f"checkpoint_*_{SAVED}.pt")
    again = ("--restore-file", checkpoint, "--no-save")
    resumed = losses(train(corpora, paper, tmp_path / "again", device, precision, *again))
    assert resumed[0] == pytest.approx(trained[SAVED], abs=after)
    assert resumed == pytest.approx(trained[SAVED:], abs=in_training)

    data, _ = TRAININGS[paper]
    if paper == "product_key_memory":
        return
    command = translation_command if data == "pairs" else evaluation_command
    words = command(corpora[data], checkpoint)
    here, there = (run(*words_for(d, p, words)) for d, p in ((device, precision), ("cpu", "fp32")))
    if data == "pairs":
        lines, expected = (re.findall(r"^H-\d+\t\S+\t.*$", text, re.M) for text in (here, there))
        assert len(lines) == len(expected) > 0
    else:
        assert loss(here) * NATS == pytest.approx(loss(there) * NATS, abs=in_evaluation)
