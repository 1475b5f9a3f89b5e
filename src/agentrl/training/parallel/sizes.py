"""Degrees of parallelism, from the flags and the number of processes. Pure.

    processes = dp_replicate x dp_shard x cp x tp

The first two together are the data-parallel ranks. Parameters are sharded over dp_shard x cp and
replicated over dp_replicate (HSDP). Experts are spread over groups of `ep` consecutive processes
within a replica, and each expert is sharded over those that hold it.
"""

from dataclasses import dataclass

from agentrl.configs import ConfigError, ParallelConfig


@dataclass(frozen=True)
class ParallelSizes:
    """The degrees of a launch. Their product, without `ep`, is the number of processes."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @classmethod
    def of(cls, config: ParallelConfig, processes: int) -> "ParallelSizes":
        """The degrees for `processes` processes. The remaining factor is `dp_shard`.

        Raises `ConfigError` if the processes cannot be divided by the degrees.
        """
        claimed = config.tp_size * config.cp_size * config.dp_replicate_size
        if processes % claimed:
            raise ConfigError(
                f"--tp_size {config.tp_size} x --cp_size {config.cp_size} x --dp_replicate_size "
                f"{config.dp_replicate_size}: {processes} processes were launched, which is no "
                f"multiple of {claimed}"
            )
        sizes = cls(
            dp_replicate=config.dp_replicate_size,
            dp_shard=processes // claimed,
            cp=config.cp_size,
            tp=config.tp_size,
            ep=config.ep_size,
        )
        replica = processes // sizes.dp_replicate
        if replica % sizes.ep or (sizes.ep > 1 and sizes.ep % sizes.tp):
            raise ConfigError(
                f"--ep_size {sizes.ep}: must divide the {replica} processes of a replica and be a "
                f"multiple of --tp_size {sizes.tp}, whose processes share their tokens"
            )
        return sizes

    @property
    def dp(self) -> int:
        """Number of data-parallel ranks, each of which trains its own rows."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Number of processes over which FSDP shards each parameter."""
        return self.dp_shard * self.cp

    @property
    def efsdp(self) -> int:
        """Number of processes over which FSDP shards each expert."""
        return self.fsdp * self.tp // self.ep

    @property
    def processes(self) -> int:
        """Number of all processes."""
        return self.dp * self.cp * self.tp
