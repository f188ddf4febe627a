"""Commands that a program of a campaign starts: forked as it is, for what they would import.

All else is as it is elsewhere: their own processes, streams and logs, and their end with that of
the program.
"""

import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

from scripts._shared import commands
from scripts.check._faults_programs import FORK, ends_within, run_words


class ForkedCommand:
    """A command forked from this process, with what child_process asks of subprocess.Popen.

    Args:
        words: the command's.
        cwd: its working folder.
        env: its environment.
        preexec_fn: is called in it first.
        stdin: not None for a pipe.
        stdout: file for its output; None for this process's.
        stderr: not None to have errors where the output goes.
    """

    def __init__(
        self,
        words: list[str],
        cwd: Path,
        env: dict[str, str],
        preexec_fn: Callable[[], None],
        stdin: int | None = None,
        stdout: IO[bytes] | None = None,
        stderr: int | None = None,
    ) -> None:
        read, self.stdin = None, None
        if stdin is not None:
            read, write = os.pipe()
            self.stdin = os.fdopen(write, "wb")
        sys.stdout.flush()
        sys.stderr.flush()
        name = Path(words[0]).name
        own = [name, *words[1:]] if name.startswith("fairseq-") else list(words[2:])
        written = None if stdout is None else stdout.fileno()
        arguments = (own, cwd, env, preexec_fn, read, written)
        self._process = FORK.Process(target=self._be, args=arguments)
        self._process.start()
        if read is not None:
            os.close(read)

    def _be(
        self,
        words: list[str],
        cwd: Path,
        env: dict[str, str],
        preexec_fn: Callable[[], None],
        read: int | None,
        stdout: int | None,
    ) -> None:
        # a new program has no handlers but Python's own
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        preexec_fn()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if read is not None:
            # else it would wait for an end that it could write itself
            os.close(self.stdin.fileno())
            os.dup2(read, 0)
        if stdout is not None:
            os.dup2(stdout, 1)
            os.dup2(stdout, 2)
        # nor has it what was open, such as files that are locked
        nothing = os.open(os.devnull, os.O_RDWR)
        for name in os.listdir("/proc/self/fd"):
            if 2 < int(name) != nothing:
                os.dup2(nothing, int(name), inheritable=False)
        sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
        os.environ.update(env)
        os.chdir(cwd)
        run_words(words)

    @property
    def returncode(self) -> int | None:
        """Exit status, minus the number of a signal; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """The same."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; raises TimeoutExpired."""
        if not ends_within(self._process, math.inf if timeout is None else timeout):
            raise subprocess.TimeoutExpired("a command", timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self._process.pid, number)

    def __enter__(self) -> "ForkedCommand":
        return self

    def __exit__(self, *error: object) -> None:
        if self.stdin:
            self.stdin.close()
        self.wait()


def fork_commands() -> None:
    """Let the commands that this process starts be forked from it."""
    commands.subprocess = SimpleNamespace(
        Popen=ForkedCommand,
        PIPE=subprocess.PIPE,
        STDOUT=subprocess.STDOUT,
        TimeoutExpired=subprocess.TimeoutExpired,
    )


def changed(module: Any, **constants: Any) -> Callable[[], None]:
    """Be a module's command whose constants are others, instead of what runs the module anew."""

    def inject() -> None:
        fork_commands()
        for name, value in constants.items():
            setattr(module, name, value)
        sys.exit(module.main())

    return inject
