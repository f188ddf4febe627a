"""Losses of each position of a text with a context of so many tokens, kept in files.

A model computes its context from scratch, without a memory, in windows of c - 1 + S tokens that
predict their last S tokens: with a stride S of 1 each position has exactly c tokens before it, else
c to c + S - 1. (Those near the start of the text have as many as there are.)
"""

import hashlib
import json
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from fairseq.data.indexed_dataset import data_file_path
from torch import device as Device

from fairseq_plugins.segment_language_model.model import SegmentLanguageModel
from scripts._shared.command_line import NamedFile
from scripts._shared.commands import short
from scripts._shared.files import atomic_write
from scripts._shared.scoring import (
    load_language_model,
    load_task,
    load_tokens,
    max_segment,
    model_options,
    score_text,
)

FORGET = {"mem_len": 0, "same_length": False}


@dataclass(frozen=True)
class Windows:
    """How a text is read: which, and how many of its positions, in windows of which stride.

    Args:
        data: folder that fairseq-preprocess wrote.
        split: part of it.
        positions: how many of its first tokens are scored.
        stride: S, tokens that are predicted of a window.
        batch_size: windows at once, from as many equal parts of the text; with a stride above 1 the
            parts decide where windows begin.
    """

    data: Path
    split: str
    positions: int
    stride: int
    batch_size: int


@dataclass
class ContextLosses:
    """Losses of each model and context, measured when they are asked for and kept in a folder.

    Args:
        checkpoints: the models.
        windows: how the text is read.
        folder: where losses are kept.
        device: where they are computed.
    """

    checkpoints: list[NamedFile]
    windows: Windows
    folder: Path
    device: Device
    _models: dict[int, SegmentLanguageModel] = field(default_factory=dict, init=False)
    _losses: dict[tuple[int, int], np.ndarray] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.limits = [context_limit(c, self.windows.stride) for c in self.checkpoints]

    def __call__(self, model: int, context: int) -> np.ndarray:
        """Losses in nats, float32 (positions,), of model number ``model``.

        They are those of ``context`` tokens, or of as many as the model can read. Raises ValueError
        when a file that should keep them cannot be read or holds something else.
        """
        limit = self.limits[model]
        context = context if limit is None else min(context, limit)
        if (model, context) not in self._losses:
            self._losses[model, context] = self._find(model, context)
        return self._losses[model, context]

    def contexts(self, model: int) -> list[int]:
        """Contexts that losses of a model were asked for, rising."""
        return sorted(context for index, context in self._losses if index == model)

    def _find(self, model: int, context: int) -> np.ndarray:
        key = self._key(model, context)
        path = self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.npz"
        if path.exists():
            return self._read(path, key)
        losses = self._measure(model, context)
        with atomic_write(path) as partial, partial.open("wb") as stream:
            np.savez(stream, losses=losses, key=np.array(key))
        return losses

    def _key(self, model: int, context: int) -> str:
        split = data_file_path(str(self.windows.data.resolve() / self.windows.split))
        return json.dumps(
            {
                "checkpoint": _identity(self.checkpoints[model].path),
                "split": _identity(Path(split)),
                "context": context,
                "stride": self.windows.stride,
                "batch_size": self.windows.batch_size,
                "positions": self.windows.positions,
            }
        )

    def _read(self, path: Path, key: str) -> np.ndarray:
        remedy = "remove it, and it is measured anew"
        try:
            with np.load(path, allow_pickle=False) as kept:
                losses, kept_key = kept["losses"], str(kept["key"])
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise ValueError(
                f"{short(path.resolve())} cannot be read ({error}): {remedy}"
            ) from error
        if kept_key != key or losses.shape != (self.windows.positions,):
            raise ValueError(f"{short(path.resolve())} holds losses of something else: {remedy}")
        return losses

    def _measure(self, model: int, context: int) -> np.ndarray:
        windows, checkpoint = self.windows, self.checkpoints[model]
        # a segment's first token has one token before it even without an extended context
        task = load_task(windows.data, windows.stride, context - 1)
        if model not in self._models:
            loaded = load_language_model(checkpoint.path, task, FORGET, self.device)
            self._models[model] = loaded
        tokens = load_tokens(task, windows.split, windows.positions)
        description = f"{checkpoint.label}, context {context}"
        return score_text(self._models[model], task, tokens, windows.batch_size, description)


def _identity(path: Path) -> dict[str, Any]:
    status = path.stat()
    return {"path": str(path), "size": status.st_size, "mtime": status.st_mtime_ns}


def context_limit(checkpoint: NamedFile, stride: int) -> int | None:
    """As much context as positions of a model were trained for, in tokens; None for no limit.

    Raises ValueError when it is less than the tokens that a window predicts.
    """
    places = max_segment(model_options(checkpoint.path))
    if places is None:
        return None
    if places < stride:
        raise ValueError(
            f"--stride is {stride}: {checkpoint.label} was trained on segments of {places} tokens; "
            "give a stride of at most that"
        )
    return places - stride + 1
