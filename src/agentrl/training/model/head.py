"""The head, chunk by chunk: from hidden states to logprobs of given tokens, and entropies.

The logits of one chunk exist at a time, in the forward and in the backward pass. The gradients of
the head's weights are summed over chunks in float32: in bfloat16 each addition rounds the sum so
far, by more the more chunks there are.

With `fp32` the matrix product and the gradient of the weights are in float32 too, from the weights
and hidden states as the rest of the model has them. bfloat16 rounds a logit of 20 by up to 1/16.
MiniMax-M1 (arXiv 2506.13585, section 3.2) found most of the difference between trainer and engine
there; other differences, as of hidden states, stay.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.tensor import DTensor
from torch.func import functional_call

from agentrl.training.model.softmax import picked_logprobs

Weights = Mapping[str, Tensor]  # of the head, by their names in it


@dataclass(frozen=True)
class HeadOptions:
    """How the head's results are computed.

    chunk_size: largest number of tokens whose logits exist at once
    entropy: whether entropies are computed; entropy_gradient: whether these have a gradient
    fp32: whether a head in bfloat16 computes in float32
    """

    chunk_size: int
    entropy: bool = False
    entropy_gradient: bool = False
    fp32: bool = False


def head_logprobs(
    head: nn.Module, hidden: Tensor, targets: Tensor, temperatures: Tensor, options: HeadOptions
) -> tuple[Tensor, Tensor | None]:
    """log softmax(head(hidden) / temperature) of `targets`, and the entropy of that distribution.

    `hidden` [M, H]; `targets` [M] int64; `temperatures` [M] float32. Returns logprobs [M] float32
    and, with `options.entropy`, entropies [M] float32. Under tensor parallelism the head gives a
    slice of the vocabulary (`parallel.tensor`). The backward pass can run once.
    """
    if len(targets) <= options.chunk_size:
        # Recomputing a single chunk would save no memory.
        weights = _computing(dict(head.named_parameters()), options)
        return _chunk(head, weights, hidden, targets, temperatures, options)
    logprobs, entropies = _Chunks.apply(
        head, options, targets, temperatures, hidden, *_trained(head).values()
    )
    if not options.entropy:
        return logprobs, None
    return logprobs, entropies if options.entropy_gradient else entropies.detach()


class _Chunks(torch.autograd.Function):
    """All chunks of one forward pass. The backward pass computes each chunk's logits again."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        head: nn.Module,
        options: HeadOptions,
        targets: Tensor,
        temperatures: Tensor,
        hidden: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        weights = _computing(dict(head.named_parameters()), options)
        logprobs, entropies = torch.empty_like(temperatures), torch.empty_like(temperatures)
        for part in _parts(len(targets), options.chunk_size):
            logprobs[part], entropy = _chunk(
                head, weights, hidden[part], targets[part], temperatures[part], options
            )
            if entropy is not None:
                entropies[part] = entropy
        ctx.save_for_backward(hidden, targets, temperatures)
        ctx.head, ctx.options = head, options  # type: ignore[attr-defined]
        return logprobs, entropies

    @staticmethod
    def backward(
        ctx: FunctionCtx, grad_logprobs: Tensor, grad_entropies: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden, targets, temperatures = ctx.saved_tensors  # type: ignore[attr-defined]
        head, options = ctx.head, ctx.options  # type: ignore[attr-defined]
        parameters = _trained(head)
        computing = _computing(dict(head.named_parameters()), options)
        leaves = {name: computing[name].detach().requires_grad_() for name in parameters}
        weights = {**computing, **leaves}
        by_hidden = torch.empty_like(hidden)
        sums: dict[str, Tensor] = {}
        for part in _parts(len(targets), options.chunk_size):
            with torch.enable_grad():
                states = hidden[part].detach().requires_grad_()
                logprobs, entropies = _chunk(
                    head, weights, states, targets[part], temperatures[part], options
                )
            outputs, grads = [logprobs], [grad_logprobs[part]]
            if entropies is not None and options.entropy_gradient:
                outputs, grads = [logprobs, entropies], [*grads, grad_entropies[part]]
            by_hidden[part], *by_weights = torch.autograd.grad(
                outputs, [states, *leaves.values()], grads
            )
            for name, grad in zip(leaves, by_weights, strict=True):
                sums[name] = sums[name].add_(grad) if name in sums else grad.float()
        rounded = [sums[name].to(parameter.dtype) for name, parameter in parameters.items()]
        return None, None, None, None, by_hidden, *rounded


def _trained(head: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in head.named_parameters() if p.requires_grad}


def _computing(parameters: Weights, options: HeadOptions) -> Weights:
    """The head's weights in the dtype that they compute in."""
    if not options.fp32:
        return parameters
    return {name: parameter.float() for name, parameter in parameters.items()}


def _parts(count: int, size: int) -> Sequence[slice]:
    return [slice(start, start + size) for start in range(0, count, size)]


def _chunk(
    head: nn.Module,
    weights: Weights,
    hidden_NH: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    options: HeadOptions,
) -> tuple[Tensor, Tensor | None]:
    vocabulary = head.weight.device_mesh.get_group() if isinstance(head.weight, DTensor) else None
    states = hidden_NH.float() if options.fp32 else hidden_NH
    return picked_logprobs(
        functional_call(head, dict(weights), (states,)), targets, temperatures,
        entropy=options.entropy, entropy_gradient=options.entropy_gradient, vocabulary=vocabulary,
    )  # fmt: skip
