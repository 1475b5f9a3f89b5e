"""A file that is there whole or not at all."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def write_whole(path: Path) -> Iterator[Path]:
    """A place to write a file that appears under `path` when it is complete."""
    partial = path.with_name(f".{path.stem}.partial{path.suffix}")
    try:
        yield partial
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
