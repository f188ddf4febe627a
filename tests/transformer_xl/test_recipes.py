"""The command files of Transformer-XL: as published, and understood by fairseq."""

import pytest

import fairseq_plugins  # noqa: F401 (registers what the commands name)
from tests.command_files import HYDRA, evaluation, of_room, training, write_stand_ins

pytestmark = pytest.mark.filterwarnings(HYDRA)

# batch, segment, dropout, attention dropout, learning rate, warm-up, updates; evaluation: segment,
# memory, clamp
TRANSFORMER_XL = {
    "enwik8_base": (22, 512, 0.1, 0.0, 2.5e-4, 0, 400_000, 80, 2100, 820),
    "enwik8_18l": (22, 512, 0.1, 0.0, 2.5e-4, 0, 400_000, 80, 2100, 820),
    "enwik8_large": (64, 768, 0.15, 0.15, 2.5e-4, 4000, 400_000, 128, 3800, 1000),
    "text8_large": (64, 768, 0.15, 0.15, 2.5e-4, 4000, 400_000, 128, 3800, 1000),
    "wt103_base": (60, 150, 0.1, 0.0, 2.5e-4, 0, 200_000, 64, 640, 400),
    "wt103_large": (128, 384, 0.2, 0.2, 2.5e-4, 16_000, 4_000_000, 128, 1600, 1000),
    "lm1b_base": (224, 32, 0.0, 0.0, 2.5e-4, 20_000, 500_000, 32, 128, None),
    "lm1b_large": (512, 32, 0.05, 0.05, 1e-4, 30_000, 1_200_000, 32, 128, None),
}
OTHERS = ["ptb", "english_characters", "english_words"]


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory):
    return write_stand_ins(tmp_path_factory.mktemp("commands"))


def test_every_command_file_is_tested():
    assert of_room("transformer_xl") == sorted([*TRANSFORMER_XL, *OTHERS])


@pytest.mark.parametrize("name", TRANSFORMER_XL)
def test_transformer_xl_trains_as_published(stand_ins, name):
    batch, segment, dropout, attention, lr, warmup, updates, *_ = TRANSFORMER_XL[name]
    cfg = training(stand_ins, f"transformer_xl/{name}")
    assert (cfg.dataset.batch_size, cfg.task.tokens_per_sample) == (batch, segment)
    assert (cfg.model.dropout, cfg.model.attention_dropout) == (dropout, attention)
    assert (cfg.model.mem_len, cfg.model.positions) == (None, "transformer-xl")
    assert (cfg.optimization.lr, cfg.optimization.max_update) == ([lr], updates)
    assert (cfg.lr_scheduler._name, cfg.lr_scheduler.warmup_updates) == ("cosine", warmup)
    assert (cfg.optimizer._name, cfg.optimization.clip_norm) == ("adam", 0.25)
    assert cfg.model.init_std == (0.005 if name in ("wt103_large", "lm1b_large") else 0.02)
    words_as_symbols = name.startswith(("wt103", "lm1b"))
    criterion = "exact_adaptive_loss" if words_as_symbols else "cross_entropy"
    assert cfg.criterion._name == criterion
    assert cfg.model._name == f"transformer_xl_{name}"


@pytest.mark.parametrize("name", TRANSFORMER_XL)
def test_transformer_xl_is_evaluated_as_published(stand_ins, name):
    *_, segment, memory, clamp = TRANSFORMER_XL[name]
    cfg = evaluation(stand_ins, f"transformer_xl/{name}")
    assert (cfg.task.tokens_per_sample, cfg.dataset.batch_size) == (segment, 1)
    expected = {"mem_len": memory, "same_length": True}
    if clamp:
        expected["clamp_len"] = clamp
    assert eval(cfg.common_eval.model_overrides) == expected
    assert cfg.dataset.gen_subset == "test"


@pytest.mark.parametrize("name", OTHERS)
def test_the_other_command_files_are_understood(stand_ins, name):
    recipe = f"transformer_xl/{name}"
    assert training(stand_ins, recipe).optimization.clip_norm == 0.25
    assert evaluation(stand_ins, recipe).dataset.gen_subset == "test"


def test_the_ptb_recipe_is_as_published(stand_ins):
    cfg = training(stand_ins, "transformer_xl/ptb")
    assert (cfg.task.tokens_per_sample, cfg.task.extended_context) == (70, 70)
    assert (cfg.optimization.lr, cfg.lr_scheduler.min_lr) == ([3e-4], 1e-4)
    assert (cfg.dataset.batch_size, cfg.lr_scheduler.warmup_updates) == (10, 3000)
    assert cfg.optimizer.weight_decay == 1.2e-6
    assert evaluation(stand_ins, "transformer_xl/ptb").task.tokens_per_sample == 10
