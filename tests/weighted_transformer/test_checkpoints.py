"""Checkpoints of other readings, of older versions and of fairseq's own transformer."""

import argparse
import itertools
import re

import fairseq.models
import pytest
import torch
from fairseq.dataclass.configs import EMAConfig
from fairseq.models.ema.ema import EMA

from tests.weighted_transformer.tiny import (
    sentences,
    tiny_arguments,
    tiny_as_written,
    tiny_plain_transformer,
    tiny_task,
    tiny_weighted_transformer,
)

RESIDUALS = ("as-written", "sublayers", "networks", "branches")
# options of a checkpoint, and those of the model that it is loaded into
OTHER_READINGS = [
    *(({"residual": one}, {"residual": two}) for one, two in itertools.permutations(RESIDUALS, 2)),
    *(
        ({"residual": residual, "sum": one}, {"residual": residual, "sum": two})
        for residual in RESIDUALS
        for one, two in itertools.permutations(("one", "branches"))
    ),
    *(
        ({"residual": residual, "feed_forward": one}, {"residual": residual, "feed_forward": two})
        for residual in RESIDUALS
        if residual != "sublayers"
        for one, two in itertools.permutations(("slices", "shared"))
    ),
    ({"residual": "networks", "sum": "one"}, {"residual": "branches", "sum": "branches"}),
]


@pytest.mark.parametrize(
    ("saved", "wanted"),
    OTHER_READINGS,
    ids=["-".join(saved.values()) + "-to-" + "-".join(to.values()) for saved, to in OTHER_READINGS],
)
def test_a_checkpoint_of_another_reading_is_refused(saved, wanted):
    trained, asked = (
        {f"branch_{name}": value for name, value in options.items()} for options in (saved, wanted)
    )
    model, other = (tiny_weighted_transformer(**options) for options in (trained, asked))
    state = model.half().state_dict()
    names = [name for name in wanted if saved[name] != wanted[name]]
    given = " and ".join(f"--branch-{name.replace('_', '-')} is {wanted[name]}" for name in names)
    right = " ".join(f"--branch-{name.replace('_', '-')} {saved[name]}" for name in names)
    message = f"{given}, and the checkpoint was trained with {right}: give {right}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        other.load_state_dict(state)
    tiny_weighted_transformer(seed=2, **trained).load_state_dict(state)


@pytest.mark.parametrize("residual", RESIDUALS)
def test_a_checkpoint_that_does_not_tell_its_reading_is_loaded(residual):
    models = [tiny_weighted_transformer(seed, branch_residual=residual).eval() for seed in (1, 2)]
    state = models[0].state_dict()
    del state["reading_version"]
    models[1].load_state_dict(state)
    outs = [model(**sentences())[0] for model in models]
    assert torch.equal(*outs)


@pytest.mark.parametrize(
    ("saved", "wanted"), [("as-written", "sublayers"), ("sublayers", "networks")]
)
def test_its_parts_tell_the_reading_of_an_older_checkpoint(saved, wanted):
    state = tiny_weighted_transformer(branch_residual=saved).state_dict()
    del state["reading_version"]
    message = (
        f"--branch-residual is {wanted}, and the checkpoint was trained with another reading: give "
        "the one that it was trained with, as-written if it is older than this option"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        tiny_weighted_transformer(branch_residual=wanted).load_state_dict(state)


def test_an_exponential_moving_average_of_the_weights_keeps_the_reading():
    """fairseq's --store-ema copies the model, and loads the mean into the copy."""
    model = tiny_weighted_transformer(branch_residual="networks")
    ema = EMA(model, EMAConfig(store_ema=True, ema_decay=0.5))
    reading = ema.get_model().state_dict()["reading_version"].clone()
    ema.step(model)
    assert torch.equal(ema.get_model().state_dict()["reading_version"], reading)


def test_a_plain_checkpoint_is_loaded_as_logits_too():
    plain = tiny_plain_transformer(seed=4).eval()
    model = tiny_weighted_transformer(
        branch_residual="sublayers", branch_sum="branches", branch_parameterization="softmax"
    ).eval()
    model.load_state_dict(plain.state_dict())
    torch.testing.assert_close(model(**sentences())[0], plain(**sentences())[0])


def test_a_plain_checkpoint_is_refused_where_a_part_of_it_would_count():
    model = tiny_weighted_transformer(branch_residual="sublayers", branch_sum="one")
    message = (
        "--branch-sum is one, and the checkpoint is of a plain transformer, of which a part would "
        "be left: give --branch-sum branches"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        model.load_state_dict(tiny_plain_transformer().state_dict())


def test_a_checkpoint_without_these_options_is_as_written():
    asked = tiny_as_written()
    saved = argparse.Namespace(**vars(tiny_arguments()), _name="weighted_transformer")
    built = fairseq.models.build_model(saved, tiny_task(), from_checkpoint=True)
    built.load_state_dict(asked.state_dict())
    assert torch.equal(built.eval()(**sentences())[0], asked.eval()(**sentences())[0])
