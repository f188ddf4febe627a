"""Load the plugin, parse and merge options, load compiled loops: once for all commands."""

import logging
import warnings
from argparse import Namespace
from pathlib import Path

import torch
from fairseq import options, utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

import tests.quick_hydra  # noqa: F401 (changes Hydra)


def load_compiled_loops():
    """Make numba load its compiled loops, which is slow; load the plugin first.

    One thread: other threads do not survive a fork. No gradients: on a machine with a GPU, a
    process that is forked after a gradient computation cannot compute gradients.
    """
    from fairseq_plugins.product_key_memory.memory import ProductKeyMemory

    if torch.get_num_threads() == 1:
        with torch.no_grad():
            ProductKeyMemory(8, slots=64, heads=2, knn=3, query_dim=4)(torch.randn(2, 8))


utils.import_user_module(Namespace(user_dir=str(Path(__file__).parents[1] / "fairseq_plugins")))
# the first time is slower: Hydra searches for its plugins and parses the defaults of options
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
