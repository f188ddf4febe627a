"""Texts line by line: reading them, and mapping each line to one in several processes."""

import gzip
import signal
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from tqdm import tqdm

from scripts._shared.commands import short

# Lines that a process gets at once: enough to outweigh their way to it and back.
CHUNK = 1000
# Chunks under way for each process; more would only fill the memory.
AHEAD = 3

# What is done with the lines of a chunk, and what makes that within a process.
Work = Callable[[list[str]], Any]
MakeWork = Callable[[], Work]

_work: Work


@dataclass
class TextSizes:
    """Sizes of a text: its lines, how many of them are empty, its words between blanks."""

    lines: int = 0
    empty: int = 0
    words: int = 0


def check_workers(workers: int) -> None:
    """Check a number of processes.

    Raises ValueError when it is not positive.
    """
    if workers < 1:
        raise ValueError(f"--workers {workers} is no number of processes: give 1 or more")


def open_text(path: Path) -> BinaryIO:
    """Bytes of a text, which is compressed if its name ends with .gz."""
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def decode_lines(lines: Iterable[bytes], label: str) -> Iterator[str]:
    """Lines of a UTF-8 text without what ends them; label says in messages what it is.

    Only a newline ends a line, after a carriage return or not. A byte-order mark is left out.

    Raises ValueError, naming the line, when one is not UTF-8.
    """
    for number, line in enumerate(lines, 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{label}, line {number}: byte {error.start + 1} of the line is no UTF-8 "
                f"({error.reason}): convert the file to UTF-8 or mend the line"
            ) from error
        yield text.removesuffix("\n").removesuffix("\r")


def read_lines(path: Path) -> Iterator[str]:
    """Lines of a UTF-8 text, compressed if its name ends with .gz, as decode_lines has them.

    Raises ValueError, naming the file and the line, when it cannot be read.
    """
    number = 0
    try:
        with open_text(path) as stream:
            for line in decode_lines(stream, short(path)):
                yield line
                number += 1
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(
            f"{short(path)}, after line {number}: the file is truncated, damaged or not gzip's "
            f"({error}): get it anew"
        ) from error
    except OSError as error:
        raise ValueError(
            f"{short(path)} cannot be read ({error.strerror}): give a file that is there and may "
            "be read"
        ) from error


def count_lines(path: Path) -> int:
    """Number of lines of a text; raises as read_lines."""
    return sum(1 for _ in read_lines(path))


def _start_process(make: MakeWork) -> None:
    global _work
    # Ctrl-C reaches every process of a terminal; the first one ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _work = make()


def _work_on(chunk: list[str]) -> Any:
    return _work(chunk)


def in_processes(lines: Iterable[str], make: MakeWork, workers: int) -> Iterator[Any]:
    """Results of the work on each chunk of lines, in order, a few chunks ahead.

    Args:
        lines: read as they are needed.
        make: called once in each process, hence a function of a module or a partial of one.
        workers: number of processes beside this one; 1 works in this one.

    Raises ValueError when there is no such number or a process is killed.
    """
    check_workers(workers)
    remaining = iter(lines)
    chunks = iter(lambda: list(islice(remaining, CHUNK)), [])
    if workers == 1:
        yield from map(make(), chunks)
        return
    pending: deque = deque()
    pool = ProcessPoolExecutor(workers, initializer=_start_process, initargs=(make,))
    try:
        for chunk in chunks:
            pending.append(pool.submit(_work_on, chunk))
            if len(pending) > AHEAD * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise ValueError(
            f"--workers {workers}: one of the processes was ended from outside, most likely for "
            "want of memory: give fewer"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def map_lines(
    lines: Iterable[str],
    expected: int,
    target: Path,
    make: MakeWork,
    workers: int,
    description: str,
) -> TextSizes:
    """Write what the work makes of each line as a line of a UTF-8 text.

    Args:
        lines: without what ends them.
        expected: how many there are.
        target: a new file; of a failure nothing is left there.
        make: makes the work, which turns a list of lines into a list of lines.
        workers: number of processes.
        description: of the progress bar.

    Raises ValueError when another number of lines was written.
    """
    sizes = TextSizes()
    try:
        with (
            target.open("w", encoding="utf-8", newline="\n") as file,
            closing(in_processes(lines, make, workers)) as results,
            tqdm(
                total=expected, desc=description, unit=" lines", unit_scale=True, disable=None
            ) as bar,
        ):
            for mapped in results:
                text = "".join(f"{line}\n" for line in mapped)
                file.write(text)
                # Counted in what is written: a line that became two shows.
                count = text.count("\n")
                sizes.lines += count
                sizes.empty += mapped.count("")
                sizes.words += sum(line.count(" ") + 1 for line in mapped if line)
                bar.update(count)
        if sizes.lines != expected:
            raise ValueError(
                f"{description}, {short(target)}: {sizes.lines:,} lines of a text of "
                f"{expected:,}: leave the text as it is while it is prepared, and run the same "
                "command again"
            )
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    return sizes
