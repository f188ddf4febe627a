"""Set-up of each test process, and the order of the tests."""

import gc
import os
import random
import signal
import sys

import pytest

# tests run in parallel, and OpenMP threads that wait for each other spin
os.environ.setdefault("OMP_NUM_THREADS", "1")
# started by a shell in the background, the tests and their child processes would ignore Ctrl-C
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    parser.addoption(
        "--kills",
        type=int,
        default=1,
        metavar="N",
        help="how often tests/robustness kills each command (1)",
    )


def pytest_configure(config):
    # xdist would start with the files that have most tests
    config.option.loadscopereorder = False


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    # slow files come first, so that no process is left with one at the end
    slow = ("end_to_end", "robustness", "test_docs.py", "test_tour.py")
    items.sort(key=lambda item: not set(slow) & set(item.path.parts))


def pytest_collection_finish():
    """Exclude imported objects from garbage collection, which would scan them again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Reset random generators and logged metrics: no test depends on those that ran before it."""
    import numpy as np
    import torch

    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    # without a GPU, torch.manual_seed formats a stack trace for each kind of GPU, which is slow
    for seed in (random.seed, np.random.seed, torch.default_generator.manual_seed):
        seed(1)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(1)
    if metrics := sys.modules.get("fairseq.logging.metrics"):
        metrics.reset()
