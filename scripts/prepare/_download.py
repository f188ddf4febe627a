"""Downloads that try several mirrors, resume where they stopped and are checked at the end."""

import http
import http.client
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from tqdm import tqdm

from scripts._shared.commands import short

# One of the hosts answers "forbidden" to Python's own name.
USER_AGENT = "Mozilla/5.0 (X11; Linux x86_64; rv:128.0) Gecko/20100101 Firefox/128.0"
# Seconds without an answer or a byte after which a mirror is given up.
TIMEOUT = 30.0
BLOCK = 2**16


class TransferError(Exception):
    """A mirror refuses, cannot be reached or stopped before the end."""


def partial_path(path: Path) -> Path:
    """Where the bytes of an unfinished download of path are kept."""
    return path.with_name(path.name + ".partial")


def mirror_url(mirror: str, name: str) -> str:
    """URL of a file in a mirror, which is the URL of its folder or of the file itself.

    Raises ValueError when it is not http or https.
    """
    if not mirror.startswith(("http://", "https://")):
        raise ValueError(
            f"--mirror {mirror} is no http:// or https:// URL: "
            f"give the URL of the folder that has {name}"
        )
    return mirror if mirror.endswith("/" + name) else f"{mirror.rstrip('/')}/{name}"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _open(url: str, start: int) -> http.client.HTTPResponse | None:
    """Answer to a request for the bytes from start on; None when there are none after it.

    Raises TransferError when there is no answer or a refusal.
    """
    headers = {"User-Agent": USER_AGENT, **({"Range": f"bytes={start}-"} if start else {})}
    try:
        request = urllib.request.Request(url, headers=headers)
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and start:
            complete = error.headers.get("Content-Range") == f"bytes */{start}"
            # What is here is as long as the file, or longer and hence of something else.
            return None if complete else _open(url, 0)
        raise TransferError(f"HTTP status {error.code} ({error.reason})") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise TransferError(getattr(error, "reason", error)) from error
    return response


def _read(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read1(BLOCK)
    except (OSError, http.client.HTTPException) as error:
        raise TransferError(error) from error


def _receive(url: str, path: Path) -> None:
    """Append what path lacks of a URL's content, or write all of it where that is not offered.

    Raises TransferError when the content did not arrive to its end.
    """
    response = _open(url, _size(path))
    if response is None:
        return
    with response:
        start = 0
        if response.status == http.HTTPStatus.PARTIAL_CONTENT:
            start = _size(path)
            content_range = response.headers.get("Content-Range", "")
            if not content_range.startswith(f"bytes {start}-"):
                raise TransferError(f"sent {content_range or 'some bytes'}, not those asked for")
        length = response.headers.get("Content-Length")
        total = None if length is None else start + int(length)
        with (
            path.open("ab" if start else "wb") as file,
            tqdm(
                total=total,
                initial=start,
                desc="download",
                unit="B",
                unit_scale=True,
                disable=None,
            ) as bar,
        ):
            while block := _read(response):
                file.write(block)
                bar.update(len(block))
    if total is not None and _size(path) != total:
        raise TransferError(f"the connection ended after {_size(path):,} of {total:,} bytes")


def transfer(url: str, path: Path) -> None:
    """Bring the content of a URL to path, which may hold its beginning already.

    Raises TransferError when the content stops arriving.
    """
    while True:
        before = _size(path)
        try:
            return _receive(url, path)
        except TransferError as error:
            if _size(path) <= before:
                raise
            print(f"  {error}; resuming", flush=True)


def download(
    name: str, mirrors: Sequence[str], folder: Path, check: Callable[[Path, str], None]
) -> Path:
    """Path of a downloaded and checked file in an existing folder.

    The first mirror that has it serves. An unfinished download is kept beside it as
    ``NAME.partial`` and resumed by the next call; a finished one that check refuses is deleted.

    Args:
        name: of the file, in the mirrors and in the folder.
        mirrors: URLs of folders.
        folder: where it goes; a file that is there already is checked and taken.
        check: called with a path and what it is; raises ValueError when the content is wrong.

    Raises ValueError when no mirror has the file.
    """
    urls = [mirror_url(mirror, name) for mirror in mirrors]
    path = folder / name
    partial = partial_path(path)
    if path.exists():
        try:
            check(path, short(path))
            return path
        except ValueError:
            path.unlink()
    reasons = []
    for url in urls:
        print(f"download {url}", flush=True)
        try:
            transfer(url, partial)
        except TransferError as error:
            reasons.append(f"{url}: {error}")
            print(f"  {error}", flush=True)
            continue
        try:
            check(partial, url)
        except ValueError as error:
            # the next run starts anew there
            partial.unlink()
            reasons.append(str(error))
            print(f"  {error}", flush=True)
            continue
        partial.replace(path)
        return path
    kept = f" (the part in {short(partial)} is kept and resumed)" if partial.exists() else ""
    raise ValueError(
        f"{name} cannot be downloaded{kept}: {'; '.join(reasons)}: look after the connection, "
        "name another place with --mirror URL, or get the file yourself and give it with --from"
    )
