"""Splits tensors into buckets that fit into memory beside a service's present weights. Pure."""

import re
from collections.abc import Iterator, Mapping
from itertools import groupby

from torch import Tensor

BUCKET_BYTES = 512 * 2**20
_MODULE = re.compile(r".*?\.\d+\.[^.]+\.")


def in_buckets(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors in order, in buckets of at most BUCKET_BYTES or of one larger tensor.

    The tensors of a module are in one bucket if they fit, because SGLang fuses some of them, and
    drops those whose counterpart is not in the same request.
    """
    bucket: dict[str, Tensor] = {}
    size = 0
    for _, names in groupby(tensors, key=module_of):
        module = {name: tensors[name] for name in names}
        bytes_ = sum(tensor.nbytes for tensor in module.values())
        pieces = [module] if bytes_ <= BUCKET_BYTES else [{n: t} for n, t in module.items()]
        for piece in pieces:
            bytes_ = sum(tensor.nbytes for tensor in piece.values())
            if bucket and size + bytes_ > BUCKET_BYTES:
                yield bucket
                bucket, size = {}, 0
            bucket |= piece
            size += bytes_
    if bucket:
        yield bucket


def module_of(name: str) -> str:
    """What the names of a layer's module begin with; the name itself outside of layers."""
    match = _MODULE.match(name)
    return match[0] if match else name
