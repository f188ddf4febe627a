"""Two workers that talk to each other: this process, and one that it starts."""

import datetime
import sys
from pathlib import Path

import torch
import torch.distributed as dist


def on_two_workers(work, folder):
    """Return the results of ``work(0)`` in this process and ``work(1)`` in another one.

    They form a gloo process group, which needs an empty folder for files.
    """
    arguments = (work, str(folder))
    other = torch.multiprocessing.start_processes(
        _other_worker, args=arguments, nprocs=1, join=False, start_method="fork"
    )
    try:
        mine = _in_group(work, 0, folder)
    finally:
        while not other.join():
            pass
    return [mine, torch.load(folder / "other.pt")]


def _other_worker(_, work, folder):
    torch.save(_in_group(work, 1, folder), Path(folder) / "other.pt")


def _in_group(work, rank, folder):
    # torch sets a hook that names the rank, and does not remove it
    hook = sys.excepthook
    group = {"init_method": f"file://{folder}/group", "rank": rank, "world_size": 2}
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=300), **group)
    try:
        return work(rank)
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook
