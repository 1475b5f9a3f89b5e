"""All parallelism of the trainer: who holds what of a model, and who talks to whom.

    launch.py             the processes that were launched, joined and ended
    sizes.py              the degrees that the flags ask for, and what is refused
    mesh.py               the processes by degree, and their groups
    tensor.py             matrices split over processes
    experts.py            experts spread over processes
    context_parallel.py   lines of tokens that processes share
    limits.py             which models can be divided so
    apply.py              a model made parallel, top to bottom in the order it happens
    compilation.py        layers compiled
    offload.py            activations kept on the CPU
    agreement.py          what rank 0 decides, told to all
    gradients.py          norm and clip of gradients, however their parameters are sharded

A *data-parallel rank* trains rows of its own. Its tensor-parallel and context-parallel processes
get the same rows and see the same logprobs, so that loss and statistics are computed alike on
them and are summed over `Mesh.dp_group` only.
"""

from agentrl.training.parallel.apply import parallelise, transformer_layers
from agentrl.training.parallel.gradients import (
    clip_grad_norm,
    grad_norms,
    layer_grad_norms,
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
    "transformer_layers",
    "weights_are_finite",
]
