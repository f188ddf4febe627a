"""Helpers of the preparation tests: archives and the contents of folders."""

import gzip
import io
import json
import tarfile
import zipfile

from fairseq.data import Dictionary, data_utils

SPLITS = ("train", "valid", "test")


def write_files(folder, files):
    """Write named files of bytes or text into a folder; compress texts if a name ends with .gz."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            pack = gzip.compress if path.suffix == ".gz" else bytes
            content = pack(content.encode())
        path.write_bytes(content)


def zipped(members, folder="folder"):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{folder}/{name}", content)
    return buffer.getvalue()


def tarred(members, mode="w:gz"):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(f"folder/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def lines(folder, split, dictionary="dict.txt"):
    """Return the items of a binarized split as symbols, with their </s>."""
    symbols = Dictionary.load(str(folder / dictionary))
    items = data_utils.load_indexed_dataset(str(folder / split), symbols)
    return [" ".join(symbols[token] for token in items[item]) for item in range(len(items))]


def contents(folder):
    """Return the bytes of all files except records and logs, which contain folder names."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in ("stage.json", "preprocess.log")
    }


def read_json(path):
    return json.loads(path.read_text(encoding="utf-8"))
