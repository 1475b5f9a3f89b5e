"""Weight updates through shared memory, for services on the trainer's machine."""

import asyncio
import socket
from urllib.parse import urlsplit

from agentrl.inference.engine_protocol import Engine, WeightWay
from agentrl.inference.protocol import InferenceError
from agentrl.inference.weights.buckets import in_buckets
from agentrl.inference.weights.distributed import local_address
from agentrl.inference.weights.shared_tensors import give_up, share
from agentrl.inference.weights.updates import PublishedWeights, UpdateFailed


class TensorUpdater:
    """Passes the tensors to services on this machine in shared memory."""

    way: WeightWay = "tensor"

    async def load(self, engine: Engine, weights: PublishedWeights, *, flush_cache: bool) -> None:
        """See `WeightUpdater`. A service on another machine is refused, because it would crash."""
        if not await asyncio.to_thread(_is_here, engine.url):
            raise InferenceError(
                f"{engine.url} is not on the trainer's machine, which --weight_update tensor needs:"
                " it gets its weights from disk; use disk or distributed"
            )
        ranks = await engine.weight_ranks()
        await engine.begin_weight_update()
        try:
            buckets = list(in_buckets(weights.tensors))
            for bucket in buckets:
                last = bucket is buckets[-1]
                # Pinned memory stays where it is registered: what moves is a copy.
                bucket = {n: t.clone() if t.is_pinned() else t for n, t in bucket.items()}
                # A text can be read once, so each rank gets a separate one.
                texts = [share(bucket.items()) for _ in range(ranks)]
                try:
                    await engine.update_weights_from_tensor(
                        texts,
                        version=weights.version if last else None,
                        flush_cache=flush_cache and last,
                    )
                except InferenceError:
                    for _ in texts:
                        give_up(bucket.items())
                    raise
            await engine.end_weight_update()
        except InferenceError as error:
            raise UpdateFailed(str(error), mixed=True) from error

    async def close(self) -> None:
        """Do nothing: tensors live as long as their publication."""


def _is_here(url: str) -> bool:
    """Whether the URL's host is an address of this machine."""
    host = urlsplit(url).hostname or ""
    try:
        theirs = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)[0][4][0]
    except OSError:
        return False
    return local_address(url) == theirs
