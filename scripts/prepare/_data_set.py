"""What is known of a published data set, and how a copy of it is checked."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from scripts.prepare._archives import open_with_progress, read_members
from scripts.prepare._checksums import Checksum

SPLITS = ("train", "valid", "test")


@dataclass(frozen=True)
class DataSet(ABC):
    """A published data set: where it is, how it is checked and what is known of it.

    Args:
        name: what it is called.
        mirrors: URLs of folders that hold it.
        files: names of what a mirror holds: one archive, or the members.
        checksums: of the archive or of each member, by name.
        vocabulary: number of symbols, as published.
        disk_bytes: space that the preparation takes at most, with the download.
        recipe: command file in examples that trains on it, without its suffix.
    """

    name: str
    mirrors: tuple[str, ...]
    files: tuple[str, ...]
    checksums: Mapping[str, Checksum]
    vocabulary: int
    disk_bytes: int
    recipe: str

    @property
    @abstractmethod
    def members(self) -> tuple[str, ...]:
        """Names of the files that are read."""

    def check(self, path: Path, label: str) -> None:
        """Check an archive, or a folder or file that takes its place; label tells what it is.

        Raises ValueError when a checksum differs or a member is missing.
        """
        archive = self.checksums.get(self.files[0]) if self.files != self.members else None
        if archive is None:
            read_members(
                path,
                self.members,
                lambda name, stream: self.checksums[name].check(stream, f"{label}, {name},"),
                label,
                "check",
            )
            return
        if path.is_dir():
            raise ValueError(
                f"{label} is a folder, whose content cannot be checked: give {self.files[0]}"
            )
        with open_with_progress(path, "check") as stream:
            archive.check(stream, label)

    def check_download(self, name: str, path: Path, label: str) -> None:
        """Check one of the files that a mirror holds.

        Raises ValueError when a checksum differs or a member is missing.
        """
        if name in self.members:
            with path.open("rb") as stream:
                self.checksums[name].check(stream, label)
        else:
            self.check(path, label)

    def check_vocabulary(self, found: int, remedy: str = "get the data anew") -> None:
        """Check the number of symbols of a text.

        Raises ValueError when it is not the published one.
        """
        if found != self.vocabulary:
            raise ValueError(
                f"{self.name}: the text has a vocabulary of {found:,} symbols, the published one "
                f"has {self.vocabulary:,}: figures would not compare with published ones, {remedy}"
            )
