"""Checksums that the publishers of a data set give."""

import hashlib
from dataclasses import dataclass
from typing import BinaryIO

BLOCK = 2**20


@dataclass(frozen=True)
class Checksum:
    """Published checksum of a file: hashlib's name of the algorithm and hexadecimal digits."""

    algorithm: str
    digest: str

    def check(self, stream: BinaryIO, label: str) -> None:
        """Read a stream to its end; label says in messages what it is.

        Raises ValueError when its content has another checksum.
        """
        found = hashlib.new(self.algorithm, usedforsecurity=False)
        while block := stream.read(BLOCK):
            found.update(block)
        if found.hexdigest() != self.digest:
            raise ValueError(
                f"{label} has {self.algorithm} {found.hexdigest()}, the published one is "
                f"{self.digest}: it is truncated, damaged or another edition, get it anew"
            )
