"""Parallelism of the trainer: sharding of models, and process groups.

    launch.py             joining and ending processes
    sizes.py              degrees of parallelism, from the flags
    mesh.py               device meshes and process groups
    tensor.py             tensor parallelism
    experts.py            expert parallelism
    context_parallel.py   context parallelism
    limits.py             checks that a model can be divided
    apply.py              applies all parallelism to a model, in order
    compilation.py        torch.compile of layers
    offload.py            activation offloading
    held_parts.py         the part of a tensor that a process holds
    agreement.py          decisions of rank 0, and failures, shared with all processes
    gradients.py          reduction, norm and clipping of gradients with any sharding

A *data-parallel rank* trains its own rows. Its tensor-parallel and context-parallel processes get
the same rows and the same logprobs, so that they compute the same loss and statistics, which are
summed over `Mesh.dp_group` only.
"""

from agentrl.training.parallel.apply import parallelise, transformer_layers
from agentrl.training.parallel.gradients import (
    clip_grad_norm,
    grad_norms,
    layer_grad_norms,
    reduce_over_replicas,
    weights_are_finite,
)
from agentrl.training.parallel.launch import exit_process, join_processes
from agentrl.training.parallel.limits import check_degrees
from agentrl.training.parallel.mesh import Mesh, make_mesh
from agentrl.training.parallel.sizes import ParallelSizes

__all__ = [
    "Mesh",
    "ParallelSizes",
    "check_degrees",
    "clip_grad_norm",
    "exit_process",
    "grad_norms",
    "join_processes",
    "layer_grad_norms",
    "make_mesh",
    "parallelise",
    "reduce_over_replicas",
    "transformer_layers",
    "weights_are_finite",
]
