"""The loss of every token of a split under a language model of this package.

What fairseq-eval-lm averages, token by token: the task cuts the split into streams and segments and
hands each batch the memory of its streams.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq.checkpoint_utils import load_model_ensemble_and_task
from fairseq.utils import move_to_cuda
from torch import Tensor
from tqdm import tqdm

from fairseq_plugins.python_interface.scoring import score_features
from fairseq_plugins.segment_language_model.model import SegmentLanguageModel
from fairseq_plugins.segment_language_model.streams import RunningText
from fairseq_plugins.segment_language_model.task import (
    SegmentLanguageModelingConfig,
    SegmentLanguageModelingTask,
)
from fairseq_plugins.transformer_xl.model import ABSOLUTE
from scripts._shared.checkpoints import load_checkpoint, options_of
from scripts._shared.command_line import check_at_least
from scripts._shared.commands import short


def choose_device(cpu: bool) -> torch.device:
    """Device to compute on: a GPU when there is one, unless the CPU is asked for."""
    return torch.device("cuda" if torch.cuda.is_available() and not cpu else "cpu")


def load_task(
    data: Path, tokens_per_sample: int, extended_context: int = 0
) -> SegmentLanguageModelingTask:
    """Task over a folder of binarized text, with segments of a length in tokens.

    Raises ValueError when there is no dictionary or no such segment.
    """
    segments = {"tokens_per_sample": tokens_per_sample, "extended_context": extended_context}
    options = SegmentLanguageModelingConfig(data=str(data), **segments, dataset_impl=None)
    return SegmentLanguageModelingTask.setup_task(options)


def load_tokens(
    task: SegmentLanguageModelingTask, split: str, max_tokens: int | None = None
) -> np.ndarray:
    """Tokens of a split, (N,), the first ``max_tokens`` of them if that is given.

    Raises ValueError when there is no such split, or none of its tokens is left.
    """
    check_at_least(1, max_tokens=max_tokens)
    try:
        task.load_dataset(split)
    except FileNotFoundError as error:
        raise ValueError(f"--split {split}: {error}") from error
    return task.dataset(split).tokens[:max_tokens]


def model_options(checkpoint: Path) -> dict[str, Any]:
    """Options that the model of a checkpoint was trained with; raises as load_checkpoint."""
    return options_of(load_checkpoint(checkpoint), "model")


def has_absolute_positions(options: dict[str, Any]) -> bool:
    """Whether a model with these options encodes the places of tokens, and so has no memory."""
    return options.get("positions") in ABSOLUTE


def max_segment(options: dict[str, Any]) -> int | None:
    """Tokens of a segment, its context included, that positions were trained for; None: any."""
    if not has_absolute_positions(options):
        return None
    return options["tokens_per_sample"] + options["extended_context"]


def load_language_model(
    checkpoint: Path,
    task: SegmentLanguageModelingTask,
    overrides: dict[str, Any],
    device: torch.device,
) -> SegmentLanguageModel:
    """Trained model, ready to score, with options of it overridden by name.

    Raises ValueError when the checkpoint cannot be used, or not with these options or this data.
    """
    options = model_options(checkpoint)
    unknown = sorted(set(overrides) - set(options))
    if unknown:
        raise ValueError(
            f"--checkpoint {short(checkpoint)}: its model {options['_name']} has no option "
            f"{', '.join(unknown)} to override: leave it out"
        )
    # fairseq reads the file as model_options just did: weights and options, nothing that runs
    (model,), _, _ = load_model_ensemble_and_task(
        [str(checkpoint)], arg_overrides=overrides, task=task
    )
    return model.eval().to(device)


@torch.no_grad()
def score_batch(model: SegmentLanguageModel, batch: dict[str, Any]) -> Tensor:
    """Losses of the tokens that a batch predicts, in nats, row after row: (tokens,).

    The model reads and extends the memory that the batch brings. Raises FloatingPointError when a
    loss is not finite.
    """
    net_input, target = batch["net_input"], batch["target"]
    features, _ = model.decoder.extract_features(
        net_input["src_tokens"], recurrence=net_input.get("recurrence")
    )
    # an extended context is not scored: its probabilities would cost the most where it is long
    return score_features(model, features, target, target.ne(model.decoder.dictionary.pad()))


def score_batches(
    batches: Iterable[dict[str, Any]],
    score: Callable[[dict[str, Any]], Tensor],
    device: torch.device,
    total: int,
    description: str,
) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """Batches with the losses of their tokens in nats, (tokens,), under a progress bar.

    Args:
        batches: as a task's iterator has them.
        score: gives the losses of one.
        device: of the model.
        total: how many tokens there are.
        description: what the bar says.

    Raises FloatingPointError when a loss is not finite.
    """
    with tqdm(total=total, desc=description, unit=" tokens", leave=False, disable=None) as progress:
        for batch in batches:
            batch = move_to_cuda(batch, device=device)
            losses = score(batch)
            if not losses.isfinite().all():
                raise FloatingPointError(
                    "the loss of a token is not finite: the checkpoint is of a training that "
                    "diverged; use an earlier one"
                )
            progress.update(len(losses))
            yield batch, losses


def score_text(
    model: SegmentLanguageModel,
    task: SegmentLanguageModelingTask,
    tokens: np.ndarray,
    batch_size: int,
    description: str = "scoring",
) -> np.ndarray:
    """Loss of each token in nats, in the order of the text: float32 (N,).

    Args:
        model: what predicts them.
        task: cuts the text into segments, with an extended context if it has one.
        tokens: (N,).
        batch_size: number of parallel streams; 1 for the exact figure of the whole text.
        description: what the progress bar says.

    Raises ValueError when the model has a memory and the task an extended context, when there are
    no such streams, or when a token was not scored exactly once; else as score_batches.
    """
    if task.cfg.extended_context > 0 and model.decoder.context.mem_len > 0:
        raise ValueError(
            f"the extended context is {task.cfg.extended_context} tokens for a model with a "
            f"recurrence of {model.decoder.context.mem_len}, which would hold them twice: override "
            "mem_len with 0"
        )
    epoch = task.get_batch_iterator(RunningText(tokens), max_sentences=batch_size)
    streams, batches = epoch.dataset, epoch.next_epoch_itr(shuffle=False)
    losses = np.full(len(tokens), np.nan, dtype=np.float32)
    scored = 0
    device = next(model.parameters()).device
    for batch, found in score_batches(
        batches, lambda batch: score_batch(model, batch), device, len(tokens), description
    ):
        of_items = found.cpu().numpy()
        for item in batch["id"].tolist():
            begin, end = streams.segment_bounds(*divmod(item, streams.num_streams))
            losses[begin:end], of_items = of_items[: end - begin], of_items[end - begin :]
        scored += len(found)
    left_out = int(np.isnan(losses).sum())
    if scored != len(tokens) or left_out:
        raise ValueError(
            f"{scored:,} tokens were scored and {left_out:,} left out of the {len(tokens):,} of "
            "the text, so the figure would be wrong: use the versions of fairseq and of this "
            "plugin that belong together"
        )
    return losses
