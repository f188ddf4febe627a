"""fairseq's commands on small data: their functions called in this process, or real processes."""

import importlib
import io
import logging
import multiprocessing
import os
import re
import subprocess
import sys
import traceback
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from fairseq import checkpoint_utils

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
# seconds after which a process counts as hanging
LIMIT = 300


def environment(**extra):
    """Return the environment of a command: one thread, so that tests can run in parallel."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **extra}


def start(*words):
    """Start a command, or a module of this repository like ``python -m``, in a real process."""
    name, *words = map(str, words)
    program = [str(Path(sys.executable).with_name(name))]
    if not name.startswith("fairseq-"):
        program = [sys.executable, "-m", name]
    # a group of processes, which can be killed together
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    options = {"cwd": ROOT, "env": environment(), "text": True, "start_new_session": True}
    return subprocess.Popen([*program, *words], **pipes, **options)


def call(name, *words, text=""):
    """Call the function of a command; return the exit status, 0 for success, and the output.

    The command is one of fairseq's or a module of this repository. ``text`` is its input.
    """
    module = importlib.import_module(re.sub("^fairseq-", "fairseq_cli.", name).replace("-", "_"))
    if hasattr(module, "__path__"):
        module = importlib.import_module(f"{name}.__main__")
    # a process of its own knows no best loss of an earlier training
    vars(checkpoint_utils.save_checkpoint).pop("best", None)
    output, status = io.StringIO(), 0
    handler = logging.StreamHandler(output)
    handler.setFormatter(logging.Formatter("%(asctime)s | %(levelname)s | %(name)s | %(message)s"))
    level, disabled = logging.root.level, logging.root.manager.disable
    with (
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(output),
        redirect_stderr(output),
        warnings.catch_warnings(),
    ):
        # pytest would collect what fairseq, Hydra and torch warn about
        warnings.simplefilter("ignore")
        patch.setattr(sys, "argv", [name, *map(str, words)])
        patch.setattr(sys, "stdin", io.StringIO(text))
        patch.setattr(logging.root, "handlers", [handler])
        logging.root.setLevel(logging.INFO)
        # a script that calls a command in this process logs warnings alone
        logging.disable(logging.NOTSET)
        try:
            status = module.cli_main() if hasattr(module, "cli_main") else module.main()
        except SystemExit as end:
            status = end.code
        except Exception:
            traceback.print_exc()
            status = 1
        finally:
            logging.root.setLevel(level)
            logging.disable(disabled)
    return int(status or 0), output.getvalue()


def run(name, *words, text="", fails=False):
    """Call the function of a command and return what it printed."""
    status, printed = call(name, *words, text=text)
    assert (status != 0) == fails, printed[-4000:]
    assert "--- Logging error ---" not in printed
    return printed


def run_here(words, log=None, text=None):
    """Do in this process what ``run_child`` of scripts does in another one."""
    command, *arguments = map(str, words)
    ours = not Path(command).name.startswith("fairseq-")
    if ours:
        _, command, *arguments = arguments
    printed = run(Path(command).name, *arguments, text=text or "")
    if ours:
        print(printed)
    if log:
        log.write_text(printed, encoding="utf-8")


def prepare_python(folder):
    """Prepare a small library as the corpus of make quickstart, in a folder."""
    # here, because they import the plugin, and a test looks at fairseq without it
    from scripts.prepare import __main__ as preparation
    from scripts.prepare import _binarize

    library = folder.with_name("library")
    library.mkdir()
    for number in range(120):
        source = f"def f{number}(x):\n    x += {number}\n    return x\n"
        (library / f"m{number:03}.py").write_text(source * 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_binarize, "run_child", run_here)
        patch.setattr(preparation.sysconfig, "get_path", lambda name: library)
        words = ["python_source", "--pieces", "60", "--workers", "1", "--output", str(folder)]
        assert preparation.main(words) == 0


def train(data, folder, *options, model=MODEL, workers=1, fails=False):
    """Train a small model by plain SGD in segments of 8, with 4 streams over all workers.

    Return what the first worker printed.
    """
    words = (
        *("fairseq-train", data, *TASK, *model, "--tokens-per-sample", 8),
        *("--batch-size", 4 // workers, "--optimizer", "sgd", "--lr", 0.5, "--save-dir", folder),
        *("--log-format", "simple", "--no-epoch-checkpoints", *options),
    )
    if workers == 2:
        return run_on_two_workers(folder, *words, "--ddp-backend", "legacy_ddp")
    return run(*words, fails=fails)


def run_on_two_workers(folder, *words, before=None, fails=False):
    """Run a command on two workers, copies of this process; return what the first one printed.

    They meet at a file in the folder. ``before`` is a function that each worker calls first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    meeting = folder / "workers"
    meeting.unlink(missing_ok=True)
    words = (
        *(*words, "--cpu", "--distributed-backend", "gloo", "--distributed-no-spawn"),
        *("--distributed-world-size", 2, "--distributed-init-method", f"file://{meeting}"),
    )
    calls = [(*words, "--distributed-rank", rank) for rank in (0, 1)]
    with multiprocessing.get_context("fork").Pool(2, before) as pool:
        results = pool.starmap_async(call, calls, chunksize=1).get(LIMIT)
    printed = [text for _, text in results]
    assert all((status != 0) == fails for status, _ in results), "\n".join(printed)[-4000:]
    return printed[0]


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
    return [float(number) for number in re.findall(r" \[(-?\d+\.\d{6})\]", printed)]
