"""Read files of TensorFlow code: a checkpoint's tensors, and the symbols of its cached data.

A checkpoint has PREFIX.index, a sorted table of the tensors' locations, and one or more files such
as PREFIX.data-00000-of-00001 with their bytes: the format of tensorflow/core/util/tensor_bundle.
TensorFlow itself takes over half a gigabyte, and no smaller package that reads it is maintained.
All checksums are verified, and nothing in a file is executed.
"""

import io
import operator
import pickle
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from scripts._shared.commands import short
from scripts.prepare._read import OTHER_WHITESPACE, VISIBLE_SPACE

# ends of a checkpoint's files, after PREFIX
_SUFFIX = re.compile(r"\.(index|meta|data-\d{5}-of-\d{5})$")
# Adam's averages and the training's counters
_OPTIMIZER_NAMES = re.compile(r"(.*/)?(Adam(_1)?|beta[12]_power|global_step)")
# numbers of types in TensorFlow
_TYPES = {1: np.dtype("<f4"), 2: np.dtype("<f8"), 19: np.dtype("<f2")}
_LM1B_RENAMING = {"<S>": "<eos>", "<UNK>": "<unk>"}
# the table ends with two addresses, padded with zeros, and a magic number
_ADDRESSES, _MAGIC = 40, bytes.fromhex("57fb808b247547db")
# each block of the table is followed by its compression and a checksum
_AFTER_BLOCK = struct.Struct("<BI")
# exceptions when reading bytes that are missing, changed or of another format
_DAMAGE = OSError, IndexError, KeyError, OverflowError, TypeError, ValueError, struct.error


class _Entry(NamedTuple):
    """A tensor's type and shape, the location and number of its bytes, and their checksum."""

    type: int
    shape: list[int]
    file: int
    offset: int
    size: int
    checksum: int


def read_bundle(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a TensorFlow checkpoint by name, without the optimizer's.

    ``path`` is PREFIX, TensorFlow's name for the checkpoint, or one of its files. Raises ValueError
    if a file is missing or damaged.
    """
    prefix, tensors = path.parent / _SUFFIX.sub("", path.name), {}
    file = Path(f"{prefix}.index")
    try:
        num_files, entries = _read_index(file.read_bytes())
        for name, entry in entries.items():
            file = Path(f"{prefix}.data-{entry.file:05}-of-{num_files:05}")
            if not _OPTIMIZER_NAMES.fullmatch(name):
                tensors[name] = _read_tensor(file, entry)
    except _DAMAGE as error:
        raise ValueError(
            f"--checkpoint {short(path)}: {file.name} is missing, cut short, changed or not "
            f"TensorFlow's ({error}): name a TensorFlow checkpoint, such as model.ckpt-0, or copy "
            "all of its files again"
        ) from error
    return tensors


def _read_tensor(path: Path, entry: _Entry) -> Tensor:
    data = np.memmap(path, np.uint8, "r")[entry.offset : entry.offset + entry.size].tobytes()
    if _checksum(data) != entry.checksum:
        raise IndexError("the checksum of a tensor is wrong")
    # copy, because torch needs an array that it may write to
    return torch.from_numpy(np.frombuffer(data, _TYPES[entry.type]).reshape(entry.shape).copy())


def _checksum(data: bytes) -> int:
    """Return the CRC-32C as it is stored: rotated, plus a constant."""
    # optional: pip install google-crc32c
    import google_crc32c

    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _read_index(table: bytes) -> tuple[int, dict[str, _Entry]]:
    """Return the number of data files, and the entry of each tensor."""
    addresses = io.BytesIO(table[-len(_MAGIC) - _ADDRESSES :])
    # the first block describes no tensors; it is read to verify its checksum
    _, blocks = (list(_read_block(table, _varint(addresses), _varint(addresses))) for _ in range(2))
    if addresses.read().lstrip(b"\0") != _MAGIC:
        raise IndexError("the last bytes are not a table's")
    entries = {}
    for _, address in blocks:
        stream = io.BytesIO(address)
        entries |= _read_block(table, _varint(stream), _varint(stream))
    # the header's name is empty
    header = dict(_fields(entries.pop(b"")))
    named = {name.decode(errors="backslashreplace"): _entry(x) for name, x in entries.items()}
    return operator.index(header[1]), named


def _read_block(table: bytes, offset: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield names and values of a block; a name is stored without its prefix from the last one."""
    end = offset + size
    # TensorFlow never compresses a block
    _, checksum = _AFTER_BLOCK.unpack(table[end : end + _AFTER_BLOCK.size])
    if _checksum(table[offset : end + 1]) != checksum:
        raise IndexError("the checksum of a block is wrong")
    # a block ends with restart points, where a search may start, and their number
    (num_restarts,) = struct.unpack("<I", table[end - 4 : end])
    stream, name = io.BytesIO(table[offset : end - 4 - 4 * num_restarts]), b""
    while stream.tell() < len(stream.getbuffer()):
        shared, added, length = (_varint(stream) for _ in range(3))
        name = name[:shared] + stream.read(added)
        yield name, stream.read(length)


def _entry(message: bytes) -> _Entry:
    fields = dict(_fields(message))
    # fields that are 0 are omitted
    shape = [dict(_fields(value)).get(1, 0) for _, value in _fields(fields.get(2, b""))]
    kind, *location = (operator.index(fields.get(number, 0)) for number in (1, 3, 4, 5, 6))
    return _Entry(kind, [operator.index(size) for size in shape], *location)


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the numbers and values of a protocol buffer's fields."""
    stream = io.BytesIO(message)
    while stream.tell() < len(message):
        number, kind = divmod(_varint(stream), 8)
        if kind == 0:
            yield number, _varint(stream)
        elif kind == 2:
            yield number, stream.read(_varint(stream))
        else:
            # the only other kind in these messages is a number of four bytes
            yield number, *struct.unpack("<I", stream.read(4))


def _varint(stream: io.BytesIO) -> int:
    """Read a number of seven bits per byte, lowest first; its last byte is below 128."""
    value = 0
    for shift in range(0, 64, 7):
        byte = stream.read(1)[0]
        value |= (byte & 127) << shift
        if byte < 128:
            return value
    raise IndexError("a number has more than 64 bits")


class _Inert(dict):
    """A stand-in for all classes and functions in a pickle; it keeps an object's attributes."""

    def __new__(cls, *_: Any) -> "_Inert":
        return super().__new__(cls)

    def __init__(self, *_: Any) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.update((_text(name), value) for name, value in state.items())


class _InertUnpickler(pickle.Unpickler):
    """An unpickler that executes no code of the pickle."""

    def find_class(self, module: str, name: str) -> type[_Inert]:
        """Return the stand-in for every name."""
        return _Inert


def _text(value: str | bytes) -> str:
    # Python 2 writes bytes
    return value if isinstance(value, str) else value.decode()


def read_symbols(path: Path) -> list[str]:
    """Return the symbols of the TensorFlow code's cache.pkl in the order of the model's numbers.

    One Billion Word's symbols for a sentence's end and an unknown word are renamed as in the other
    data. Blanks within a word, where Python 2 did not split it, are written as in
    `scripts.prepare lm1b`.

    Raises ValueError if the file is damaged or not a cache.pkl.
    """
    try:
        with path.open("rb") as file:
            symbols = _InertUnpickler(file, encoding="bytes").load()["vocab"]["idx2sym"]
        symbols = [OTHER_WHITESPACE.sub(VISIBLE_SPACE, _text(symbol)) for symbol in symbols]
    # a damaged file may raise anything
    except Exception as error:
        raise ValueError(
            f"--vocab {short(path)} is damaged or not a cache.pkl of the TensorFlow code: give "
            "that file, or a text with the model's symbols, one per line"
        ) from error
    names = {old: new for old, new in _LM1B_RENAMING.items() if new not in symbols}
    return [names.get(symbol, symbol) for symbol in symbols]
