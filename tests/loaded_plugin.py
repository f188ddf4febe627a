"""What most of fairseq's commands do first, done once: load the plugin, read and merge options."""

import logging
import sys
import warnings
from argparse import Namespace
from pathlib import Path

import torch
from fairseq import options, utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

import tests.quick_hydra  # noqa: F401 (changes Hydra)


def load_compiled_loops():
    """Have numba load what it has compiled, which takes long.

    On one thread, since others do not survive a fork. The plugin has to be loaded before.
    """
    from tests.product_key_memory.layer import WIDTH, adam_with_memory, make_memory

    torch.set_num_threads(1)
    memory = make_memory()
    optimizer = adam_with_memory(memory)
    optimizer.backward(memory(torch.randn(2, WIDTH)).sum())
    optimizer.step()


# the plugin shortens the errors of fairseq's commands, and tells them by their name
sys.argv = ["fairseq-train"]
utils.import_user_module(Namespace(user_dir=str(Path(__file__).parents[1] / "fairseq_plugins")))
# the first time takes longer: Hydra looks for its plugins, and parses what options have by default
SEGMENTS = ["--task", "segment_language_modeling"]
MODELS = {"transformer_xl": SEGMENTS, "all_attention_lm": SEGMENTS, "weighted_transformer": []}
logging.disable()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for model, task in MODELS.items():
        parser = options.get_training_parser()
        given = options.parse_args_and_arch(parser, ["DATA", "--arch", f"{model}_tiny", *task])
        convert_namespace_to_omegaconf(given)
load_compiled_loops()
logging.disable(logging.NOTSET)
