"""Two workers that talk to each other: this process, and one that it starts."""

import datetime
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.fork_server import FORK_SERVER


def on_two_workers(work: Callable[[int], Any], folder: Path) -> list[Any]:
    """Return what ``work(0)`` gives in this process and ``work(1)`` in another one.

    They are a group of gloo meanwhile.

    Args:
        work: a function of a module, so that the other process finds it.
        folder: an empty one, for the files of the two.
    """
    method = FORK_SERVER.get_start_method()
    other = torch.multiprocessing.start_processes(
        _other_worker, args=(work, str(folder)), nprocs=1, join=False, start_method=method
    )
    try:
        mine = _in_group(work, 0, folder)
    finally:
        while not other.join():
            pass
    return [mine, torch.load(folder / "other.pt")]


def _other_worker(_: int, work: Callable[[int], Any], folder: str) -> None:
    torch.save(_in_group(work, 1, Path(folder)), Path(folder) / "other.pt")


def _in_group(work: Callable[[int], Any], rank: int, folder: Path) -> Any:
    # torch sets one that names the rank, and leaves it there
    hook = sys.excepthook
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'group'}",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=300),
    )
    try:
        return work(rank)
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook
