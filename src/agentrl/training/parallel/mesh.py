"""Device meshes: which processes share rows, tokens and weights.

Tensor parallelism is innermost, because it communicates most, then context, then data parallelism:

    rank = (dp_rank * cp + cp_rank) * tp + tp_rank
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from agentrl.configs import ParallelConfig
from agentrl.training.parallel.launch import join_processes
from agentrl.training.parallel.sizes import ParallelSizes


@dataclass(frozen=True)
class Mesh:
    """This process's ranks and process groups."""

    sizes: ParallelSizes
    device: torch.device
    context_mode: str  # attention of context parallelism, one of `configs.CONTEXT_MODES`
    dense: DeviceMesh  # (dp_replicate, fsdp, tp): parameters
    data: DeviceMesh  # (dp, cp, tp): rows and tokens
    experts: DeviceMesh | None  # (dp_replicate, efsdp, ep): parameters of experts, if spread

    @property
    def dp_rank(self) -> int:
        """Data-parallel rank, which selects this process's rows."""
        return self.data.get_local_rank("dp")

    @property
    def dp_size(self) -> int:
        """Number of data-parallel ranks."""
        return self.sizes.dp

    @property
    def dp_group(self) -> dist.ProcessGroup:
        """The processes that together see each row once: for sums over the global batch."""
        return self.data.get_group("dp")

    @property
    def cp_rank(self) -> int:
        """Context-parallel rank, which selects this process's part of each line."""
        return self.data.get_local_rank("cp")

    @property
    def cp_group(self) -> dist.ProcessGroup:
        """The processes that share a line of tokens."""
        return self.data.get_group("cp")

    @property
    def is_first_of_rows(self) -> bool:
        """Whether this is the first of the processes that have the same rows."""
        return self.cp_rank == 0 and self.data.get_local_rank("tp") == 0

    @property
    def tp_group(self) -> dist.ProcessGroup:
        """The processes that share each matrix."""
        return self.data.get_group("tp")

    @property
    def fsdp_mesh(self) -> DeviceMesh:
        """The mesh for `fully_shard`; two-dimensional with replicas."""
        return (
            self.dense["dp_replicate", "fsdp"]
            if self.sizes.dp_replicate > 1
            else self.dense["fsdp"]
        )

    def scale_for_mean_reduction(self, loss: Tensor) -> Tensor:
        """Scale a loss so that FSDP2, which averages gradients, sums them.

        `loss`: a data-parallel rank's sum over its tokens, divided by the global count. Each of its
        context-parallel processes has the gradient of its own tokens only.
        """
        return loss * (self.sizes.dp * self.sizes.cp)


def make_mesh(accelerator: Accelerator, config: ParallelConfig | None = None) -> Mesh:
    """Join the launched processes and make their mesh; without `config` it is data-parallel.

    Collective. Raises `ConfigError` if the processes cannot be divided by the degrees, and
    `RuntimeError` as `check_launch` does.
    """
    config = config or ParallelConfig()
    sizes = ParallelSizes.of(config, accelerator.num_processes)
    join_processes(accelerator)
    device = accelerator.device

    def mesh(**dims: int) -> DeviceMesh:
        return init_device_mesh(
            device.type, tuple(dims.values()), mesh_dim_names=tuple(dims.keys())
        )

    return Mesh(
        sizes=sizes,
        device=device,
        context_mode=config.cp_mode,
        dense=mesh(dp_replicate=sizes.dp_replicate, fsdp=sizes.fsdp, tp=sizes.tp),
        data=mesh(dp=sizes.dp, cp=sizes.cp, tp=sizes.tp),
        experts=mesh(dp_replicate=sizes.dp_replicate, efsdp=sizes.efsdp, ep=sizes.ep)
        if sizes.ep > 1
        else None,
    )
