"""Weight updates from a folder. They work for every service that can read the trainer's disk."""

from agentrl.inference.engine_protocol import Engine, WeightWay
from agentrl.inference.weights.updates import PublishedWeights


class DiskUpdater:
    """Has services read the published folder."""

    way: WeightWay = "disk"

    async def load(self, engine: Engine, weights: PublishedWeights, *, flush_cache: bool) -> None:
        """All weights or none: the service checks the folder before it changes anything."""
        await engine.update_weights_from_disk(
            weights.folder, weights.version, flush_cache=flush_cache
        )

    async def close(self) -> None:
        """Do nothing: no state is kept between updates."""
