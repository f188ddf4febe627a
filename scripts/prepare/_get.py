"""Step 1: get the published files of a corpus, check them, and unpack their texts."""

import argparse
import gzip
import lzma
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from scripts._shared.commands import short
from scripts.prepare._corpora import SPLITS, Corpus, digest
from scripts.prepare._lines import open_text

# One of the hosts answers "forbidden" to Python's own user agent.
USER_AGENT = "Mozilla/5.0 (X11; Linux x86_64; rv:128.0) Gecko/20100101 Firefox/128.0"
# Seconds to wait for an answer or for further bytes.
TIMEOUT = 30.0
# Exceptions of the archive readers for truncated or damaged files.
DAMAGE = (
    *(zipfile.BadZipFile, tarfile.TarError, gzip.BadGzipFile),
    *(zlib.error, lzma.LZMAError, EOFError),
)
# pip options: pure-Python wheels for a fixed version, so that the corpus is the same everywhere.
WHEELS = "--platform any --implementation py --abi none --python-version 3.13".split()


class File(NamedTuple):
    """A text with its part and language, or an archive that a reader opens."""

    path: Path
    part: str = ""
    language: str = "txt"


def get(corpus: Corpus, options: argparse.Namespace, downloads: Path, folder: Path) -> list[File]:
    """Return the published files, which --from names or hosts send; unpack texts to a folder."""
    if options.packages:
        return get_packages(options.packages, downloads)
    languages = [options.source_lang or "txt", options.target_lang]
    if "languages" in corpus and (options.joined or options.unit == "plain"):
        languages = corpus["languages"]
    files: list[File] = []
    for source in corpus.get("get", []):
        if source.get("pair", options.pair) == options.pair:
            # with {language} in it, there is a file for each
            several = "{language}" in source["address"]
            for sides in [[language] for language in languages] if several else [languages]:
                files += get_texts(source, sides, options, downloads, folder)
    return files


def get_texts(
    source: Mapping[str, Any],
    languages: list[str],
    options: argparse.Namespace,
    downloads: Path,
    folder: Path,
) -> list[File]:
    """Return the texts of a published file in these languages, in the order of the archive."""
    address = source["address"].format(language=languages[0])
    path = get_file(address, source.get("sum"), options.source, downloads)
    if "members" not in source:
        return [File(path)]
    sides = {
        name.format(language=language, other=languages[-1]): (parts.split(), language)
        for name, parts in source["members"].items()
        for language in filter(None, languages)
    }
    print(f"unpack {path.name}", flush=True)
    try:
        if "sacrebleu" in source:
            texts = extract_test_set(path, source["sacrebleu"], list(sides), folder)
        else:
            texts = extract(path, list(sides), folder)
        for text, _ in texts:
            known = source.get("texts", {}).get(text.name)
            check(text, known, f"{short(path)}: the text {text.name}")
    except ValueError:
        # without a checksum, a host may have sent anything
        if not options.source and "sum" not in source:
            path.unlink()
        raise
    return [File(text, part, sides[name][1]) for text, name in texts for part in sides[name][0]]


def get_file(address: str, checksum: str | None, source: Path | None, downloads: Path) -> Path:
    """Return the file that --from gives, or download it."""
    name = address.rpartition("/")[2]
    if not source:
        return download(address, checksum, downloads)
    path = source / name if source.is_dir() else source
    if not path.is_file():
        raise ValueError(f"--from {short(path)} is not a file: give the published file")
    check(path, checksum, f"--from {short(path)}")
    return path


def check(path: Path, checksum: str | None, label: str) -> None:
    """Raise ValueError, naming label, if the checksum is known and the file has another."""
    algorithm, _, known = (checksum or "").partition(":")
    if known and (actual := digest(path, algorithm)) != known:
        raise ValueError(
            f"{label} has {algorithm} {actual}, the published one is {known}: it is truncated, "
            "damaged or another edition, get it again"
        )


def download(address: str, checksum: str | None, folder: Path) -> Path:
    """Download a file to a folder, by https or else http; return its path."""
    import pooch
    import requests

    # this function prints the URLs itself
    pooch.get_logger().setLevel("WARNING")
    receive = pooch.HTTPDownloader(
        progressbar=sys.stderr.isatty(), headers={"User-Agent": USER_AGENT}, timeout=TIMEOUT
    )
    reasons, name = [], address.rpartition("/")[2]
    for url in (f"https://{address}", f"http://{address}"):
        print(f"download {url}", flush=True)
        try:
            return Path(pooch.retrieve(url, checksum, name, folder, downloader=receive))
        except (requests.RequestException, ValueError) as error:
            # pooch's message for a wrong checksum has several lines
            reasons.append(f"{url}: {' '.join(str(error).split())}")
    raise ValueError(
        f"{name} cannot be downloaded: {'; '.join(reasons)}: check the connection, or get the "
        "file yourself and give it with --from"
    )


def files_in(path: Path, names: list[str]) -> Iterator[tuple[str, BinaryIO]]:
    """Yield each file of a zip or tar with its name, or a plain file with the only name given."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for member in archive.namelist():
                yield member.rpartition("/")[2], archive.open(member)
    elif len(names) == 1 and not tarfile.is_tarfile(path):
        yield names[0], open_text(path)
    else:
        with tarfile.open(path) as archive:
            for entry in filter(tarfile.TarInfo.isfile, archive):
                yield entry.name.rpartition("/")[2], archive.extractfile(entry)


def extract(path: Path, names: list[str], folder: Path) -> list[tuple[Path, str]]:
    """Write the files of an archive that have these names or patterns; return both, in order."""
    written: dict[Path, str] = {}
    try:
        for member, source in files_in(path, names):
            for name in names:
                if fnmatch(member, name) and folder / member not in written:
                    with source, (folder / member).open("wb") as target:
                        shutil.copyfileobj(source, target)
                    written[folder / member] = name
    except DAMAGE as error:
        raise ValueError(
            f"{short(path)} is a truncated or damaged archive ({error}): get it again"
        ) from error
    if missing := set(names).difference(written.values()):
        raise ValueError(
            f"{short(path)} lacks {', '.join(sorted(missing))}: give the published file"
        )
    return list(written.items())


def extract_test_set(
    path: Path, test_set: str, names: list[str], folder: Path
) -> list[tuple[Path, str]]:
    """Write both sides of a test set of sacrebleu from its archive; return as extract does."""
    from sacrebleu.dataset import DATASETS
    from sacrebleu.dataset.fake_sgml import FakeSGMLDataset

    pair = "-".join(name.rpartition(".")[2] for name in names)
    with tempfile.TemporaryDirectory() as temporary:
        # with an absolute name and a file URL, sacrebleu uses this folder and no network
        langpairs = {pair: DATASETS[test_set].langpairs[pair]}
        texts = FakeSGMLDataset(temporary, data=[path.as_uri()], langpairs=langpairs)
        sides = [texts.get_source_file(pair), *texts.get_reference_files(pair)]
        for name, side in zip(names, sides, strict=True):
            shutil.copyfile(side, folder / name)
    return [(folder / name, name) for name in names]


def get_packages(listed: Path, folder: Path) -> list[File]:
    """Return the wheels of a list of packages, downloaded to a folder; training wheels first.

    A line of the list is "NAME==VERSION PART SHA256"; comments follow #.
    """
    lines = (line.partition("#")[0].split() for line in listed.read_text("utf-8").splitlines())
    packages = sorted(filter(None, lines), key=lambda package: package[1:2] != ["train"])
    for package in packages:
        if len(package) != 3 or package[1] not in SPLITS:
            raise ValueError(
                f"--packages {short(listed)} has the line {' '.join(package)!r}: write "
                f"NAME==VERSION, one of {', '.join(SPLITS)}, and the wheel's sha256"
            )
    folder.mkdir(parents=True, exist_ok=True)
    requirements = folder / "requirements.txt"
    hashes = [f"{name} --hash=sha256:{checksum}\n" for name, _, checksum in packages]
    requirements.write_text("".join(hashes), encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    pip += ["--only-binary", ":all:", *WHEELS, "--dest", str(folder), "-r", str(requirements)]
    ended = subprocess.run(pip, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise ValueError(
            f"--packages: pip could not download the packages into {short(folder)}: "
            f"{ended.stderr.strip()[-500:]}"
        )
    wheels = {digest(path): path for path in folder.glob("*.whl")}
    return [File(wheels[checksum], part) for _, part, checksum in packages]
