"""Parallel degrees: what the flags ask of how many processes, and what is refused. Pure.

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
        """The degrees of `processes` processes; those that no flag claims shard the data.

        Raises `ConfigError` if the processes cannot be divided so.
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
        """Data-parallel ranks: those with rows of their own."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Processes over which each parameter is sharded, beside tensor parallelism."""
        return self.dp_shard * self.cp

    @property
    def efsdp(self) -> int:
        """Processes over which each expert is sharded."""
        return self.fsdp * self.tp // self.ep

    @property
    def processes(self) -> int:
        """All of them."""
        return self.dp * self.cp * self.tp
