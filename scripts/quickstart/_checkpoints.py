"""What the quickstart has to know about fairseq's checkpoint files."""

import shutil
from pathlib import Path
from zipfile import BadZipFile, ZipFile

from scripts._shared.commands import short
from scripts._shared.files import atomic_write


def is_complete(checkpoint: Path) -> bool:
    """Whether a checkpoint file is a whole zip archive, as torch.save writes it."""
    try:
        with ZipFile(checkpoint):
            return True
    except BadZipFile:
        return False


def repair_checkpoints(folder: Path) -> None:
    """Replace copies cut short by Ctrl-C with the newest complete checkpoint, or remove them.

    fairseq copies each checkpoint to checkpoint_best.pt and checkpoint_last.pt, not atomically.
    """
    for leftover in folder.glob("*.tmp"):
        leftover.unlink()
    complete = [path for path in folder.glob("checkpoint_*_*.pt") if is_complete(path)]
    newest = max(complete, key=lambda path: int(path.stem.split("_")[2]), default=None)
    for path in (folder / "checkpoint_best.pt", folder / "checkpoint_last.pt"):
        if not path.exists() or is_complete(path):
            continue
        if newest is None:
            path.unlink()
            print(f"removed {short(path)}: it was cut short and no other is complete")
            continue
        with atomic_write(path) as partial:
            shutil.copyfile(newest, partial)
        print(f"replaced {short(path)}, which was cut short, with {newest.name}")


def training_progress(checkpoint: Path) -> tuple[int, float]:
    """Updates done and seconds trained as a checkpoint records them, zeros without a checkpoint."""
    if not checkpoint.exists():
        return 0, 0.0
    # torch takes seconds to import, a first run does without it until here.
    import torch

    state = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
    updates = state["optimizer_history"][-1]["num_updates"]
    return updates, state["extra_state"]["previous_training_time"]
