"""A small training of each paper, and helpers to compose commands and read their results."""

import json
import re
from collections.abc import Mapping

import torch

from fairseq_plugins import register
from tests.end_to_end.commands import ALL, USER_DIR

# lets torch's safe loader read fairseq's options
register()

SEGMENTS = "--task segment_language_modeling --tokens-per-sample 8 --batch-size 10"
BLOCKS = "--task language_modeling --tokens-per-sample 16 --batch-size 8"
NARROW = "--decoder-layers 2 --decoder-embed-dim 16 --decoder-attention-heads 2 --dropout 0.1"
# paper: its data, and the options of its model and optimizer
TRAININGS = {
    "transformer_xl": (
        "text",
        # with weights of the published size, so small a model would hardly depend on its past
        f"""{SEGMENTS} --arch transformer_xl {NARROW} --decoder-ffn-embed-dim 32 --mem-len 12
        --init-std 0.3 --optimizer adam --lr 0.005 --clip-norm 0.25""",
    ),
    "all_attention": (
        "text",
        f"""{SEGMENTS} --arch all_attention_lm {NARROW} --persistent-vectors 4 --attention-span 12
        --adaptive-span --span-ramp 4 --span-init 0.5 --criterion segment_loss --span-loss 0.001
        --optimizer adagrad_with_clip --lr 0.05 --adagrad-clip 0.03""",
    ),
    "product_key_memory": (
        "text",
        f"""{BLOCKS} --arch pkm_transformer_lm {NARROW} --decoder-ffn-embed-dim 32
        --memory-layers 1,2 --memory-share-values --memory-output-gate --memory-slots 64
        --memory-heads 2 --memory-knn 4 --memory-query-dim 8
        --optimizer adam_with_memory --lr 0.003 --memory-lr 0.01""",
    ),
    "weighted_transformer": (
        "pairs",
        """--arch weighted_transformer_tiny --max-tokens 200 --share-decoder-input-output-embed
        --encoder-layers 1 --encoder-embed-dim 16 --encoder-ffn-embed-dim 32
        --decoder-layers 1 --decoder-embed-dim 16 --decoder-ffn-embed-dim 32
        --branch-warmup-updates 5 --optimizer adam_with_branch_weights --adam-betas (0.9,0.98)
        --lr 0.005 --criterion label_smoothed_cross_entropy --label-smoothing 0.1""",
    ),
}
EXACT = {"rtol": 0, "atol": 0}
# logged numbers that depend on the machine
_TIMES = ("wps", "ups", "wall", "train_wall", "gb_free")


def training_command(corpora, paper, folder, *options):
    """Return the words of fairseq-train for a paper's training that is saved in a folder."""
    data, model = TRAININGS[paper]
    logs = ("--cpu", "--seed", 1, "--log-format", "json", "--log-interval", 1)
    words = ("fairseq-train", corpora[data], *USER_DIR, *model.split(), *ALL, *logs)
    return (*words, "--save-dir", folder, *options)


def translation_command(data, checkpoint):
    """Return the words of fairseq-generate for a checkpoint of a translation model."""
    return (
        *("fairseq-generate", data, *USER_DIR, "--path", checkpoint, "--cpu", *ALL),
        *("--beam", 2, "--max-len-b", 12),
    )


def logged(printed):
    """Return the numbers that a training logged, except times, by kind and number of updates."""
    numbers = {}
    for kind, line in re.findall(r"\| (train_inner|valid) \| ({.*})$", printed, re.MULTILINE):
        values = {name.removeprefix("valid_"): value for name, value in json.loads(line).items()}
        updates = int(values["num_updates"])
        numbers[kind, updates] = {k: v for k, v in values.items() if k not in _TIMES}
    return numbers


def parameters(folder):
    """Return the weights of the last checkpoint."""
    return torch.load(folder / "checkpoint_last.pt", weights_only=True)["model"]


def assert_equal(one, other, **tolerance):
    """Check that all weights of two models agree."""
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], **tolerance, msg=name)


def _tensors(state, name):
    if isinstance(state, torch.Tensor):
        yield name, state
    parts = state.items() if isinstance(state, Mapping) else ()
    if isinstance(state, list | tuple):
        parts = enumerate(state)
    for part, value in parts:
        if part not in ("metrics", "previous_training_time"):
            yield from _tensors(value, f"{name}/{part}")


def read_tensors(path):
    """Return the tensors of a checkpoint file, except times, by their path in it."""
    return dict(_tensors(torch.load(path, map_location="cpu", weights_only=True), ""))


def assert_refused(status, printed, *named):
    """Check that a command failed with an error that names all of these.

    fairseq's commands print it below a traceback, our own scripts alone.
    """
    assert status, f"it is accepted: {printed[-2000:]}"
    assert status > 0, f"a signal ended it: {printed[-2000:]}"
    error = re.search(r"^(?:error|[\w.]*Error): (.*)", printed, re.MULTILINE | re.DOTALL)
    assert error, printed[-2000:]
    for name in named:
        assert re.search(rf"(?<![\w.])({name})(?!\w)", error[1]), f"{name} is not in: {error[1]}"
