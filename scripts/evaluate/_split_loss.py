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
from fairseq.utils import move_to_cuda
from torch import Tensor
from tqdm import tqdm

from fairseq_plugins.segment_language_model.streams import load_tokens
from fairseq_plugins.segment_language_model.task import SegmentLanguageModelingTask
from scripts._shared.commands import short
from scripts._shared.scoring import read_checkpoint, score_features

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
    options = _check_checkpoint(checkpoint)
    _check_data(data, checkpoint, options)


def _check_checkpoint(checkpoint: Path) -> dict[str, Any]:
    """Return the options of the task of a checkpoint whose model has memories."""
    label = f"--checkpoint {short(checkpoint)}"
    state = read_checkpoint(checkpoint)
    cfg = state.get("cfg") if isinstance(state, dict) else None
    options = (cfg or {}).get("task") or {}
    name = options.get("_name")
    task = TASK_REGISTRY.get(name, object)
    if not issubclass(task, TASKS):
        raise ValueError(
            f"{label} holds a model of the task {name!r}: name one of language_modeling, "
            "segment_language_modeling or translation"
        )
    if not any(weight.endswith("memory.values") for weight in state.get("model") or ()):
        raise ValueError(
            f"{label} holds a model without product-key memories: name one that was trained with "
            + (
                "--encoder-memory-layers or --decoder-memory-layers"
                if issubclass(task, TranslationTask)
                else "--memory-layers"
            )
        )
    return options


def load_model(
    checkpoint: Path, data: Path, device: torch.device
) -> tuple[BaseFairseqModel, FairseqTask]:
    """Trained model, ready to score, and its task over a folder of binarized text.

    Raises ValueError when the checkpoint cannot be used, or not with this data.
    """
    check_inputs(checkpoint, data)
    # translations are scored, not made
    overrides = {"data": str(data), "eval_bleu": False}
    try:
        # fairseq reads the file as check_inputs just did: nothing that runs
        (model,), _, task = load_model_ensemble_and_task([str(checkpoint)], arg_overrides=overrides)
    except RuntimeError as error:
        raise ValueError(
            f"--checkpoint {short(checkpoint)} does not fit --data {short(data)} "
            f"({str(error).splitlines()[-1].strip()}): use the data that the model was trained with"
        ) from error
    return model.eval().to(device), task


def _check_data(data: Path, checkpoint: Path, options: dict[str, Any]) -> None:
    names = ["dict.txt"]
    if not data.is_dir():
        raise ValueError(
            f"--data {short(data)} is no folder: name the one that fairseq-preprocess wrote"
        )
    if issubclass(TASK_REGISTRY[options["_name"]], TranslationTask):
        pair = options.get("source_lang"), options.get("target_lang")
        if None in pair:
            pair = infer_language_pair(str(data))
        if None in pair:
            raise ValueError(
                f"--data {short(data)} has no pairs of sentences, which the model of --checkpoint "
                f"{short(checkpoint)} translates: name the folder that it was trained on"
            )
        names = [f"dict.{language}.txt" for language in pair]
    for name in names:
        if not (data / name).is_file():
            raise ValueError(
                f"--data {short(data)} has no {name}, which the model of --checkpoint "
                f"{short(checkpoint)} needs: name the folder that it was trained on"
            )


def load_split(task: FairseqTask, model: BaseFairseqModel, reading: Reading) -> Tokens:
    """Have the task load the split, and count its tokens in the file.

    Raises ValueError when there is no such split, or it cannot be read in this way.
    """
    split, path = reading.split, reading.data / reading.split
    if isinstance(task, TranslationTask):
        _refuse_lengths(reading)
        source, target = task.cfg.source_lang, task.cfg.target_lang
        pairs = [f"{split}.{one}-{other}.{target}" for one, other in
                 ((source, target), (target, source))]  # fmt: skip
        there = (name for name in pairs if (reading.data / f"{name}.bin").is_file())
        path = reading.data / next(there, pairs[0])
    else:
        _set_length(task, model, reading)
    try:
        targets = len(load_tokens(str(path), task.target_dictionary))
        task.load_dataset(split)
    except FileNotFoundError as error:
        raise ValueError(f"--split {split}: {error}") from error
    dataset = task.dataset(split)
    return Tokens(targets, int(sum(dataset.src_sizes)) if hasattr(dataset, "src_sizes") else 0)


def _refuse_lengths(reading: Reading) -> None:
    for option, value in (
        ("--tokens-per-sample", reading.tokens_per_sample),
        ("--context-window", reading.context_window),
    ):
        if value:
            raise ValueError(
                f"{option} is {value} for a translation model, which reads sentence by sentence: "
                "leave it out"
            )


def _set_length(task: FairseqTask, model: BaseFairseqModel, reading: Reading) -> None:
    """Have a language model's task cut the text as asked; raises ValueError if it cannot."""
    segments = isinstance(task, SegmentLanguageModelingTask)
    options = task.cfg if segments else task.args
    length, window = reading.tokens_per_sample or options.tokens_per_sample, reading.context_window
    limited = not segments or model.decoder.absolute_positions is not None
    most = None
    if limited:
        most = (
            model.decoder.context.segment - options.extended_context
            if segments
            else model.max_positions()
        )
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
        epoch = task.get_batch_iterator(
            dataset,
            max_sentences=size or _BATCH_SIZE,
            max_positions=positions,
            # what is left out is noticed, and named better
            ignore_invalid_inputs=True,
            required_batch_size_multiple=1,
        )
        return epoch.next_epoch_itr(shuffle=False)
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

    Raises ValueError when not every token was scored once, FloatingPointError when a loss is not
    finite.
    """
    device = next(model.parameters()).device
    pad = task.target_dictionary.pad()
    segments = isinstance(task, SegmentLanguageModelingTask)
    total, scored = 0.0, 0
    with tqdm(
        total=targets, desc=description, unit=" tokens", leave=False, disable=None
    ) as progress:
        for batch in _batches(task, model, reading):
            batch = move_to_cuda(batch, device=device)
            net_input, target = batch["net_input"], batch["target"]
            inputs = net_input.get("prev_output_tokens", net_input["src_tokens"])
            wanted = target.ne(pad)
            if isinstance(task, LanguageModelingTask) and task.args.add_bos_token:
                # no token of the split
                wanted &= target.ne(task.target_dictionary.bos())
            # (B, T) in segment models, (T, B) in fairseq's
            order = (lambda x: x) if segments else torch.t
            before_batch(order(wanted)[order(inputs.ne(pad))])
            if segments:
                features, _ = model.decoder.extract_features(
                    inputs, recurrence=net_input.get("recurrence")
                )
            else:
                features, _ = model(**net_input, features_only=True)
            losses = score_features(model, features, target, wanted)
            if not losses.isfinite().all():
                raise FloatingPointError(
                    "the loss of a token is not finite: the checkpoint is of a training that "
                    "diverged; use an earlier one"
                )
            total += losses.double().sum().item()
            scored += len(losses)
            progress.update(len(losses))
    if scored != targets:
        raise ValueError(
            f"{scored:,} tokens were scored of the {targets:,} of --split {reading.split}, so the "
            "figures would be wrong: fairseq leaves out what is longer than the model has "
            "positions for; take those sentences out of the split"
        )
    return total / scored
