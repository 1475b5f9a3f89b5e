"""Splits tensors into buckets that fit into memory beside a service's present weights. Pure."""

from collections.abc import Iterator, Mapping

from torch import Tensor

BUCKET_BYTES = 512 * 2**20


def in_buckets(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors in order, in buckets of at most BUCKET_BYTES or of one larger tensor."""
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if bucket and size + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor
        size += tensor.nbytes
    if bucket:
        yield bucket
