r"""Models of the original code as fairseq checkpoints that this package evaluates and trains.

    python -m scripts.convert.checkpoint --source transformer-xl --checkpoint weights.pt \
        --config config.json --vocab vocab.txt --output OUTPUT

--source transformer-xl: a state dict of the PyTorch code, n_layer and so on as --config.
--source transformer-xl-tensorflow: the TensorFlow code's model.ckpt-…, its flags as --config, and
    its cache.pkl as --vocab.
--source adaptive-span: what the adaptive-span code saves; of all-attention too.
--source huggingface-transfo-xl: pytorch_model.bin or model.safetensors, and config.json.

The vocabulary is a text file, a symbol a line, in the order of the model's numbers, or a cache.pkl;
<eos> becomes fairseq's </s>. Writes OUTPUT/checkpoint.pt, OUTPUT/dict.txt, and OUTPUT/options.txt
with the model's options for fairseq-train --finetune-from-model. No file is executed, and where
anything does not fit, all that does not is listed and nothing written.
"""

import argparse
import contextlib
import functools
import os
import shlex
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from fairseq import options as fairseq_options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_MODEL_REGISTRY
from omegaconf import OmegaConf
from torch import Tensor

from fairseq_plugins.segment_language_model.task import SegmentLanguageModelingTask
from scripts._shared.command_line import command_parser, exit_status, make_output_folder
from scripts._shared.commands import short
from scripts.convert._foreign import ForeignConfig, ForeignTensors, ForeignVocabulary, read_tensors
from scripts.convert._models import AdaptiveSpanImport, TensorFlowImport, TransformerXLImport
from scripts.convert._tensorflow import read_bundle

SOURCES = TRANSFORMER_XL, TENSORFLOW, ADAPTIVE_SPAN, HUGGING_FACE = (
    "transformer-xl",
    "transformer-xl-tensorflow",
    "adaptive-span",
    "huggingface-transfo-xl",
)
# More problems than these have one cause, such as a wrong number of layers.
_LISTED = 40
WRITTEN = CHECKPOINT, DICTIONARY, OPTIONS = "checkpoint.pt", "dict.txt", "options.txt"
# follows the names of files that are being written
_UNFINISHED = ".tmp"


def flags(options: dict[str, Any]) -> list[str]:
    """Options of a model as words of a command line."""
    words = []
    for name, value in options.items():
        if value is not None and value is not False:
            words.append("--" + name.replace("_", "-"))
            words += [] if value is True else [str(value)]
    return words


def refuse(problems: list[str]) -> None:
    """Raise ValueError with all problems, if there are any."""
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems[:_LISTED])
        if len(problems) > _LISTED:
            listed += f"\n  - and {len(problems) - _LISTED:,} more"
        raise ValueError(f"the files do not fit together, and nothing was written:\n{listed}")


def build_state(
    words: list[str], weights: dict[str, Tensor], vocabulary: ForeignVocabulary
) -> tuple[dict[str, Any], int]:
    """Content of a fairseq checkpoint, options and weights of a model, and its parameters' number.

    Raises ValueError for options that no model has.
    """
    given = fairseq_options.parse_args_and_arch(
        fairseq_options.get_training_parser(),
        ["DATA", "--task", "segment_language_modeling", *words],
    )
    with warnings.catch_warnings():
        # of fairseq's own use of hydra
        warnings.simplefilter("ignore", UserWarning)
        cfg = convert_namespace_to_omegaconf(given)
    model = ARCH_MODEL_REGISTRY[cfg.model._name].build_model(
        cfg.model, SegmentLanguageModelingTask(cfg.task, vocabulary.dictionary)
    )
    # buffers of fairseq's modules say nothing of the original
    model.load_state_dict({**dict(model.named_buffers()), **weights})
    names = {"criterion_name": "ImportedCriterion", "optimizer_name": "ImportedOptimizer"}
    start = {"epoch": 1, "iterations_in_epoch": 0, "shuffle": False}
    state = {
        "args": None,
        "cfg": OmegaConf.to_container(cfg, resolve=True, enum_to_str=True),
        "model": model.state_dict(),
        "criterion": {},
        "optimizer_history": [{**names, "lr_scheduler_state": {}, "num_updates": 0}],
        "task_state": {},
        "extra_state": {"train_iterator": start, "val_loss": None},
        "last_optimizer_state": None,
    }
    return state, sum(parameter.numel() for parameter in model.parameters())


def write(
    output: Path, state: dict[str, Any], vocabulary: ForeignVocabulary, words: list[str]
) -> None:
    """Write the files, none of which is ever seen half-written.

    Raises ValueError when they cannot be written.
    """
    make_output_folder(output)
    paths = [output / name for name in WRITTEN]
    temporary = [path.with_name(path.name + _UNFINISHED) for path in paths]
    try:
        torch.save(state, temporary[0])
        vocabulary.dictionary.save(str(temporary[1]))
        temporary[2].write_text(shlex.join(words) + "\n", encoding="utf-8")
        # the checkpoint last: while it has no name of its own, the others are no whole model
        for source, path in reversed(list(zip(temporary, paths, strict=True))):
            os.replace(source, path)
    except BaseException as error:
        for path in (*temporary, *paths):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        # what torch.save raises on a full disk
        if isinstance(error, OSError | RuntimeError):
            raise ValueError(
                f"--output {short(output)} cannot be written ({error}): give a folder in a place "
                "with room where you may write"
            ) from error
        raise


def import_checkpoint(arguments: argparse.Namespace) -> None:
    """Read the files, and write the model; raises ValueError, before any output, for misfits."""
    existing = [name for name in WRITTEN if (arguments.output / name).exists()]
    was_killed = (arguments.output / (CHECKPOINT + _UNFINISHED)).exists()
    if existing and not (was_killed and CHECKPOINT not in existing):
        raise ValueError(
            f"--output {short(arguments.output)} has {', '.join(existing)} already: name another "
            "folder, or remove them"
        )
    problems: list[str] = []
    config = ForeignConfig(arguments.config, problems)
    vocabulary = ForeignVocabulary(arguments.vocab, problems)
    read = read_bundle if arguments.source == TENSORFLOW else read_tensors
    found = read(arguments.checkpoint)
    config.compare_with(found.values())
    if arguments.source == ADAPTIVE_SPAN:
        source = AdaptiveSpanImport(config, vocabulary)
    elif arguments.source == TENSORFLOW:
        source = TensorFlowImport(config, vocabulary)
    else:
        source = TransformerXLImport(config, vocabulary, arguments.source == HUGGING_FACE)
    if not config.readable:
        refuse(problems)
    tensors = ForeignTensors(found, problems)
    weights = source.translate(tensors)
    tensors.note_surplus()
    refuse(problems)
    words = ["--arch", source.arch, *flags(source.options())]
    words += ["--tokens-per-sample", str(source.tokens_per_sample)]
    state, parameters = build_state(words, weights, vocabulary)
    write(arguments.output, state, vocabulary, words)
    print(f"{parameters:,} parameters, {len(vocabulary):,} symbols")
    if unread := ", ".join(config.unread()):
        print(f"options that say nothing of the model, or nothing here: {unread}")
    if vocabulary.lacks:
        print(
            f"the vocabulary has no {' and no '.join(vocabulary.lacks)}: evaluation refuses text "
            "with line ends or unknown symbols, respectively"
        )
    output = short(arguments.output.resolve())
    print(f"written to {output}/{CHECKPOINT}, {DICTIONARY} and {OPTIONS}")


def main(arguments: list[str] | None = None) -> int:
    """Command line of the script; returns its exit status."""
    parser = command_parser(__doc__)
    add = functools.partial(parser.add_argument, required=True)
    add("--source", choices=SOURCES, help="the code it is from")
    add("--checkpoint", type=Path, help="the model's weights")
    add("--config", type=Path, help="the model's options, JSON")
    add("--vocab", type=Path, help="the model's symbols, a line each")
    add("--output", type=Path, help="folder to write")
    parsed = parser.parse_args(arguments)
    return exit_status(lambda: import_checkpoint(parsed))


if __name__ == "__main__":
    sys.exit(main())
