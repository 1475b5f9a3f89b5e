"""Atomic writes of files."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def write_whole(path: Path) -> Iterator[Path]:
    """Yield a temporary path. The file is renamed to `path` when the block succeeds.

    Each process has a separate temporary path: several may write the same file, and the last wins.
    """
    partial = path.with_name(f".{path.stem}.{os.getpid()}.partial{path.suffix}")
    try:
        yield partial
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)
