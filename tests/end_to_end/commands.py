"""fairseq's commands as a user runs them, each in a process of its own."""

import gc
import importlib
import io
import logging
import os
import re
import runpy
import signal
import socket
import sys
import tempfile
import traceback
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.fork_server import FORK_SERVER

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "fairseq_plugins"
USER_DIR = ["--user-dir", str(PLUGIN)]
TASK = [*USER_DIR, "--task", "segment_language_modeling"]
MODEL = [
    *("--arch", "all_attention_lm", "--decoder-layers", "2", "--decoder-embed-dim", "16"),
    *("--decoder-attention-heads", "2", "--persistent-vectors", "4", "--attention-span", "12"),
]
# without the first option, fairseq drops the last batch; worker processes take long to start
ALL = ["--required-batch-size-multiple", "1", "--num-workers", "0"]


def environment(**extra):
    """Return the environment of a command: one thread, so that tests can run in parallel."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **extra}


class Command:
    """A running fairseq command, started like ``fairseq-NAME words`` in ``folder``.

    It is forked from a process that has imported fairseq and the plugin, because the imports take
    longer than most commands. Other modules run like ``python -m name``. ``before`` is a module's
    function that the process calls first. The process leads a group, which ``kill`` kills.
    """

    def __init__(self, name, *words, text="", folder=ROOT, before=None):
        self._files = tempfile.TemporaryDirectory()
        (Path(self._files.name) / "in").write_text(text, encoding="utf-8")
        module = re.sub("^fairseq-", "fairseq_cli.", name).replace("-", "_")
        arguments = (module, list(map(str, words)), self._files.name, folder, environment(), before)
        self._process = FORK_SERVER.Process(target=_run_as_command, args=arguments)
        self._process.start()

    @property
    def printed(self):
        """The output so far."""
        path = Path(self._files.name) / "out"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def runs(self):
        """Return whether the command is still running."""
        return self._process.is_alive()

    def kill(self):
        """Kill the command and its children with a signal that no program can catch."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            self._process.kill()

    def wait(self):
        """Wait for the end; return the exit status, 0 for success, and the output."""
        self._process.join(300)
        if self._process.is_alive():
            self.kill()
            self._process.join()
        with self._files:
            return self._process.exitcode, self.printed


def run(name, *words, text="", folder=ROOT, fails=False, before=None):
    """Run a fairseq command to its end and return what it printed."""
    status, printed = Command(name, *words, text=text, folder=folder, before=before).wait()
    assert (status != 0) == fails, printed[-4000:]
    assert "--- Logging error ---" not in printed
    return printed


@contextmanager
def run_forked(words, log=None, append=False):
    """Do what ``child_process`` of scripts does, without starting a new Python.

    fairseq's commands are forked, and other scripts run in this process.
    """
    command, *arguments = map(str, words)
    if Path(command).name.startswith("fairseq-"):
        printed = run(Path(command).name, *arguments)
    else:
        module, name, *given = arguments
        assert module == "-m"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", [name, *given])
            script = importlib.import_module(name)
            if hasattr(script, "__path__"):
                script = importlib.import_module(f"{name}.__main__")
            assert script.main() == 0
        printed = ""
    if log:
        with log.open("a" if append else "w", encoding="utf-8") as file:
            file.write(printed)
    yield SimpleNamespace(poll=lambda: 0, returncode=0, stdin=io.BytesIO())


def _run_as_command(module, words, files, folder, variables, before):
    """Act as ``python -m module words`` in a folder and environment; files are input and output."""
    os.setsid()
    # the objects from before the fork are not garbage, and take long to scan
    gc.freeze()
    # the command configures logging itself, which has no effect if a handler exists
    logging.root.handlers.clear()
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    os.dup2(os.open(f"{files}/in", os.O_RDONLY), 0)
    os.dup2(os.open(f"{files}/out", os.O_RDWR | os.O_CREAT), 1)
    os.dup2(1, 2)
    # multiprocessing has replaced the input by an empty one
    sys.stdin = os.fdopen(0, encoding="utf-8")
    sys.argv = [module, *words]
    try:
        if before:
            before()
        runpy.run_module(module, run_name="__main__")
    except Exception:
        # print the error as the interpreter does, not as multiprocessing does
        traceback.print_exc()
        sys.exit(1)


def train(data, folder, *options, model=MODEL, workers=1, fails=False):
    """Train a small model by plain SGD in segments of 8, with 4 streams over all workers.

    Return what the first worker printed.
    """
    words = (
        *(data, *TASK, *model, "--tokens-per-sample", 8, "--batch-size", 4 // workers),
        *("--optimizer", "sgd", "--lr", 0.5, "--save-dir", folder),
        *("--log-format", "simple", "--no-epoch-checkpoints", *options),
    )
    if workers == 2:
        return run_together("fairseq-train", *words)
    return run("fairseq-train", *words, fails=fails)


def start_together(name, *words, before=None):
    """Start a command on each of two workers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    words = (
        *("--cpu", "--distributed-backend", "gloo", "--distributed-no-spawn"),
        *("--distributed-world-size", 2, "--distributed-init-method", address, *words),
    )
    ranks = (("--distributed-rank", rank) for rank in (0, 1))
    return [Command(name, *words, *rank, before=before) for rank in ranks]


def run_together(name, *words, before=None):
    """Run a training on two workers; return what the first one printed."""
    workers = start_together(name, "--ddp-backend", "legacy_ddp", *words, before=before)
    (first, printed), (second, printed_too) = (worker.wait() for worker in workers)
    assert (first, second) == (0, 0), f"{printed}\n{printed_too}"[-4000:]
    return printed


def evaluation_command(data, checkpoint, *options):
    """Return the words of fairseq-eval-lm for a checkpoint of a segment language model."""
    return (
        *("fairseq-eval-lm", data, *TASK, "--path", checkpoint, "--gen-subset", "test", "--cpu"),
        *("--no-progress-bar", "--num-workers", 0, "--tokens-per-sample", 8, *options),
    )


def evaluate(data, checkpoint, *options, fails=False):
    """Run fairseq-eval-lm and return what it printed."""
    return run(*evaluation_command(data, checkpoint, *options), fails=fails)


def tokens_evaluated(printed):
    """Return the number of tokens in the log of fairseq-eval-lm."""
    return int(re.search(r"Evaluated ([\d,]+) tokens", printed)[1].replace(",", ""))


def loss(printed):
    """Return the loss in the log of fairseq-eval-lm, in bits per token."""
    return float(re.search(r"Loss \(base 2\): ([\d.]+)", printed)[1])


def log_probabilities(printed):
    """Return the tokens' log-probabilities from --output-word-probs, in nats, in order."""
    return [float(number) for number in re.findall(r"\[(-\d+\.\d+)\]", printed)]
