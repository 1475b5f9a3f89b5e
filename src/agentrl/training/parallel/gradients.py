"""Gradients of sharded parameters: their reduction over replicas, norm and clipping.

`torch.nn.utils.clip_grad_norm_` needs all gradients on one mesh. Here they may be sharded over
data, over data and tensor parallelism, or over experts.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel


def reduce_over_replicas(model: nn.Module, *, now: bool) -> None:
    """Whether the next backward pass reduces gradients over replicas (`--dp_replicate_size`).

    A pass that does not adds this replica's sum, of a shard, to that of earlier passes. A step thus
    reduces once, however many micro-batches it has. Without replicas nothing changes.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(now)


@torch.no_grad()
def grad_norms(groups: Sequence[Iterable[nn.Parameter]]) -> Tensor:
    """The norm of the gradients of each group of parameters, [groups] float64 on the CPU.

    Each process sums the squares that it holds, divided by the number of processes that hold the
    same, and one reduction over all processes adds them. A parameter without gradient counts 0.
    Collective.
    """
    squares = torch.stack([_held_squares(parameters) for parameters in groups])
    dist.all_reduce(squares)
    return squares.sqrt().cpu()


@torch.no_grad()
def clip_grad_norm(model: nn.Module, max_norm: float) -> float:
    """Clip the gradients to `max_norm` (0: no clipping). Returns their norm before. Collective."""
    norm = float(grad_norms([list(model.parameters())])[0])
    if max_norm and norm > max_norm:
        scale = max_norm / (norm + 1e-6)
        torch._foreach_mul_(
            [_local(p.grad) for p in model.parameters() if p.grad is not None], scale
        )
    return norm


@torch.no_grad()
def weights_are_finite(model: nn.Module) -> bool:
    """Whether all parameters on all processes are finite. Collective."""
    held = [_local(parameter) for parameter in model.parameters()]
    wrong = torch.stack([(~torch.isfinite(values)).sum() for values in held]).sum()
    counted = wrong.to(torch.float64)
    dist.all_reduce(counted)
    return counted.item() == 0


def layer_grad_norms(model: PreTrainedModel) -> dict[str, float]:
    """The gradient norm of each transformer layer and of each module outside of them, by name.

    Names are those of the modules: `model.layers.0`, `model.embed_tokens`, `lm_head`. Collective.
    """
    split = set(model._no_split_modules or ())
    # FSDP inserts a class before the module's class.
    layers = [
        name
        for name, module in model.named_modules()
        if split & {parent.__name__ for parent in type(module).__mro__}
    ]
    groups: dict[str, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        layer = next((layer for layer in layers if name.startswith(f"{layer}.")), None)
        groups.setdefault(layer or name.rpartition(".")[0], []).append(parameter)
    return dict(zip(groups, grad_norms(list(groups.values())).tolist(), strict=True))


def _held_squares(parameters: Iterable[nn.Parameter]) -> Tensor:
    """This process's part of the squared norm; the parts of all processes add up to it."""
    by_holders: dict[int, list[Tensor]] = {}
    device = torch.device("cpu")
    for parameter in parameters:
        device = _meeting_device(parameter)
        if parameter.grad is not None:
            by_holders.setdefault(_holders(parameter.grad), []).append(_local(parameter.grad))
    total = torch.zeros((), dtype=torch.float64, device=device)
    for holders, gradients in by_holders.items():
        norms = torch.stack(torch._foreach_norm(gradients)).double()
        total += (norms**2).sum().to(device) / holders
    return total


def _holders(gradient: Tensor) -> int:
    """Number of processes that hold each element."""
    processes = dist.get_world_size()
    if not isinstance(gradient, DTensor):
        return processes
    mesh = gradient.device_mesh
    shards = 1
    for dim, placement in enumerate(gradient.placements):
        if not placement.is_replicate():
            shards *= mesh.size(dim)
    return processes // shards


def _meeting_device(parameter: nn.Parameter) -> torch.device:
    """Device of the parameter's collectives; its shards may be on the CPU."""
    if isinstance(parameter, DTensor):
        return torch.device(parameter.device_mesh.device_type)
    return parameter.device


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
