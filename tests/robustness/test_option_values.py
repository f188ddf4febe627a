"""A training refuses unreasonable numbers by the name of their option, before it writes anything.

Each kind of refusal that no test of a model or an optimizer has is here once.
"""

import re

import pytest

from tests.end_to_end.commands import call
from tests.end_to_end.trainings import assert_refused, training_command


@pytest.mark.slow
@pytest.mark.parametrize(
    ("paper", "option", "value"),
    [
        ("transformer_xl", "--init-std", "0"),
        ("transformer_xl", "--init-std", "inf"),
        ("all_attention", "--attention-span", "-1"),
        ("all_attention", "--span-epsilon", "nan"),
        # layers check these by their parameters' names
        ("transformer_xl", "--decoder-attention-heads", "3"),
        ("product_key_memory", "--memory-slots", "50"),
        ("product_key_memory", "--memory-heads", "0"),
        ("product_key_memory", "--memory-query-dim", "-2"),
        ("product_key_memory", "--memory-value-dim", "0"),
        ("product_key_memory", "--memory-query-dropout", "1"),
        ("product_key_memory", "--memory-input-dropout", "-0.5"),
        ("product_key_memory", "--memory-value-dropout", "nan"),
        ("weighted_transformer", "--branch-top-k", "9"),
        ("weighted_transformer", "--branch-lr", "inf"),
        ("weighted_transformer", "--branch-warmup-updates", "0"),
        ("weighted_transformer", "--freeze-branch-weights-after", "-1"),
    ],
)
def test_training_refuses_an_unreasonable_number(corpora, tmp_path, paper, option, value):
    folder = tmp_path / "model"
    words = training_command(corpora, paper, folder, "--max-update", 2, option, value)
    assert_refused(*call(*words), rf"{option} is {re.escape(value)}(\.0)?:")
    assert not folder.exists() or not list(folder.iterdir())
