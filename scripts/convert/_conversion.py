"""Convert a model of other code to a fairseq checkpoint with its dictionary and options."""

import argparse
import shlex
import warnings
from pathlib import Path
from typing import Any

from fairseq import options as fairseq_options
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_MODEL_REGISTRY
from omegaconf import OmegaConf
from torch import Tensor, nn

from fairseq_plugins.segment_language_model.task import SegmentLanguageModelingTask
from scripts._shared.checkpoints import save_for_new_training
from scripts._shared.commands import short
from scripts._shared.files import new_folder
from scripts.convert import TENSORFLOW
from scripts.convert._models import convert_model
from scripts.convert._options import ForeignConfig, ForeignVocabulary
from scripts.convert._tensorflow import read_bundle
from scripts.convert._tensors import read_tensors
from scripts.prepare._binarize import write_units


def flags(options: dict[str, Any]) -> list[str]:
    """Return a model's options as words of a command line."""
    words = []
    for name, value in options.items():
        if value is not None and value is not False:
            words.append("--" + name.replace("_", "-"))
            words += [] if value is True else [str(value)]
    return words


def build(
    words: list[str], weights: dict[str, Tensor], dictionary: Dictionary
) -> tuple[nn.Module, dict[str, Any]]:
    """Return our model with these options and weights, and fairseq's configuration of it."""
    parsed = fairseq_options.parse_args_and_arch(
        fairseq_options.get_training_parser(),
        ["DATA", "--task", "segment_language_modeling", *words],
    )
    with warnings.catch_warnings():
        # fairseq's own use of hydra causes warnings
        warnings.simplefilter("ignore", UserWarning)
        cfg = convert_namespace_to_omegaconf(parsed)
    task = SegmentLanguageModelingTask(cfg.task, dictionary)
    model = ARCH_MODEL_REGISTRY[cfg.model._name].build_model(cfg.model, task)
    # the original lacks the buffers of fairseq's modules
    model.load_state_dict({**dict(model.named_buffers()), **weights})
    return model, OmegaConf.to_container(cfg, resolve=True, enum_to_str=True)


def save_imported(model: nn.Module, cfg: dict[str, Any], path: Path) -> None:
    """Write a checkpoint of a model and fairseq's configuration of it, for a new training."""
    names = {"criterion_name": "ImportedCriterion", "optimizer_name": "ImportedOptimizer"}
    state = {
        "args": None,
        "cfg": cfg,
        "model": model.state_dict(),
        "criterion": {},
        "optimizer_history": [{**names, "lr_scheduler_state": {}, "num_updates": 0}],
        "task_state": {},
    }
    save_for_new_training(state, path)


def check_new(output: Path, option: str = "--output ") -> None:
    """Refuse a folder with files."""
    if output.is_file() or (output.is_dir() and any(output.iterdir())):
        raise ValueError(f"{option}{short(output)} is there already: name another, or remove it")


def convert(arguments: argparse.Namespace) -> None:
    """Read the files and write the model; the output folder appears only when it is complete."""
    output = arguments.output.resolve()
    check_new(output)
    read_file = read_bundle if arguments.source == TENSORFLOW else read_tensors
    config, vocabulary = ForeignConfig(arguments.config), ForeignVocabulary(arguments.vocab)
    files = config, vocabulary, arguments.source, read_file(arguments.checkpoint)
    architecture, options, weights = convert_model(*files)
    words = ["--arch", architecture, *flags(options)]
    model, cfg = build(words, weights, vocabulary.dictionary)
    unit = arguments.unit or vocabulary.unit
    with new_folder(output) as part:
        save_imported(model, cfg, part / "checkpoint.pt")
        vocabulary.dictionary.save(str(part / "dict.txt"))
        write_units(part, unit)
        (part / "options.txt").write_text(shlex.join(words) + "\n", encoding="utf-8")

    parameters = sum(parameter.numel() for parameter in model.parameters())
    guessed = "" if arguments.unit else f" (if they are not {unit}, give --unit)"
    print(f"{parameters:,} parameters, {len(vocabulary):,} symbols: {unit}{guessed}")
    if unused := ", ".join(sorted(config.unused)):
        print(f"options that do not describe the model or have no effect here: {unused}")
    print(f"written to {short(output)}/checkpoint.pt, dict.txt, units.json and options.txt")
