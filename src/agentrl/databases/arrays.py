"""Token arrays as MongoDB stores them: little-endian bytes.

A BSON array takes about 11 bytes an element, and a document may hold 16 MB. As bytes an int32 or
float32 takes 4, and a mask entry 1.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

INT32 = np.dtype("<i4")
FLOAT32 = np.dtype("<f4")
FLOAT16 = np.dtype("<f2")
UINT8 = np.dtype("u1")


def pack_ints(values: Sequence[int] | NDArray[np.integer[Any]]) -> bytes:
    """Token ids or policy versions [n] as int32 bytes."""
    return np.asarray(values, dtype=INT32).tobytes()


def pack_floats(values: Sequence[float] | NDArray[np.float32]) -> bytes:
    """Logprobs or advantages [n] as float32 bytes."""
    return np.asarray(values, dtype=FLOAT32).tobytes()


def pack_halves(values: Sequence[float] | NDArray[np.float32]) -> bytes:
    """Entropies [n] as float16 bytes: three digits."""
    return np.asarray(values, dtype=FLOAT16).tobytes()


def pack_mask(values: Sequence[int] | NDArray[np.uint8]) -> bytes:
    """A 0/1 mask [n] as uint8 bytes."""
    return np.asarray(values, dtype=UINT8).tobytes()


def unpack_ints(data: bytes) -> NDArray[np.int32]:
    """A read-only int32 array over `data`, without a copy."""
    return np.frombuffer(data, dtype=INT32)


def unpack_floats(data: bytes) -> NDArray[np.float32]:
    """A read-only float32 array over `data`, without a copy."""
    return np.frombuffer(data, dtype=FLOAT32)


def unpack_halves(data: bytes) -> NDArray[np.float16]:
    """A read-only float16 array over `data`, without a copy."""
    return np.frombuffer(data, dtype=FLOAT16)


def unpack_mask(data: bytes) -> NDArray[np.uint8]:
    """A read-only uint8 array over `data`, without a copy."""
    return np.frombuffer(data, dtype=UINT8)
