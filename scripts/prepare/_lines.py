"""Read texts line by line, and write lines that several processes have worked on."""

import gzip
import signal
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from tqdm import tqdm

from scripts._shared.commands import short

# Symbols of fairseq that no text may contain. The word <unk> may occur: fairseq reads it as <unk>.
SPECIAL = ("<s>", "</s>", "<pad>")
# Lines sent to a worker process at once; large enough that the transfer costs little.
CHUNK = 1000
# Chunks read ahead for each process; more would only fill the memory.
AHEAD = 8
# Progress bar, drawn on terminals only.
progress = partial(tqdm, unit_scale=True, disable=None)

# A function from a list of lines to a list of the same length.
LineMapper = Callable[[list[str]], list[str]]
_map_lines: LineMapper


@contextmanager
def folder_progress(folder: Path) -> Iterator[None]:
    """Show, once a second, how much another program has written into a folder.

    fairseq-preprocess first counts the symbols of a text, and writes nothing meanwhile.
    """
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(1):
            # a file may be merged into another one
            with suppress(OSError):
                bar.n = sum(file.stat().st_size for file in folder.glob("*"))
                bar.refresh()

    with progress(desc=f"write {folder.name}", unit="B") as bar:
        watcher = threading.Thread(target=watch, daemon=True)
        try:
            if not bar.disable:
                watcher.start()
            yield
        finally:
            ended.set()
            if watcher.ident:
                watcher.join()


def open_text(path: Path) -> BinaryIO:
    """Open a text for reading bytes, decompressed if its name ends with .gz."""
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 text without line ends, decompressed if its name ends with .gz.

    Only a newline, or carriage return and newline, ends a line. A byte-order mark is left out.
    """
    number = 0
    try:
        with open_text(path) as stream:
            for number, line in enumerate(stream, 1):
                if b"\0" in line:
                    raise ValueError(
                        f"{short(path)}, line {number}: there is a zero byte, as in UTF-16 or in "
                        "binary files: convert the file to UTF-8 or remove the byte"
                    )
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                yield text.removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{short(path)}, line {number}: byte {error.start + 1} of the line is not UTF-8 "
            f"({error.reason}): convert the file to UTF-8 or fix the line"
        ) from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(
            f"{short(path)}, after line {number}: the file is truncated, damaged or not a gzip "
            f"file ({error}): get it again"
        ) from error


def _start_process(make: Callable[..., LineMapper], arguments: tuple) -> None:
    """Set up a worker process, which leaves Ctrl-C to its parent."""
    global _map_lines
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _map_lines = make(*arguments)


def _apply(lines: list[str]) -> list[str]:
    """Apply the function of this process to lines."""
    return _map_lines(lines)


def in_processes(
    lines: Iterable[str], workers: int, make: Callable[..., LineMapper], *arguments: Any
) -> Iterator[list[str]]:
    """Yield what the function ``make(*arguments)`` returns for each chunk of lines, in order.

    It is made once in each process; with one worker, in this process. The workers of sacremoses
    would hold the whole text in memory; subword-nmt's lose lines when one fails.
    """
    remaining = iter(lines)
    chunks = iter(lambda: list(islice(remaining, CHUNK)), [])
    if workers == 1:
        yield from map(make(*arguments), chunks)
        return
    with ProcessPoolExecutor(
        workers, initializer=_start_process, initargs=(make, arguments)
    ) as pool:
        # a batch at a time: map() would read the whole text at once
        while batch := list(islice(chunks, AHEAD * workers)):
            yield from pool.map(_apply, batch)


def write_lines(
    lines: Iterable[str],
    target: Path,
    workers: int,
    make: Callable[..., LineMapper],
    *arguments: Any,
) -> dict[str, int]:
    """Write what ``make(*arguments)`` returns for the lines; count the lines and the words."""
    sizes = {"lines": 0, "words": 0}
    with (
        target.open("w", encoding="utf-8", newline="\n") as file,
        progress(desc=f"{target.parent.name}/{target.name}", unit=" lines") as bar,
    ):
        for chunk in in_processes(lines, workers, make, *arguments):
            file.writelines(f"{line}\n" for line in chunk)
            sizes["lines"] += len(chunk)
            sizes["words"] += sum(line.count(" ") + 1 for line in chunk if line)
            bar.update(len(chunk))
    return sizes
