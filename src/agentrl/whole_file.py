"""A file that is there whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def write_whole(path: Path) -> Iterator[Path]:
    """A place to write a file that appears under `path` when it is complete.

    Each process has its own: several may write the same file at once, and the last one stays.
    """
    partial = path.with_name(f".{path.stem}.{os.getpid()}.partial{path.suffix}")
    try:
        yield partial
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
