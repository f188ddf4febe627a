"""The task: what it refuses."""

from types import SimpleNamespace

import pytest
from fairseq import options
from fairseq.dataclass.configs import GenerationConfig
from fairseq.dataclass.initialize import add_defaults
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.tasks.language_modeling import LanguageModelingTask
from omegaconf import OmegaConf

from fairseq_plugins.segment_language_model.task import (
    SegmentLanguageModelingConfig,
    SegmentLanguageModelingTask,
)
from tests import tiny
from tests.recipes import HYDRA

MODELS = ("transformer_xl", "adaptive_span_lm_tiny")
FORGOTTEN = r"^the task is (\w+), .*: give --task segment_language_modeling$"


def make_task():
    cfg = SegmentLanguageModelingConfig(batch_size=4)
    return SegmentLanguageModelingTask(cfg, tiny.dictionary())


@pytest.mark.parametrize("arch", MODELS)
def test_forgotten_task_is_refused_in_a_sentence(arch):
    words = ["data", "--arch", arch, "--tokens-per-sample", "8"]
    with pytest.raises(ValueError, match=FORGOTTEN):
        options.parse_args_and_arch(options.get_training_parser(), words)


@pytest.mark.filterwarnings(HYDRA)
def test_other_task_is_refused_under_hydra():
    cfg = OmegaConf.create(
        {"model": {"_name": "transformer_xl_tiny"}, "task": {"_name": "language_modeling"}}
    )
    add_defaults(cfg)
    OmegaConf.set_struct(cfg, True)
    task = LanguageModelingTask(SimpleNamespace(add_bos_token=False), tiny.dictionary())
    with pytest.raises(ValueError, match=FORGOTTEN):
        task.build_model(cfg.model)


@pytest.mark.filterwarnings(HYDRA)
@pytest.mark.parametrize("arch", MODELS)
def test_segment_length_is_the_tasks(arch):
    words = ["data", "--arch", arch, "--task", "segment_language_modeling"]
    for more, length in (((), 512), (("--tokens-per-sample", "9"), 9)):
        parsed = options.parse_args_and_arch(options.get_training_parser(), [*words, *more])
        cfg = convert_namespace_to_omegaconf(parsed)
        assert (cfg.task.tokens_per_sample, cfg.model.tokens_per_sample) == (length, length)


def test_generator_refuses_what_means_nothing_here():
    options = GenerationConfig(retain_dropout=True)
    with pytest.raises(ValueError, match=r"^--retain-dropout: .*leave it out$"):
        make_task().build_generator([tiny.tiny_model()], options)
