"""What the check of a GPU does with a model: train, save, resume, evaluate and generate."""

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from fairseq.tasks.fairseq_task import FairseqTask
from torch import Tensor

from scripts._shared.machine import peak_memory, reset_peak_memory, synchronize
from scripts.check._gpu_models import (
    AMP,
    BATCHES,
    COMMON,
    FP16,
    FP32,
    SEGMENTS,
    SMALL_BATCH,
    TINY,
    USER_DIR,
    Batch,
    Model,
)
from scripts.check._gpu_watch import COUNTED, Updates, command, watched

# Updates of a training, after which of them it is saved, and how many of a real size are compared
# with the CPU's.
UPDATES, SAVED, COMPARED = 20, 12, 2
# Words that are generated for each sentence or prompt, the words of a prompt, and prompts.
GENERATED, PROMPT = 16, 8
GENERATION_BATCH = Batch(16, 64)
CPU = torch.device("cpu")
Found = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """Where a row is computed, and its files.

    Args:
        device: that is checked.
        data: folder that ``write_data`` wrote.
        folder: an empty one for the row's own files.
        expected: losses of the CPU in fp32, by the name of the row that found them.
    """

    device: torch.device
    data: Path
    folder: Path
    expected: dict[str, list[float]]


@dataclass
class Trial:
    """A model of a size in a precision, and what becomes of it under fairseq's commands.

    Args:
        model: which one.
        size: of SIZES.
        precision: of PRECISIONS.
        place: where.
    """

    model: Model
    size: str
    precision: str
    place: Place
    # of the updates up to the last, from the beginning
    losses: list[float] = field(default_factory=list)

    def reference(self) -> Found:
        """Losses that all precisions are compared with, on a place of the CPU's in fp32."""
        if self.size == TINY:
            return {"losses": self._train(UPDATES, *self.model.no_dropout, "--no-save").losses()}
        return {"losses": self._compared()}

    def train(self) -> Found:
        """Train and save in between: losses, tokens a second, peak memory, waits of the host."""
        saving = ["--save-interval-updates", str(SAVED), "--no-last-checkpoints"]
        # validation has a memory of its own, which must not disturb training
        words = self.model.no_dropout if self.size == TINY else ["--disable-validation"]
        updates = self._train(UPDATES, *saving, *words)
        peak = peak_memory(self.place.device)
        self.losses = updates.losses()
        found = {
            "training": {"tokens_per_second": updates.speed(), "peak_bytes": peak},
            "overflows": updates.overflows(),
        }
        if self.place.device.type == "cuda":
            found["waits"] = {place: n / COUNTED for place, n in updates.waits.items()}
        return found

    def compare(self) -> Found:
        """The largest difference of a loss from the CPU's in fp32, without dropout."""
        losses = self.losses if self.size == TINY else self._compared()
        expected = self.place.expected.get(f"{self.model.name} {self.size}")
        if expected is None:
            raise ValueError("there is nothing to compare with: the row of the CPU has no losses")
        return {"losses": losses, "difference": _largest_difference(losses, expected)}

    def resume(self) -> Found:
        """How far the losses of a resumed training are from the first one's: first and at most."""
        words = self.model.no_dropout if self.size == TINY else ()
        again = ["--restore-file", self._checkpoint(), "--no-save", "--disable-validation"]
        losses = self._train(UPDATES, *again, *words, before=SAVED).losses()
        expected = self.losses[SAVED:]
        return {
            "resumed_first_difference": abs(losses[0] - expected[0]),
            "resumed_difference": _largest_difference(losses, expected),
        }

    def evaluate(self) -> Found:
        """Score a little, also on the CPU in fp32, and much: loss, tokens a second, peak memory."""
        here = there = self._evaluate("valid", SMALL_BATCH)["loss"]
        if self._differs:
            there = self._evaluate("valid", SMALL_BATCH, compared=True)["loss"]
        found = {"evaluated_loss": here, "evaluated_difference": abs(here - there)}
        return {**found, **self.evaluate_much()}

    def evaluate_much(self) -> Found:
        """Score much: tokens a second and peak memory."""
        scored = self._evaluate("test", self._batch())
        return {"evaluation": {name: scored[name] for name in ("tokens_per_second", "peak_bytes")}}

    def generate(self) -> Found:
        """Generate by beam search of width 1: how many words, and how many the CPU has, too."""
        here = self._generate()
        on_cpu = self._generate(compared=True) if self._differs else here
        if not here or len(here) % GENERATED:
            raise ValueError(f"{len(here)} words are not {GENERATED} for each prompt or sentence")
        alike = sum(word == other for word, other in zip(here, on_cpu, strict=False))
        return {"generated": len(here), "generated_alike": alike}

    @property
    def _differs(self) -> bool:
        """Whether a checkpoint is evaluated in another way than on a CPU in fp32."""
        return self.place.device.type != "cpu" or self.precision in (FP16, AMP)

    def _batch(self) -> Batch:
        """As much as a user would take, where that does not take minutes."""
        on_cpu = self.place.device.type == "cpu" and self.size != TINY
        return SMALL_BATCH if on_cpu else BATCHES[self.size]

    def _compared(self) -> list[float]:
        words = ("--no-save", "--disable-validation", *self.model.no_dropout)
        return self._train(COMPARED, *words, batch=SMALL_BATCH).losses()

    def _checkpoint(self) -> Path:
        (found,) = self.place.folder.glob(f"checkpoint_*_{SAVED}.pt")
        return found

    def _train(
        self, number: int, *more: Any, batch: Batch | None = None, before: int = 0
    ) -> Updates:
        """Train to an update, by default as usual, after updates that were made before."""
        device, model = self.place.device, self.model
        reset_peak_memory(device)
        with watched(device, number - before) as updates:
            command(
                "train",
                *model.data(self.place.data, self.size),
                *COMMON,
                *model.archs[self.size],
                *model.training,
                *model.batch(batch or self._batch()),
                *model.precision(self.precision, device),
                *("--save-dir", self.place.folder, "--no-epoch-checkpoints"),
                *("--max-update", number),
                *more,
            )
        return updates

    def _loading(self, compared: bool) -> list[Any]:
        """Options of commands that load the checkpoint: fairseq has fp32 and fp16 there.

        Args:
            compared: whether it is done on the CPU in fp32, to compare with.
        """
        half = self.precision in (FP16, AMP) and not compared
        on_cpu = compared or self.place.device.type == "cpu"
        return [
            *self.model.data(self.place.data, self.size),
            *USER_DIR,
            *("--path", self._checkpoint(), "--distributed-world-size", "1", "--num-workers", "0"),
            *(["--fp16"] if half else []),
            *(["--cpu"] if on_cpu else []),
        ]

    def _evaluate(self, split: str, batch: Batch, compared: bool = False) -> Found:
        device = CPU if compared else self.place.device
        words = [*self._loading(compared), *self.model.batch(batch)]
        reset_peak_memory(device)
        if self.model.translates:
            found = _validate(words, split, device)
        else:
            log = command("eval_lm", *words, "--gen-subset", split)
            loss = float(re.search(r"Loss \(base 2\): (\S+),", log)[1]) * math.log(2)
            speed = float(re.search(r"Evaluated .* \((\S+) tokens/s\)", log)[1])
            found = {"loss": loss, "tokens_per_second": speed}
        return {**found, "peak_bytes": peak_memory(device)}

    def _generate(self, compared: bool = False) -> list[str]:
        """Words that go on after prompts, or translate sentences, as many for each."""
        given = 0 if self.model.translates else PROMPT
        length = given + GENERATED
        words = [*self._loading(compared), "--gen-subset", "valid", "--beam", "1"]
        words += ["--max-len-a", "0", "--max-len-b", length, "--min-len", length]
        # prompts are what blocks of the text begin with
        words += ["--prefix-size", given, *self.model.batch(GENERATION_BATCH)]
        words += ["--continue-past-eos"] if self.model.task == SEGMENTS else []
        lines = re.findall(r"^H-\d+\t\S+\t(.*)$", command("generate", *words), re.MULTILINE)
        return [word for line in lines for word in line.split()[given:]]


def _largest_difference(losses: list[float], expected: list[float]) -> float:
    off = [abs(loss - other) for loss, other in zip(losses, expected, strict=True)]
    # not of Python, whose max() leaves out what is not a number
    return torch.tensor(off, dtype=torch.double).max().item()


def _validate(words: list[Any], split: str, device: torch.device) -> Found:
    """Score sentences by fairseq-validate."""
    step = FairseqTask.valid_step
    scored: list[tuple[Tensor, int, float]] = []

    def timed(task: FairseqTask, *arguments: Any) -> Any:
        synchronize(device)
        start = time.perf_counter()
        result = step(task, *arguments)
        synchronize(device)
        *_, output = result
        scored.append((output["nll_loss"], output["ntokens"], time.perf_counter() - start))
        return result

    with mock.patch.object(FairseqTask, "valid_step", timed):
        command("validate", *words, "--valid-subset", split)
    losses, tokens, seconds = zip(*scored, strict=True)
    # the first batch warms up, if there are others
    first = min(1, len(scored) - 1)
    speed = sum(tokens[first:]) / sum(seconds[first:])
    return {"loss": float(sum(losses)) / sum(tokens), "tokens_per_second": speed}


def reference(model: Model, size: str, place: Place) -> list[Callable[[], Found]]:
    """What is done on the CPU, for the other rows of a model's size to be compared with."""
    on_cpu = Place(CPU, place.data, place.folder, place.expected)
    return [Trial(model, size, FP32, on_cpu).reference]


def everything(model: Model, size: str, precision: str, place: Place) -> list[Callable[[], Found]]:
    """All that is done with a model, in steps that say what they found."""
    trial = Trial(model, size, precision, place)
    return [trial.train, trial.compare, trial.resume, trial.evaluate, trial.generate]


def speed(model: Model, size: str, precision: str, place: Place) -> list[Callable[[], Found]]:
    """What is done with a model that others' speed is compared with."""
    trial = Trial(model, size, precision, place)
    return [trial.train, trial.evaluate_much]
