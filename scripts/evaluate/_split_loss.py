"""The mean loss of a whole split under any trained model that may have product-key memories.

Language models over blocks of text (fairseq's task language_modeling) or streams of it
(segment_language_modeling), and translation, where the tokens before are those of the split.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fairseq.checkpoint_utils import load_model_ensemble_and_task
from fairseq.data.data_utils import infer_language_pair
from fairseq.models import BaseFairseqModel
from fairseq.tasks import TASK_REGISTRY, FairseqTask
from fairseq.tasks.language_modeling import LanguageModelingTask
from fairseq.tasks.translation import TranslationTask
from torch import Tensor

from fairseq_plugins.fairseq_integration.checkpoint_files import MisfitError
from fairseq_plugins.python_interface.scoring import score_features
from fairseq_plugins.segment_language_model.streams import load_tokens
from fairseq_plugins.segment_language_model.task import SegmentLanguageModelingTask
from scripts._shared.checkpoints import options_of, read_checkpoint
from scripts._shared.commands import short
from scripts.evaluate._scoring import score_batches

TASKS = (LanguageModelingTask, SegmentLanguageModelingTask, TranslationTask)
# Blocks or pairs of sentences at a time; a stream by itself gives the exact figure of a text.
_BATCH_SIZE = 8


class Reading(NamedTuple):
    """What is read, and how; None for what the model was trained with, or the task has."""

    data: Path
    split: str
    batch_size: int | None = None
    tokens_per_sample: int | None = None
    context_window: int = 0


class Tokens(NamedTuple):
    """How many tokens a split has: those to be scored, and those that an encoder reads."""

    targets: int
    sources: int


def check_inputs(checkpoint: Path, data: Path) -> None:
    """Look at what a measurement is of, before any work.

    Raises ValueError when the checkpoint cannot be used, its task is unknown, no memory is in it or
    the data is no folder of what the task reads.
    """
    label = f"--checkpoint {short(checkpoint)}"
    state = read_checkpoint(checkpoint)
    options = options_of(state, "task")
    task = TASK_REGISTRY.get(options.get("_name"), object)
    if not issubclass(task, TASKS):
        raise ValueError(
            f"{label} holds a model of the task {options.get('_name')!r}: name one of "
            "language_modeling, segment_language_modeling or translation"
        )
    translates = issubclass(task, TranslationTask)
    if not any(weight.endswith("memory.values") for weight in state.get("model") or ()):
        trained = "--encoder-memory-layers or --decoder-memory-layers"
        raise ValueError(
            f"{label} holds a model without product-key memories: name one that was trained with "
            f"{trained if translates else '--memory-layers'}"
        )
    place = f"--data {short(data)}"
    if not data.is_dir():
        raise ValueError(f"{place} is no folder: name the one that fairseq-preprocess wrote")
    dictionaries = ["dict.txt"]
    if translates:
        pair = options.get("source_lang"), options.get("target_lang")
        if None in pair:
            pair = infer_language_pair(str(data))
        if None in pair:
            raise ValueError(
                f"{place} has no pairs of sentences, which the model of {label} translates: name "
                "the folder that it was trained on"
            )
        dictionaries = [f"dict.{language}.txt" for language in pair]
    for name in dictionaries:
        if not (data / name).is_file():
            raise ValueError(
                f"{place} has no {name}, which the model of {label} needs: name the folder that "
                "it was trained on"
            )


def load_model(
    checkpoint: Path, data: Path, device: torch.device
) -> tuple[BaseFairseqModel, FairseqTask]:
    """Trained model, ready to score, and its task over a folder of binarized text.

    Raises ValueError as check_inputs, and when the checkpoint does not fit the data.
    """
    check_inputs(checkpoint, data)
    # translations are scored, not made
    overrides = {"data": str(data), "eval_bleu": False}
    try:
        # fairseq reads the file as check_inputs just did: nothing that runs
        (model,), _, task = load_model_ensemble_and_task([str(checkpoint)], arg_overrides=overrides)
    except RuntimeError as error:
        # torch's own words, of which a model of this package makes a sentence
        own = error.__cause__ if isinstance(error, MisfitError) else None
        reason = str(own or error).splitlines()[-1].strip()
        raise ValueError(
            f"--checkpoint {short(checkpoint)} does not fit --data {short(data)} "
            f"({reason}): use the data that the model was trained with"
        ) from error
    return model.eval().to(device), task


def load_split(task: FairseqTask, model: BaseFairseqModel, reading: Reading) -> Tokens:
    """Have the task load the split, and count its tokens in the file.

    Raises ValueError when there is no such split, or it cannot be read in this way.
    """
    path = reading.data / reading.split
    if isinstance(task, TranslationTask):
        for option in ("tokens_per_sample", "context_window"):
            if value := getattr(reading, option):
                raise ValueError(
                    f"--{option.replace('_', '-')} is {value} for a translation model, which reads "
                    "sentence by sentence: leave it out"
                )
        source, target = task.cfg.source_lang, task.cfg.target_lang
        # either language may be the source of the folder's
        pairs = (f"{source}-{target}", f"{target}-{source}")
        paths = [path.with_name(f"{path.name}.{pair}.{target}") for pair in pairs]
        path = next((path for path in paths if Path(f"{path}.bin").is_file()), paths[0])
    else:
        _set_length(task, model, reading)
    try:
        targets = len(load_tokens(str(path), task.target_dictionary))
        task.load_dataset(reading.split)
    except FileNotFoundError as error:
        raise ValueError(f"--split {reading.split}: {error}") from error
    dataset = task.dataset(reading.split)
    return Tokens(targets, int(sum(dataset.src_sizes)) if hasattr(dataset, "src_sizes") else 0)


def _set_length(task: FairseqTask, model: BaseFairseqModel, reading: Reading) -> None:
    """Have a language model's task cut the text as asked; raises ValueError if it cannot."""
    segments = isinstance(task, SegmentLanguageModelingTask)
    options = task.cfg if segments else task.args
    length, window = reading.tokens_per_sample or options.tokens_per_sample, reading.context_window
    if not segments:
        most = model.max_positions()
    elif model.decoder.absolute_positions is not None:
        most = model.decoder.context.segment - options.extended_context
    else:
        most = None
    if most is not None and length > most:
        raise ValueError(
            f"--tokens-per-sample is {length}: the model was trained with positions for {most} "
            "tokens; give that many at most"
        )
    if not segments and not 0 <= window < length:
        raise ValueError(
            f"--context-window is {window}: it must be at least 0 and less than "
            f"--tokens-per-sample, here {length}, of which it is a part"
        )
    # as fairseq-eval-lm does: a block and its context are as long as a block alone. Streams have
    # no such context, and their task says so
    options.tokens_per_sample = length if segments else length - window


def _batches(task: FairseqTask, model: BaseFairseqModel, reading: Reading) -> Iterator[dict]:
    """Batches of the whole split; those in this process, as contexts go from one to the next."""
    dataset, positions = task.dataset(reading.split), model.max_positions()
    size = reading.batch_size
    if isinstance(task, TranslationTask):
        # what is left out is noticed, and named better
        whole = {"ignore_invalid_inputs": True, "required_batch_size_multiple": 1}
        limits = {"max_sentences": size or _BATCH_SIZE, "max_positions": positions}
        return task.get_batch_iterator(dataset, **limits, **whole).next_epoch_itr(shuffle=False)
    blocks = isinstance(task, LanguageModelingTask)
    return task.eval_lm_dataloader(
        dataset,
        max_tokens=None,
        batch_size=size or (_BATCH_SIZE if blocks else None),
        max_positions=positions,
        num_workers=0,
        data_buffer_size=0,
        context_window=reading.context_window,
    )


@torch.no_grad()
def score_split(
    model: BaseFairseqModel,
    task: FairseqTask,
    reading: Reading,
    targets: int,
    before_batch: Callable[[Tensor], None],
    description: str = "scoring",
) -> float:
    """Mean loss in nats of the tokens of a split that load_split has loaded.

    Args:
        model: what predicts them.
        task: its task.
        reading: the same as for load_split.
        targets: how many there have to be.
        before_batch: is told which of the tokens that a batch brings, without padding, in the order
            in which the decoder holds them, are scored: the others are a context, read again.
        description: what the progress bar says.

    Raises ValueError when not every token was scored once; else as score_batches.
    """
    dictionary = task.target_dictionary
    segments = isinstance(task, SegmentLanguageModelingTask)
    total, scored = 0.0, 0

    def score(batch: dict[str, Any]) -> Tensor:
        net_input, target = batch["net_input"], batch["target"]
        inputs = net_input.get("prev_output_tokens", net_input["src_tokens"])
        wanted = target.ne(dictionary.pad())
        if isinstance(task, LanguageModelingTask) and task.args.add_bos_token:
            # no token of the split
            wanted &= target.ne(dictionary.bos())
        # (B, T) in segment models, (T, B) in fairseq's
        order = (lambda x: x) if segments else torch.t
        before_batch(order(wanted)[order(inputs.ne(dictionary.pad()))])
        if segments:
            features, _ = model.decoder.extract_features(
                inputs, recurrence=net_input.get("recurrence")
            )
        else:
            features, _ = model(**net_input, features_only=True)
        return score_features(model, features, target, wanted)

    device = next(model.parameters()).device
    batches = _batches(task, model, reading)
    for _, losses in score_batches(batches, score, device, targets, description):
        total += losses.double().sum().item()
        scored += len(losses)
    if scored != targets:
        raise ValueError(
            f"{scored:,} tokens were scored of the {targets:,} of --split {reading.split}, so the "
            "figures would be wrong: fairseq leaves out what is longer than the model has "
            "positions for; take those sentences out of the split"
        )
    return total / scored
