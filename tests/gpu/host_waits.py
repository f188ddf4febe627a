"""Count where the host waits for the GPU, by the function that causes it."""

import contextlib
import sys
import warnings
from pathlib import Path

import torch

import fairseq_plugins

PACKAGE = Path(fairseq_plugins.__file__).parent
SPANS_READ = "fairseq_plugins/all_attention/adaptive_span.py read_head_groups"
NORM_READ = "fairseq_plugins/product_key_memory/optimizer.py clip_grad_norm"
# functions that may wait in an update on one worker, as in the table of docs/gpu.md
ROWS_READ = "fairseq_plugins/product_key_memory/values.py row_gradients"
WAITS = {SPANS_READ, NORM_READ, ROWS_READ}


def calling_function(frame):
    """Return file and name of this package's function that called torch, None for others."""
    ours = {"torch", "warnings.py", Path(__file__).name}
    while frame.f_back and ours & set(Path(frame.f_code.co_filename).parts):
        frame = frame.f_back
    file = Path(frame.f_code.co_filename)
    known = PACKAGE in file.parents
    return f"{file.relative_to(PACKAGE.parent)} {frame.f_code.co_name}" if known else None


@contextlib.contextmanager
def counted_waits(waits):
    """Add this package's waits during the block to a counter, by file and function."""

    def note(message, *_):
        if "synchronizing" in str(message) and (name := calling_function(sys._getframe(1))):
            waits[name] += 1

    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
