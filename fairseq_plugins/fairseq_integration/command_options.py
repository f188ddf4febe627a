"""Explains wrong names of options to fairseq's commands, and refuses options without effect.

If evaluation has no ``--task``, it takes a task of this package from the checkpoint.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import zipfile
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from fairseq import options
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY
from fairseq.tasks import TASK_REGISTRY

from fairseq_plugins.fairseq_integration.error_messages import did_you_mean, flag
from fairseq_plugins.fairseq_integration.safe_loading import options_of

SEGMENTS = "segment_language_modeling"
# why segment language models refuse options of fairseq-generate and fairseq-interactive
REFUSED = {
    "match_source_len": "the source is the prompt, and says nothing about the length of what "
    "follows; give --min-len and --max-len-b",
    "constraints": "a language model has no constrained decoding",
    "print_alignment": "a language model has no source to align its text with",
    "replace_unk": "a language model has no source to copy words from",
    "retain_dropout": "fairseq retains only dropout of its own modules",
    "print_step": "decoding is not iterative",
}
# options without effect in commands of ``SEGMENTS``, and in translation, for docs/options.md
WITHOUT_EFFECT = {
    "train, eval-lm": (
        "num_workers",
        "required_batch_size_multiple",
        "required_seq_len_multiple",
        "skip_invalid_size_inputs_valid_test",
        "update_ordered_indices_seed",
        "grouped_shuffling",
        "curriculum",
        "use_plasma_view",
        "plasma_path",
    ),
    "generate, interactive": (
        "sacrebleu",
        "retain_dropout_modules",
        "decoding_format",
        "iter_decode_*",
        "retain_iter_history",
    ),
    "translation": ("decoding_format", "iter_decode_*", "retain_iter_history"),
}
# options of --task language_modeling, which cuts a text into blocks
OF_BLOCKS = (
    "sample_break_mode",
    "output_dictionary_size",
    "self_target",
    "future_target",
    "past_target",
    "add_bos_token",
    "max_target_positions",
    "shorten_method",
    "shorten_data_split_list",
    "pad_to_fixed_length",
    "pad_to_fixed_bsz",
)


def explain_and_check_options() -> None:
    """Let fairseq's commands explain and refuse options, and take a checkpoint's task."""
    options.parse_args_and_arch = functools.wraps(options.parse_args_and_arch)(
        functools.partial(_parse, options.parse_args_and_arch)
    )


def _parse(
    parse: Callable[..., Any],
    parser: argparse.ArgumentParser,
    input_args: list[str] | None = None,
    *args: Any,
    **given: Any,
) -> Any:
    print_usage_and_exit = parser.error

    def explain(message: str) -> NoReturn:
        hints = list(_find_hints(parser, message))
        if not hints:
            print_usage_and_exit(message)
        # the usage of all options would bury the hints
        parser.exit(2, "".join(f"error: {hint}\n" for hint in hints))

    # fairseq-validate calls this function again from within
    if "error" not in vars(parser):
        parser.error = explain
    _take_task_of_checkpoint(parser, input_args)
    parsed = parse(parser, input_args, *args, **given)
    _refuse(parsed[0] if isinstance(parsed, tuple) else parsed)
    return parsed


def _take_task_of_checkpoint(parser: argparse.ArgumentParser, input_args: list[str] | None) -> None:
    """Make the task of ``--path`` the default, if it is a task of this package."""
    if "--path" not in parser._option_string_actions:
        return
    words = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("--path", "--task"):
        words.add_argument(option)
    given, _ = words.parse_known_args(input_args)
    path = (given.path or "").split(os.pathsep)[0]
    if given.task or not zipfile.is_zipfile(path):
        return
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        task = options_of(state, "task").get("_name")
    # the command will read the file again and say what is wrong
    except Exception:
        return
    if task in TASK_REGISTRY and TASK_REGISTRY[task].__module__.startswith("fairseq_plugins."):
        parser.set_defaults(task=task)


def _refuse(parsed: argparse.Namespace) -> None:
    """Refuse options that the segment task does not support."""
    if getattr(parsed, "task", None) != SEGMENTS:
        return
    for option, reason in REFUSED.items():
        if getattr(parsed, option, None):
            raise ValueError(f"{flag(option)} with --task {SEGMENTS}: {reason}; leave it out")


def _find_hints(parser: argparse.ArgumentParser, message: str) -> Iterator[str]:
    """Yield a hint for each unknown name in a parser's message."""
    arch = re.match(r"argument --arch/-a: invalid choice: '(.*?)' \(", message)
    if arch:
        near = did_you_mean(arch[1], ARCH_MODEL_REGISTRY, 3)
        yield f"--arch {arch[1]} is not a model: {near or 'see docs/presets.md'}"
    if not message.startswith("unrecognized arguments: "):
        return
    for option in re.findall(r"(?<!\S)--[a-z][\w-]*", message):
        name = option[2:].replace("-", "_")
        if name in OF_BLOCKS:
            yield (
                f"{option}: --task {SEGMENTS} reads a text as it is, whole and in order; leave it "
                "out"
            )
        elif "--path" in parser._option_string_actions and _belongs_to_a_model(name):
            yield (
                f"{option} is an option of the model: to change it in a trained one, give "
                f"--model-overrides \"{{'{name}': VALUE}}\""
            )
        else:
            near = did_you_mean(option, parser._option_string_actions, 3)
            yield f"{option} is not an option here: {near or 'leave it out'}"


def _belongs_to_a_model(option: str) -> bool:
    models = [kind for kind in MODEL_DATACLASS_REGISTRY.values() if kind is not None]
    return any(option in getattr(kind, "__dataclass_fields__", ()) for kind in models)
