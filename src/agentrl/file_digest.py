"""The content of a file as a short text, equal for equal content."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

DIGITS = 16
CHUNK = 1 << 24  # bytes that are in memory at once


class Digest:
    """Of parts, each with its length, so that `ab` + `c` is not `a` + `bc`."""

    def __init__(self) -> None:
        self._whole = hashlib.sha256()

    def begin(self, size: int) -> None:
        """A part of `size` bytes comes, by `add`."""
        self._whole.update(size.to_bytes(8, "little"))

    def add(self, piece: bytes) -> None:
        """The next bytes of the part."""
        self._whole.update(piece)

    def part(self, whole: bytes) -> None:
        """A part at once."""
        self.begin(len(whole))
        self.add(whole)

    def text(self) -> str:
        """The digest."""
        return self._whole.hexdigest()[:DIGITS]


def file_digest(file: Path) -> str | None:
    """Of a whole file; None if there is none."""
    if not file.is_file():
        return None
    digest = Digest()
    digest.begin(file.stat().st_size)
    for chunk in chunks(file):
        digest.add(chunk)
    return digest.text()


def chunks(file: Path) -> Iterator[bytes]:
    """The bytes of a file, in pieces that are small enough for any memory."""
    with file.open("rb") as opened:
        while chunk := opened.read(CHUNK):
            yield chunk
