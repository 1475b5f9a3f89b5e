"""Losses whose terms depend on more of the batch than one micro-batch holds: two passes.

A term may depend on its whole sequence (GSPO) or on the whole batch (Clip-Cov), and no micro-batch
need hold that much. The loss is a function of logprobs and entropies alone, one number a token
each, so the chain rule parts there:

    first pass, without gradient    logprobs and entropies of all micro-batches -> `joined`
    the objective, on all of them   its derivative by each -> `Coefficients`
    second pass, with gradient      sum(coefficient * logprob) of each micro-batch -> backward

The gradient of the second pass is that of the objective, for any division into micro-batches. What
the first pass costs is a forward pass. Not in here: the model and its passes (`step`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
import torch.distributed as dist
from torch import Tensor

from agentrl.training.losses import BatchTotals, LossInputs, TokenLoss
from agentrl.training.objective import Objective


@dataclass(frozen=True)
class Coefficients:
    """The derivative of the loss by the logprob and by the entropy of N tokens, each [N]."""

    logprobs: Tensor
    entropy: Tensor | None  # None where the loss does not depend on it

    def split(self, sizes: Sequence[int]) -> list["Coefficients"]:
        """Those of consecutive micro-batches with so many tokens each."""
        parts = self.logprobs.split(list(sizes))
        entropies = self.entropy.split(list(sizes)) if self.entropy is not None else None
        return [
            Coefficients(part, None if entropies is None else entropies[index])
            for index, part in enumerate(parts)
        ]

    def surrogate(self, logprobs: Tensor, entropy: Tensor | None) -> Tensor:
        """A scalar with the gradient of the loss; its value means nothing."""
        total = (self.logprobs * logprobs).sum()
        if self.entropy is not None:
            assert entropy is not None, "a loss of the entropy is computed with it"
            total = total + (self.entropy * entropy).sum()
        return total


def joined(parts: Sequence[LossInputs]) -> LossInputs:
    """The tokens of several micro-batches of one rank, in their order, without gradients."""
    return _each_field(parts, lambda tensors: torch.cat([tensor.detach() for tensor in tensors]))


def differentiate(
    objective: Objective, inputs: LossInputs, totals: BatchTotals
) -> tuple[Tensor, TokenLoss, Coefficients]:
    """The loss of `inputs`, its terms, and its derivative by each logprob and entropy."""
    logprobs = inputs.logprobs.detach().requires_grad_()
    entropy = inputs.entropy
    if entropy is not None and objective.entropy_gradient:
        entropy = entropy.detach().requires_grad_()
    with torch.enable_grad():
        share, token_loss = objective.share(
            replace(inputs, logprobs=logprobs, entropy=entropy), totals
        )
    leaves = [leaf for leaf in (logprobs, entropy) if leaf is not None and leaf.requires_grad]
    derivatives = torch.autograd.grad(share, leaves, allow_unused=True)
    by_leaf = [
        torch.zeros_like(leaf) if derivative is None else derivative
        for leaf, derivative in zip(leaves, derivatives, strict=True)
    ]
    coefficients = Coefficients(by_leaf[0], by_leaf[1] if len(by_leaf) > 1 else None)
    return share.detach(), token_loss, coefficients


def over_ranks(
    inputs: LossInputs, rows: int, group: dist.ProcessGroup
) -> tuple[LossInputs, slice]:
    """The tokens of all ranks of `group`, the same on each, and where this rank's are among them.

    `rows`: how many rows this rank has, so that no two ranks' rows get the same `sequence`.
    Collective. Ranks may have different numbers of tokens.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    device = inputs.logprobs.device
    sizes = torch.zeros((ranks, 2), dtype=torch.int64, device=device)
    sizes[rank] = torch.tensor([len(inputs.logprobs), rows])
    dist.all_reduce(sizes, group=group)
    counts, row_counts = sizes[:, 0].tolist(), sizes[:, 1].tolist()
    start, first_row = sum(counts[:rank]), sum(row_counts[:rank])

    def gathered(tensors: Sequence[Tensor]) -> Tensor:
        (own,) = tensors
        whole = torch.zeros(sum(counts), dtype=_summable(own.dtype), device=device)
        whole[start : start + len(own)] = own
        dist.all_reduce(whole, group=group)  # every token is 0 on all ranks but its own
        return whole.to(own.dtype)

    inputs = replace(inputs, sequence=inputs.sequence + first_row)
    return _each_field([inputs], gathered), slice(start, start + counts[rank])


def part_of(token_loss: TokenLoss, part: slice) -> TokenLoss:
    """Some of the tokens of a loss."""
    return TokenLoss(**{field.name: getattr(token_loss, field.name)[part] for field in fields(token_loss)})


def _summable(dtype: torch.dtype) -> torch.dtype:
    return torch.int64 if dtype == torch.bool else dtype


def _each_field(parts: Sequence[LossInputs], join):
    """`join` applied to each tensor of the inputs over all parts; what is None stays None."""
    values = {}
    for field in fields(LossInputs):
        tensors = [getattr(part, field.name) for part in parts]
        values[field.name] = None if tensors[0] is None else join(tensors)
    return LossInputs(**values)
