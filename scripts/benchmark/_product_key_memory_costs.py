"""What parts of a step of a memory must do at least and hold, and how fast this machine copies.

Shapes: N tokens, H heads, k slots read by a head, K slots, n = √K sub-keys of each half, R = H·k
reads of a token, U rows of values that are read at least once, d model width, d_q query width.
"""

import math
import re
import time
from pathlib import Path
from typing import NamedTuple

import torch

from scripts._shared.machine import synchronize
from scripts.benchmark._baselines import BF16
from scripts.benchmark._product_key_memory_baselines import (
    BACKWARD,
    FIXED,
    FIXED_SEARCHED,
    FORWARD,
    INFERENCE,
    MODELS,
    QUERY_WIDTH,
    SEARCH,
    TRAINING_STEP,
    UPDATE,
    WIDTH,
    MemoryCase,
)

# Far more than any cache holds.
COPIED_BYTES = 1 << 28
COPY_REPEATS = 12


class Cost(NamedTuple):
    """What a part of a step must do at least: bytes that it moves, multiply-adds."""

    moved: int = 0
    multiply_adds: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.moved + other.moved, self.multiply_adds + other.multiply_adds)


def costs(case: MemoryCase, model: str, rows: int, dtype: str) -> dict[str, Cost]:
    """Least costs of each part of a step, were every input read and every result written once.

    A read of a slot has its number, of 8 bytes, and its score; a row of values is moved once,
    however many tokens read it. An update reads gradient, both means and weight, and writes all but
    the gradient. The products: queries N·d·H·d_q, scores N·H·n·d_q, values N·R·d; as many again for
    the gradient of each factor, but of scores only that of the k selected ones is not zero.

    Args:
        case: the sizes.
        model: one of MODELS.
        rows: U.
        dtype: of the weights.
    """
    number = 2 if dtype == BF16 else 4
    activations = case.tokens * WIDTH * number
    if model == MODELS.feed_forward:
        weights = (8 * WIDTH**2 + 5 * WIDTH) * number
        products = 8 * case.tokens * WIDTH**2
        forward = Cost(2 * activations + weights, products)
        backward = Cost(3 * activations + 2 * weights, 2 * products)
        update = Cost(7 * weights)
        return _of_parts(forward, backward, update)
    n, of_queries = math.isqrt(case.slots), case.tokens * case.heads * QUERY_WIDTH
    weights = case.parameters * number
    found = case.reads * (8 + number)
    values = rows * WIDTH * number
    search = Cost(activations + weights + found, of_queries * (WIDTH + n))
    read = Cost(found + values + activations, case.reads * WIDTH)
    unread = Cost(
        # the gradient that comes in; those of scores and rows
        activations + found + values + case.reads * number + values + 8 * rows,
        2 * case.reads * WIDTH,
    )
    unsearch = Cost(
        found + 2 * activations + 2 * weights, 2 * of_queries * (WIDTH + min(case.knn, n))
    )
    of_rows = Cost(7 * values + 8 * rows)
    parts = _of_parts(search + read, unread + unsearch, of_rows + Cost(7 * weights))
    return {
        SEARCH: search,
        **parts,
        FIXED: read + unread + of_rows,
        FIXED_SEARCHED: parts[TRAINING_STEP],
    }


def _of_parts(forward: Cost, backward: Cost, update: Cost) -> dict[str, Cost]:
    return {
        FORWARD: forward,
        BACKWARD: backward,
        UPDATE: update,
        TRAINING_STEP: forward + backward + update,
        INFERENCE: forward,
    }


def copy_rate(device: torch.device) -> float:
    """Bytes a second that a copy reads and writes together, the best of some."""
    source = torch.ones(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    seconds = []
    for _ in range(COPY_REPEATS):
        synchronize(device)
        started = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return 2 * COPIED_BYTES / min(seconds)


def free_memory(device: torch.device) -> int:
    """Bytes that are free: of the GPU's memory, or of the machine's on a CPU."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    text = Path("/proc/meminfo").read_text(encoding="utf-8")
    return 1024 * int(re.search(r"^MemAvailable:\s*(\d+) kB", text, re.MULTILINE)[1])


def state_bytes(case: MemoryCase, model: str, dtype: str) -> int:
    """Bytes that training a entry takes beside the table of values."""
    table, number = case.slots * WIDTH, 2 if dtype == BF16 else 4
    return {
        # two means in single precision, and a table in single precision beside another
        MODELS.ours: (3 if dtype == BF16 else 2) * 4 * table,
        # two means, the gradient, and as much again while it is updated
        MODELS.dense: 4 * number * table,
        # two means, and three times a gradient for each read
        MODELS.sparse: number * (2 * table + 3 * case.reads * WIDTH),
        MODELS.feed_forward: 0,
    }[model]
