"""Bring published weights to inference services; here from a folder that they can read.

What is published, when and under which version is the trainer's business.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.inference.client import SGLangClient
from agentrl.inference.protocol import InferenceError, RequestRejected


@dataclass(frozen=True, slots=True)
class PublishOutcome:
    """What became of one publication at one service.

    `stall_s` is how long the service generated nothing; `error` is None when it now holds the
    version and generates again.
    """

    url: str
    version: int
    stall_s: float
    error: str | None

    @property
    def ok(self) -> bool:
        return self.error is None


async def publish_from_disk(
    clients: Sequence[SGLangClient], path: str | Path, version: int
) -> list[PublishOutcome]:
    """Load `path` as policy `version` at every service at once; outcomes in the clients' order.

    Generation is paused in mode "retract": running requests keep their tokens but recompute their
    keys and values under the new weights, so each token's logprob is exactly that of the version
    it carries, and nothing of the old version is left in a cache. Paused services always continue,
    also when the update failed. Failures are in the outcomes, not raised.
    """
    return list(await asyncio.gather(*(_publish_to(c, path, version) for c in clients)))


async def _publish_to(client: SGLangClient, path: str | Path, version: int) -> PublishOutcome:
    errors: list[str] = []
    began = time.monotonic()
    try:
        await client.pause("retract")
        await _update(client, path, version)
    except InferenceError as error:
        errors.append(str(error))
    finally:
        # Also after a failed pause, which may have arrived all the same.
        try:
            await client.continue_()
        except InferenceError as error:
            errors.append(str(error))
    return PublishOutcome(
        client.url, version, time.monotonic() - began, "; ".join(errors) if errors else None
    )


async def _update(client: SGLangClient, path: str | Path, version: int) -> None:
    try:
        await client.update_weights_from_disk(path, version)
    except RequestRejected:
        # SGLang also answers 400 when the weights are in but its cache could not be flushed.
        if await client.weight_version() != version:
            raise
        await client.flush_cache()
