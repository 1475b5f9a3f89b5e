"""Gradients of weights that each process of tensor parallelism has of its own units only.

A norm of queries and keys, or an activation with weights, is whole on every process, and each
applies it to its own heads or units: the gradient is the sum over the processes. The plans of
transformers name some of these modules and leave out others, with which the processes would train
different weights. Which are left out is seen from what modules get: the same on every process, or
each its own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from agentrl.configs import ConfigError
from agentrl.training.model.batch_form import BatchForm, batch_form, use_batch_form
from agentrl.training.parallel import Mesh
from agentrl.training.parallel.tensor import sum_gradients, unplanned_modules, whole_weights
from agentrl.training.step.schedule import forget_passes

_TOKENS = 32  # of the line that is run
_VALUES = 1024  # of what a module gets that are compared, from the first token on
# Differences above are no rounding: heads and units have nothing in common.
_SAME = 0.1


def sum_partial_gradients(model: PreTrainedModel, mesh: Mesh) -> None:
    """Make `model`, with its weights, sum the gradients that are partial on `mesh.tp_group`.

    Only modules that the plan leaves out are changed; none without tensor parallelism. Gradients
    are reset. Raises `ConfigError` if gradients of whole weights still differ between the
    processes. Collective.
    """
    if mesh.sizes.tp == 1 or not any(weight.requires_grad for weight in model.parameters()):
        return
    training, tokens = model.training, _tokens(model, mesh)
    with _own_form(model):
        model.eval()
        forget_passes(model)
        for module in _with_own_units(model, mesh, tokens):
            sum_gradients(module, mesh)
        forget_passes(model)
        logits = model(input_ids=tokens, use_cache=False).logits.float()
        weights = torch.linspace(-1, 1, logits.numel(), device=logits.device)
        (logits.flatten() * weights).mean().backward()
        differing = _differing_gradients(model, mesh)
        forget_passes(model)
    model.train(training)
    if differing:
        raise ConfigError(
            f"--tp_size {mesh.sizes.tp}: its processes get different gradients of weights that "
            f"each has whole ({', '.join(differing[:2])}; {len(differing)} in all), and the plan "
            f"of {type(model).__name__.removeprefix('FSDP')} does not say how they add up; use "
            "data or context parallelism instead"
        )


def _tokens(model: PreTrainedModel, mesh: Mesh) -> Tensor:
    """A line [1, T] of tokens, the same on every process."""
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(min(3, vocabulary - 1), vocabulary, (1, _TOKENS), generator=generator)
    return tokens.to(mesh.device)


@contextmanager
def _own_form(model: PreTrainedModel) -> Iterator[None]:
    """Let `model` take padded lines, with eager attention where it can, in the block."""
    form, attention = batch_form(model), str(model.config._attn_implementation)
    eager = "eager" if model._can_set_attn_implementation() else attention
    use_batch_form(model, BatchForm.PADDED, eager)
    try:
        yield
    finally:
        use_batch_form(model, form, attention)


@torch.no_grad()
def _with_own_units(model: PreTrainedModel, mesh: Mesh, tokens: Tensor) -> list[nn.Module]:
    """The modules outside the plan that get other values on each process."""
    modules = unplanned_modules(model)
    got: dict[str, Tensor] = {}

    def keep(
        name: str, module: nn.Module, args: tuple[object, ...], named: dict[str, object]
    ) -> None:
        values = (value for value in (*args, *named.values()) if isinstance(value, Tensor))
        first = next((value for value in values if value.is_floating_point()), None)
        if first is not None and name not in got:
            local = first.to_local() if isinstance(first, DTensor) else first
            got[name] = local.flatten()[:_VALUES].float().cpu()

    hooks = [
        module.register_forward_pre_hook(partial(keep, name), with_kwargs=True)
        for name, module in modules.items()
    ]
    try:
        model(input_ids=tokens, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    everywhere: list[dict[str, Tensor]] = [{}] * mesh.sizes.tp
    dist.all_gather_object(everywhere, got, group=mesh.tp_group)
    first, *others = everywhere  # compared alike on all processes, which must decide alike
    return [
        module
        for name, module in modules.items()
        if name in got and any(_differ(first[name], other[name]) for other in others)
    ]


def _differ(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).norm() > _SAME * one.norm())


@torch.no_grad()
def _differing_gradients(model: PreTrainedModel, mesh: Mesh) -> list[str]:
    """The names of whole weights whose gradients differ over `mesh.tp_group`. Collective."""
    weights = whole_weights(model)
    if not weights:
        return []
    squares = []
    for weight in weights.values():
        own = torch.zeros_like(weight) if weight.grad is None else weight.grad
        assert isinstance(own, DTensor)
        local = own.to_local().float().to(mesh.device)
        mean = local.clone()
        dist.all_reduce(mean, group=mesh.tp_group)
        mean /= mesh.sizes.tp
        squares.append(torch.stack([(local - mean).square().sum(), local.square().sum()]))
    totals = torch.stack(squares).double()
    dist.all_reduce(totals)  # over all processes, so that all have the same names
    difference, norm = totals.sqrt().unbind(1)
    # A weight with hardly any gradient has a large relative difference by rounding alone.
    wrong = difference > _SAME * (norm + 1e-3 * norm.max())
    return [name for name, is_wrong in zip(weights, wrong.tolist(), strict=True) if is_wrong]
