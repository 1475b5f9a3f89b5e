"""The processes as a mesh: which of them share rows, tokens, weights.

Processes are numbered with tensor parallelism innermost, because its messages are the most, then
context, then data:

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
    """The place of this process among all, and the groups it talks to."""

    sizes: ParallelSizes
    device: torch.device
    context_mode: str  # how context-parallel processes attend: see `configs.CONTEXT_MODES`
    dense: DeviceMesh  # (dp_replicate, fsdp, tp): parameters
    data: DeviceMesh  # (dp, cp, tp): rows and tokens
    experts: DeviceMesh | None  # (dp_replicate, efsdp, ep): parameters of experts, if spread

    @property
    def dp_rank(self) -> int:
        """Which rows are this process's."""
        return self.data.get_local_rank("dp")

    @property
    def dp_size(self) -> int:
        """How many ranks have rows of their own."""
        return self.sizes.dp

    @property
    def dp_group(self) -> dist.ProcessGroup:
        """The processes that together see each row once: for sums over the global batch."""
        return self.data.get_group("dp")

    @property
    def cp_rank(self) -> int:
        """Which part of each sequence is this process's."""
        return self.data.get_local_rank("cp")

    @property
    def cp_group(self) -> dist.ProcessGroup:
        """The processes that share a sequence."""
        return self.data.get_group("cp")

    @property
    def tp_group(self) -> dist.ProcessGroup:
        """The processes that share each matrix."""
        return self.data.get_group("tp")

    @property
    def fsdp_mesh(self) -> DeviceMesh:
        """Over which `fully_shard` shards; with replicas a mesh of two dimensions."""
        return (
            self.dense["dp_replicate", "fsdp"]
            if self.sizes.dp_replicate > 1
            else self.dense["fsdp"]
        )

    def scale_for_mean_reduction(self, loss: Tensor) -> Tensor:
        """FSDP2 averages gradients; a loss that is a share of a global sum wants their sum.

        `loss`: a data-parallel rank's sum over its tokens, divided by the global count. Of its
        context-parallel processes each brings the gradient of its own tokens only.
        """
        return loss * (self.sizes.dp * self.sizes.cp)


def make_mesh(accelerator: Accelerator, config: ParallelConfig | None = None) -> Mesh:
    """Join the launched processes and arrange them as `config` says; without it, data-parallel.

    Collective. Raises `ConfigError` for degrees that the processes cannot be divided into, and
    `RuntimeError` if the launch is not what was asked for.
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
