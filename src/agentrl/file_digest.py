"""Short digests of file contents."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

DIGITS = 16
CHUNK = 1 << 24  # bytes that are in memory at once


class Digest:
    """A digest of parts. It includes their lengths, so that `ab` + `c` differs from `a` + `bc`."""

    def __init__(self) -> None:
        self._whole = hashlib.sha256()

    def begin(self, size: int) -> None:
        """Begin a part of `size` bytes, which `add` then gives."""
        self._whole.update(size.to_bytes(8, "little"))

    def add(self, piece: bytes) -> None:
        """Add the next bytes of the part."""
        self._whole.update(piece)

    def part(self, whole: bytes) -> None:
        """Add a whole part."""
        self.begin(len(whole))
        self.add(whole)

    def text(self) -> str:
        """The digest in hexadecimal, of `DIGITS` digits."""
        return self._whole.hexdigest()[:DIGITS]


def file_digest(file: Path) -> str | None:
    """Digest of a file; None if it does not exist."""
    if not file.is_file():
        return None
    digest = Digest()
    digest.begin(file.stat().st_size)
    for chunk in chunks(file):
        digest.add(chunk)
    return digest.text()


def chunks(file: Path) -> Iterator[bytes]:
    """Yield the bytes of a file in pieces of at most `CHUNK` bytes."""
    with file.open("rb") as opened:
        while chunk := opened.read(CHUNK):
            yield chunk
