"""Checkpoints in TensorFlow's format, for tests: an index, and the tensors' bytes in files.

tensorflow/core/util/tensor_bundle and lib/io/table_format.txt describe the layout.
"""

import struct

import google_crc32c
import torch

TYPES = {torch.float32: 1, torch.float64: 2, torch.int64: 9, torch.float16: 19}


def masked_checksum(data):
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32)


def varint(number):
    encoded = bytearray()
    while number > 127:
        encoded.append(number % 128 + 128)
        number //= 128
    return bytes([*encoded, number])


def field(number, value):
    """Encode a protocol buffer's field; zeros are omitted."""
    if isinstance(value, bytes):
        return varint(8 * number + 2) + varint(len(value)) + value
    return varint(8 * number) + varint(value) if value else b""


def entry(kind, shape, file, offset, data):
    """Encode a tensor's entry in the index."""
    sizes = b"".join(field(2, field(1, size)) for size in shape)
    fields = field(1, kind), field(2, sizes), field(3, file), field(4, offset), field(5, len(data))
    return b"".join(fields) + varint(8 * 6 + 5) + masked_checksum(data)


def table(rows):
    """Encode a sorted table in blocks of 4 rows."""
    written = b""

    def add(rows):
        """Write a block; return its address."""
        nonlocal written
        block, before = b"", b""
        for name, value in rows:
            same = [a == b for a, b in zip(before, name, strict=False)]
            shared = [*same, False].index(False)
            lengths = b"".join(map(varint, (shared, len(name) - shared, len(value))))
            block += lengths + name[shared:] + value
            before = name
        # one restart point: the beginning of the block
        address = varint(len(written)) + varint(len(block) + 8)
        block += struct.pack("<II", 0, 1) + b"\0"
        written += block + masked_checksum(block)
        return address

    ordered = sorted(rows.items())
    blocks = [ordered[n : n + 4] for n in range(0, len(ordered), 4)]
    addresses = [(block[-1][0], add(block)) for block in blocks]
    footer = add([]) + add(addresses)
    return written + footer.ljust(40, b"\0") + bytes.fromhex("57fb808b247547db")


def write_bundle(prefix, tensors, files=1):
    """Write a checkpoint; its tensors go to the files in turn."""
    # the format's version is a message within the header
    rows = {b"": field(1, files) + field(3, field(1, 1))}
    written = [bytearray() for _ in range(files)]
    for number, (name, tensor) in enumerate(sorted(tensors.items())):
        file, data = number % files, tensor.contiguous().numpy().tobytes()
        kind = TYPES[tensor.dtype]
        rows[name.encode()] = entry(kind, list(tensor.shape), file, len(written[file]), data)
        written[file] += data
    prefix.with_name(f"{prefix.name}.index").write_bytes(table(rows))
    for file, data in enumerate(written):
        prefix.with_name(f"{prefix.name}.data-{file:05}-of-{files:05}").write_bytes(data)
