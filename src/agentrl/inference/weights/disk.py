"""Weights from a folder that services can read: works for every service, needs a shared disk."""

from agentrl.inference.client import SGLangClient
from agentrl.inference.weights.updates import PublishedWeights


class DiskUpdater:
    """Has services read the published folder."""

    async def load(
        self, client: SGLangClient, weights: PublishedWeights, *, flush_cache: bool
    ) -> None:
        """All weights or none: the service checks the folder before it changes anything."""
        await client.update_weights_from_disk(
            weights.folder, weights.version, flush_cache=flush_cache
        )

    async def close(self) -> None:
        """Nothing is kept."""
