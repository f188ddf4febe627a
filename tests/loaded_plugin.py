"""What every fairseq command does first, done once: load the plugin, and read and merge options."""

import logging
import sys
import warnings
from argparse import Namespace
from pathlib import Path

from fairseq import options, utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

import tests.quick_hydra  # noqa: F401 (changes Hydra)

# the plugin shortens the errors of fairseq's commands, and tells them by their name
sys.argv = ["fairseq-train"]
utils.import_user_module(Namespace(user_dir=str(Path(__file__).parents[1] / "fairseq_plugins")))
# the first time takes longer: Hydra looks for its plugins
logging.disable()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    parsed = options.parse_args_and_arch(options.get_training_parser(), ["DATA", "--arch", "fconv"])
    convert_namespace_to_omegaconf(parsed)
logging.disable(logging.NOTSET)
