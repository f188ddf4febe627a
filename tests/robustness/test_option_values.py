"""Numeric options at unreasonable values, and options that do not go together.

A training of two updates refuses them by name before it writes anything, or ends with finite losses
and weights.
"""

import dataclasses
import math
import typing

import pytest

from fairseq_plugins.all_attention.adagrad_with_clip import AdagradWithClipConfig
from fairseq_plugins.all_attention.model import AllAttentionConfig
from fairseq_plugins.product_key_memory.model import MemoryTransformerOptions
from fairseq_plugins.product_key_memory.optimizer import AdamWithMemoryConfig
from fairseq_plugins.segment_language_model.loss import SegmentLossConfig
from fairseq_plugins.segment_language_model.options import SegmentLanguageModelingConfig
from fairseq_plugins.transformer_xl.model import TransformerXLConfig
from fairseq_plugins.weighted_transformer.options import BranchOptions
from tests.end_to_end.commands import call
from tests.end_to_end.trainings import assert_refused, logged, read_tensors, training_command

BILLION = r"1e9|1e\+09|1000000000|1000000000\.0|1,000,000,000"
# values, and how an error may write each; argparse itself accepts only integers for int options
WHOLE = {"-1": r"-1|-1\.0", "0": r"0|0\.0", "1000000000": BILLION}
VALUES = {**WHOLE, "nan": "nan", "inf": "inf"}
# each training, and the dataclasses whose options its command gets
OWNERS = {
    "transformer_xl": (SegmentLanguageModelingConfig, TransformerXLConfig),
    "all_attention": (AllAttentionConfig, SegmentLossConfig, AdagradWithClipConfig),
    "product_key_memory": (MemoryTransformerOptions, AdamWithMemoryConfig),
    "weighted_transformer": (BranchOptions,),
}


def numeric_options(config):
    """Yield flags and values for the numeric options of a dataclass, except fairseq's options."""
    theirs = {
        option.name
        for base in config.__mro__
        if base.__module__.startswith("fairseq.") and dataclasses.is_dataclass(base)
        for option in dataclasses.fields(base)
    }
    types = typing.get_type_hints(config)
    for option in dataclasses.fields(config):
        kinds = {types[option.name], *typing.get_args(types[option.name])}
        ours = option.metadata.get("help") and not str(option.default).startswith("${")
        if ours and kinds & {int, float} and option.name not in theirs:
            for value in VALUES if float in kinds else WHOLE:
                yield f"--{option.name.replace('_', '-')}", value


def names(option):
    """Return a pattern for an option, or for the argument of a layer or optimizer behind it."""
    words = option[2:].split("-")
    arguments = ["_".join(words[start:]) for start in range(len(words))]
    return "|".join([option, *(f"`{name}`" for name in [*arguments, f"num_{words[-1]}"])])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("paper", "option", "value"),
    [
        (paper, *case)
        for paper, configs in OWNERS.items()
        for config in configs
        for case in numeric_options(config)
    ],
)
def test_training_refuses_an_unreasonable_value_or_takes_it(
    corpora, tmp_path, paper, option, value
):
    folder = tmp_path / "model"
    words = training_command(corpora, paper, folder, "--max-update", 2, option, value)
    status, printed = call(*words)
    if not status:
        losses = [float(values["loss"]) for values in logged(printed).values()]
        assert losses
        assert all(map(math.isfinite, losses))
        weights = read_tensors(folder / "checkpoint_last.pt")
        assert all(x.isfinite().all() for name, x in weights.items() if name.startswith("/model"))
    elif (option, value) == ("--init-std", "1000000000"):
        # such large weights give gradients that fairseq refuses with its own message
        assert "gradients are Nan/Inf" in printed
    elif value != "1000000000" or "can't allocate memory" not in printed:
        assert_refused(status, printed, names(option), VALUES[value])
        assert not folder.exists() or not list(folder.iterdir())
