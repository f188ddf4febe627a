"""fairseq-preprocess: its command for texts in one language or two, and a progress bar."""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tqdm import tqdm

from scripts._shared.commands import child_process, format_command, program, short


def preprocess_command(
    texts: Mapping[str, Path | Sequence[Path]],
    destination: Path,
    workers: int,
    *options: str,
    languages: tuple[str, str] | None = None,
) -> list[str]:
    """fairseq-preprocess command that binarizes the text of each split into a folder.

    fairseq binarizes the first part of a text after the others: 2 workers would work in turn.

    Args:
        texts: the text of each split, or with languages what its two texts have before
            ``.LANGUAGE``; several become SPLIT, SPLIT1 and so on.
        destination: the folder.
        workers: number of processes.
        options: further words.
        languages: source and target; None for texts in one language.
    """
    command = [program("fairseq-preprocess")]
    if languages:
        command += ["--source-lang", languages[0], "--target-lang", languages[1]]
    else:
        command.append("--only-source")
    for split, text in texts.items():
        several = [text] if isinstance(text, Path) else text
        command += [f"--{split}pref", ",".join(map(short, several))]
    return [*command, "--destdir", short(destination), *options, "--workers", str(workers)]


def tokens_on_disk(folder: Path, bytes_per_token: int) -> int:
    """Number of tokens in the binarized files of a folder that fairseq is writing."""
    size = 0
    for path in folder.glob("*.bin"):
        # fairseq removes the parts of a file once they are merged.
        with suppress(FileNotFoundError):
            size += path.stat().st_size
    return size // bytes_per_token


def run_preprocess(
    command: list[str],
    destination: Path,
    log: Path,
    tokens: int,
    bytes_per_token: int,
    description: str = "binarize",
) -> None:
    """Print and run a fairseq-preprocess command with a progress bar over the tokens on disk.

    Args:
        command: what to run.
        destination: folder that it writes to.
        log: file for its output.
        tokens: how many it will write.
        bytes_per_token: 2 for up to 65,499 symbols, else 4.
        description: of the progress bar.

    Raises ValueError when it fails.
    """
    print(f"$ {format_command(command)}", flush=True)
    with (
        child_process(command, log) as child,
        tqdm(total=tokens, desc=description, unit=" tokens", unit_scale=True, disable=None) as bar,
    ):
        while child.poll() is None:
            written = min(tokens_on_disk(destination, bytes_per_token), tokens)
            bar.update(max(0, written - bar.n))
            time.sleep(0.2)
        if child.returncode == 0:
            bar.update(tokens - bar.n)
