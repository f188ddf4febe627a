"""Builds .venv with exactly the versions that requirements/development.txt pins.

The syntax is Python 2.7's, for a Python that is too old to be told so in a sentence.
"""

from __future__ import print_function

import contextlib
import functools
import glob
import hashlib
import importlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time

ROOT = os.path.realpath(os.path.join(os.path.dirname(__file__), os.pardir))
OLDEST, NEWEST = (3, 10), (3, 13)

# What has to be there before sources are compiled against it.
BUILD_TOOLS = ("setuptools", "wheel", "ninja", "Cython", "numpy", "packaging")
COMPILED = (("fairseq-fixed", "2 minutes"), ("fastBPE", "20 seconds"))

# Part of the stamp: raise it when the stages below change, and every .venv is built anew.
PLAN = 1

# What pip says, in lower case, when it can't get a package.
NETWORK_SIGNS = (
    "could not find a version",
    "no matching distribution",
    "max retries exceeded",
    "newconnectionerror",
    "nameresolutionerror",
    "temporary failure in name resolution",
    "network is unreachable",
    "connection refused",
    "connection reset",
    "timed out",
)


class SetUpError(Exception):
    """Set-up can't go on; the message is what the user reads."""


def say(text, end="\n"):
    """Prints at once, also into a pipe."""
    print(text, end=end)
    sys.stdout.flush()


# What set-up needs of the machine. Each function returns the sentence on what is missing, or None.


def python_problem(version):
    """Whether this version of Python is one that the pins are for."""
    if OLDEST <= tuple(version[:2]) <= NEWEST:
        return None
    return (
        "Python {}.{} to {}.{} is needed and this is Python {}.{}: install one of those and name "
        "it, for example `make test PYTHON=python3.11`."
    ).format(*(OLDEST + NEWEST + tuple(version[:2])))


def compiler_problem():
    """Whether fairseq and fastBPE, which are C++ sources, can be compiled."""
    for language, names in (("C", ("cc", "gcc")), ("C++", ("c++", "g++"))):
        if not any(shutil.which(name) for name in names):
            return (
                "A {} compiler is needed and neither {} nor {} is on PATH: install one "
                "(Debian/Ubuntu: apt install g++; macOS: xcode-select --install)."
            ).format(language, *names)
    return None


def headers_problem():
    """Whether compiled sources find Python's headers."""
    header = os.path.join(sysconfig.get_paths()["include"], "Python.h")
    if os.path.isfile(header):
        return None
    return (
        "Python's headers are needed and {} is not there: install them "
        "(Debian/Ubuntu: apt install python{}.{}-dev)."
    ).format(header, *sys.version_info[:2])


def venv_problem():
    """Whether Python's own tools for virtual environments are installed."""
    try:
        importlib.import_module("venv")
        importlib.import_module("ensurepip")
    except ImportError as error:
        return (
            "Python's modules venv and ensurepip are needed ({}): install them "
            "(Debian/Ubuntu: apt install python{}.{}-venv)."
        ).format(error, *sys.version_info[:2])
    return None


def require(problem):
    """Ends the set-up if there is a problem."""
    if problem:
        raise SetUpError(problem)


# The state of .venv: no stamp (anything may be in it), "bare" (Python and pip), "complete".


def read_pins(root):
    """The lines of the pins file that name a version."""
    with open(os.path.join(root, "requirements", "development.txt")) as pins_file:
        lines = [line.split("#")[0].strip() for line in pins_file]
    return [line for line in lines if line]


def name_of(pin):
    """The package's name in a pin."""
    return pin.split("==")[0].strip()


def select(pins, names):
    """The pins of these packages."""
    return [pin for pin in pins if name_of(pin) in names]


def identity_of(venv, pins):
    """What has to stay the same for a .venv to stay in use."""
    # The ABI tag tells Python's version and the machine's architecture; the scripts in .venv/bin
    # hold its path, so that it can't be used from elsewhere.
    parts = "\n".join([str(PLAN), sysconfig.get_config_var("SOABI"), venv, "\n".join(pins)])
    return hashlib.sha256(parts.encode("utf-8")).hexdigest()


def stamp_path(venv):
    """Where the state of a .venv is kept."""
    return os.path.join(venv, "set_up.stamp")


def read_stamp(venv):
    """The identity and the state that were last written, or None."""
    try:
        with open(stamp_path(venv)) as stamp:
            return tuple(stamp.read().split())
    except OSError:
        return None


def write_stamp(venv, identity, state):
    """Replaces the stamp in one step, so that it is never half written."""
    unfinished = stamp_path(venv) + ".new"
    with open(unfinished, "w") as stamp:
        stamp.write("{} {}\n".format(identity, state))
    os.replace(unfinished, stamp_path(venv))


def python_of(venv):
    """The Python of a .venv."""
    return os.path.join(venv, "bin", "python")


def pip_runs(venv):
    """Whether the Python and the pip of a .venv can be started."""
    command = [python_of(venv), "-m", "pip", "--version"]
    try:
        subprocess.check_output(command, stderr=subprocess.STDOUT, env=child_environment())
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def remove(venv):
    """Removes a .venv, be it a directory, a link to one, or a file."""
    if not os.path.lexists(venv):
        return
    say("Removing the unfinished or outdated .venv.")
    if os.path.isdir(venv) and not os.path.islink(venv):
        shutil.rmtree(venv)
    else:
        os.remove(venv)


def forget_half_installed(venv):
    """Makes pip install again what it was interrupted at."""
    # pip takes a package with a dist-info directory for installed, but writes the INSTALLER file
    # in there only after the package's own files.
    for info in glob.glob(os.path.join(venv, "lib", "python*", "site-packages", "*.dist-info")):
        if not os.path.exists(os.path.join(info, "INSTALLER")):
            shutil.rmtree(info)


# Running pip.


def base_python():
    """The Python to build with, never .venv's own: that one is about to be removed."""
    in_venv = sys.prefix != sys.base_prefix
    return os.path.realpath(sys.executable) if in_venv else sys.executable


def child_environment():
    """The environment of the commands: without what would mix other packages or CUDA into .venv."""
    # With CUDA_HOME set, fairseq compiles CUDA kernels, which takes nvcc of torch's CUDA version.
    unwanted = ("PYTHONPATH", "PYTHONHOME", "CUDA_HOME")
    return {name: value for name, value in os.environ.items() if name not in unwanted}


def run(log_path, lock, command):
    """Runs a command, its output added to the log; returns its exit status and that output."""
    with open(log_path, "ab+") as log:
        start = log.seek(0, os.SEEK_END)
        # In a session of its own, Ctrl-C doesn't reach the command, and `end` ends it with its
        # compilers. It holds the lock too: should this script be killed, the next one waits for it.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=child_environment(),
            pass_fds=(lock.fileno(),),
            start_new_session=True,
        )
        try:
            wait_visibly(process)
        except KeyboardInterrupt:
            end(process)
            raise
        log.seek(start)
        return process.returncode, log.read().decode("utf-8", "replace")


def wait_visibly(process):
    """Waits for a process; a terminal shows the seconds meanwhile."""
    start = time.time()
    while True:
        try:
            process.wait(timeout=1)
            break
        except subprocess.TimeoutExpired:
            if sys.stdout.isatty():
                say("\r      {:.0f} s".format(time.time() - start), end="")
    if sys.stdout.isatty():
        say("\r            \r", end="")


def end(process):
    """Ends a command and all that it started: pip may clean up first, but for 10 seconds only."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        os.killpg(process.pid, signal.SIGKILL)


def is_network_failure(output):
    """Whether pip gave up because it could not get a package."""
    # pip also warns of each connection that it tries again, perhaps with success.
    lines = [line.lower() for line in output.splitlines() if not line.startswith("WARNING")]
    return any(sign in line for line in lines for sign in NETWORK_SIGNS)


def failure_message(title, output):
    """What the user reads when a stage has failed."""
    if is_network_failure(output):
        return (
            "pip could not get the packages of '{}': check the network connection and pip's index "
            "settings, then run the same command again (pip's log: .venv/set_up.log)."
        ).format(title)
    last_lines = "\n".join(output.splitlines()[-15:])
    return "'{}' failed; the last lines of .venv/set_up.log:\n{}".format(title, last_lines)


# The stages.


def pip_install(venv, *arguments):
    """The command that installs into a .venv."""
    command = [python_of(venv), "-m", "pip", "install", "--disable-pip-version-check"]
    command.extend(["--no-input", "--progress-bar", "off", "--retries", "2"])
    command.extend(arguments)
    return command


def bare_stage(venv, pins):
    """The stage that makes a new .venv: its title, about how long it takes, its commands."""
    (pip,) = select(pins, ["pip"])
    commands = [[base_python(), "-m", "venv", venv], pip_install(venv, pip)]
    return ".venv with " + titled(pip), "10 seconds", commands


def package_stages(root, venv, pins):
    """The stages that fill a bare .venv."""
    (torch,) = select(pins, ["torch"])
    tools = select(pins, BUILD_TOOLS)
    # torch comes with what it needs: on Linux, the CUDA libraries of the versions that it names.
    constraints = os.path.join(root, "requirements", "development.txt")
    yield (
        titled(torch) + " and the build tools",
        "1 minute, more where CUDA libraries are downloaded",
        [pip_install(venv, "--constraint", constraints, torch, *tools)],
    )
    compiled = [name for name, _ in COMPILED]
    others = [pin for pin in pins if name_of(pin) not in compiled]
    yield (
        "the other ready-made packages",
        "1 minute",
        [pip_install(venv, "--no-deps", "--no-build-isolation", *others)],
    )
    for name, duration in COMPILED:
        (pin,) = select(pins, [name])
        # Neither a ready-made nor a cached build will do: it has to fit the pinned torch.
        fresh = ["--no-binary", name, "--no-cache-dir"]
        yield (
            titled(pin) + ", compiled here",
            duration,
            [pip_install(venv, "--no-deps", "--no-build-isolation", pin, *fresh)],
        )


def titled(pin):
    """A pin as a person writes it."""
    return pin.replace("==", " ")


def run_stage(position, stage, run):
    """Announces a stage and runs its commands."""
    title, duration, commands = stage
    say("[{}] {}: about {}".format(position, title, duration))
    for command in commands:
        status, output = run(command)
        if status != 0:
            raise SetUpError(failure_message(title, output))


def set_up(root, run):
    """Brings the .venv in root up to date with the pins; `run` runs a command."""
    venv = os.path.join(root, ".venv")
    pins = read_pins(root)
    identity = identity_of(venv, pins)
    usable = pip_runs(venv)
    if usable and read_stamp(venv) == (identity, "complete"):
        return

    require(compiler_problem() or headers_problem() or venv_problem())
    start = time.time()
    stages = list(package_stages(root, venv, pins))
    count = len(stages) + 1
    if usable and read_stamp(venv) == (identity, "bare"):
        say("Going on with the .venv of an interrupted set-up.")
        forget_half_installed(venv)
    else:
        remove(venv)
        os.mkdir(venv)
        run_stage("1/{}".format(count), bare_stage(venv, pins), run)
        write_stamp(venv, identity, "bare")
    for number, stage in enumerate(stages, 2):
        run_stage("{}/{}".format(number, count), stage, run)
    write_stamp(venv, identity, "complete")
    say("Set up .venv in {:.0f} min {:.0f} s.".format(*divmod(time.time() - start, 60)))


def acquire(lock):
    """Takes the lock that makes a second set-up of the same .venv wait."""
    fcntl = importlib.import_module("fcntl")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        say("Another set-up of this .venv is running; waiting for it to end.")
        fcntl.flock(lock, fcntl.LOCK_EX)


def main():
    """Sets up; every way to fail is told in a sentence."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        require(python_problem(sys.version_info))
        # The pins file serves as the lock: .venv itself comes and goes.
        with open(os.path.join(ROOT, "requirements", "development.txt"), "a") as lock:
            acquire(lock)
            set_up(ROOT, functools.partial(run, os.path.join(ROOT, ".venv", "set_up.log"), lock))
    except (SetUpError, OSError) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted; the same command goes on from here\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
