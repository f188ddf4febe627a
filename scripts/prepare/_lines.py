"""Texts line by line: reading them, and mapping each line to one in several processes."""

import argparse
import gzip
import os
import signal
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from functools import partial
from itertools import islice
from multiprocessing import parent_process
from pathlib import Path
from threading import Thread
from typing import Any, BinaryIO

from tqdm import tqdm

from scripts._shared.commands import short

# Lines that a process gets at once: enough to outweigh their way to it and back.
CHUNK = 1000
# Chunks under way for each process; more would only fill the memory.
AHEAD = 3
# Each process of fairseq holds the dictionary.
MOST_WORKERS = 16
# Progress bar that is drawn on terminals only.
progress = partial(tqdm, unit_scale=True, disable=None)

# What is done with the lines of a chunk, within each process.
Work = Callable[[list[str]], Any]
_work: Work


def add_workers_option(parser: argparse.ArgumentParser) -> None:
    """Add --workers, by default one for each core."""
    workers = min(os.cpu_count() or 1, MOST_WORKERS)
    parser.add_argument(
        "--workers", type=int, default=workers, metavar="N", help="processes (default: %(default)s)"
    )


def open_text(path: Path) -> BinaryIO:
    """Bytes of a text, which is compressed if its name ends with .gz."""
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def read_lines(path: Path) -> Iterator[str]:
    """Lines of a UTF-8 text, compressed if its name ends with .gz, without what ends them.

    Only a newline ends a line, after a carriage return or not. A byte-order mark is left out.
    Raises ValueError, naming the file and the line, when it cannot be read or is not UTF-8.
    """
    number = 0
    try:
        with open_text(path) as stream:
            for number, line in enumerate(stream, 1):
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                yield text.removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{short(path)}, line {number}: byte {error.start + 1} of the line is no UTF-8 "
            f"({error.reason}): convert the file to UTF-8 or mend the line"
        ) from error
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


def _start_process(make: Callable[[], Work]) -> None:
    """Begin a process of in_processes."""
    global _work
    # Ctrl-C reaches every process of a terminal; the first one ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # and one that is killed cannot: the others would wait for work without end
    Thread(target=_end_with_parent, daemon=True).start()
    _work = make()


def _end_with_parent() -> None:
    """Wait for the end of the process that this one works for, and end."""
    parent_process().join()
    os._exit(1)


def _work_on(chunk: list[str]) -> Any:
    """Result of the work of this process on a chunk."""
    return _work(chunk)


def in_processes(lines: Iterable[str], make: Callable[[], Work], workers: int) -> Iterator[Any]:
    """Results of the work on each chunk of lines, in order, a few chunks ahead.

    ``make`` is called once in each process, hence a function of a module or a partial of one; with
    one worker it is this process. The workers of the libraries do not serve: sacremoses' hold the
    whole text in memory, subword-nmt's lose the lines of a process that fails without a word.

    Raises ValueError when a process is killed.
    """
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
    expected: Mapping[str, int],
    target: Path,
    make: Callable[[], Work],
    workers: int,
    description: str,
) -> dict[str, int]:
    """Write what the work makes of each line as a line; return how many lines, empty ones, words.

    ``expected`` is the number of ``lines``, and of ``empty`` ones where that matters. Raises
    ValueError when other numbers of them were written.
    """
    sizes = dict.fromkeys(("lines", "empty", "words"), 0)
    with (
        target.open("w", encoding="utf-8", newline="\n") as file,
        closing(in_processes(lines, make, workers)) as results,
        progress(total=expected["lines"], desc=description, unit=" lines") as bar,
    ):
        for mapped in results:
            text = "".join(f"{line}\n" for line in mapped)
            file.write(text)
            # Counted in what is written: a line that became two shows.
            count = text.count("\n")
            sizes["lines"] += count
            sizes["empty"] += mapped.count("")
            sizes["words"] += sum(line.count(" ") + 1 for line in mapped if line)
            bar.update(count)
    for kind, number in expected.items():
        if sizes[kind] != number:
            empty = "empty " if kind == "empty" else ""
            raise ValueError(
                f"{description}, {short(target)}: {sizes[kind]:,} {empty}lines, the text has "
                f"{number:,}: leave it as it is while it is prepared, and run the same command "
                "again"
            )
    return sizes
