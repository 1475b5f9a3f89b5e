"""How a process imports much: without garbage collection meanwhile."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Collect no garbage while the block imports, and never visit later what it made.

    Modules live as long as the process, and there are hundreds of thousands of objects in torch and
    transformers, which each collection during the import would visit again: a fifth of its time.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collecting:
            gc.enable()
