"""Tokens for tests of losses: by ratio and advantage, or at random."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from agentrl.training.losses import LossInputs

HALF = math.log(0.5)


def inputs(
    ratios: Sequence[float],
    advantages: Sequence[float],
    *,
    mask: Sequence[bool] | None = None,
    staleness: Sequence[int] | None = None,
    rows: Sequence[int] | None = None,
    reference: Sequence[float] | None = None,
) -> LossInputs:
    """Tokens with these ratios pi / mu; every behaviour logprob is log 0.5.

    `rows`: how many tokens each row has; `reference`: ratios pi / reference.
    """
    n = len(ratios)
    behaviour = torch.full((n,), HALF)
    logprobs = (behaviour + torch.tensor(ratios).log()).requires_grad_()
    lengths = list(rows or [n])
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    trained = torch.tensor(mask or [True] * n)
    counts = torch.zeros(len(lengths)).index_add(0, sequence, trained.float())
    return LossInputs(
        logprobs=logprobs,
        behaviour_logprobs=behaviour,
        advantages=torch.tensor(advantages),
        mask=trained,
        staleness=torch.tensor(staleness or [0] * n),
        sequence_tokens=counts[sequence],
        sequence=sequence,
        place=_places(lengths, trained),
        reference_logprobs=None
        if reference is None
        else logprobs.detach() - torch.tensor(reference).log(),
    )


def random_inputs(lengths: Sequence[int], seed: int = 0, spread: float = 0.5) -> LossInputs:
    """Rows of so many tokens, off policy by a deviation of `spread`, one advantage a row."""
    generator = torch.Generator().manual_seed(seed)
    n = sum(lengths)

    def normal(size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    behaviour = -normal(n).abs() - 0.1
    return LossInputs(
        logprobs=(behaviour + spread * normal(n)).requires_grad_(),
        behaviour_logprobs=behaviour,
        advantages=normal(len(lengths))[sequence],
        mask=torch.ones(n, dtype=torch.bool),
        staleness=torch.randint(0, 4, (n,), generator=generator),
        sequence_tokens=torch.tensor(lengths, dtype=torch.float32)[sequence],
        sequence=sequence,
        entropy=normal(n).abs().requires_grad_(),
        reference_logprobs=behaviour + spread * normal(n),
        place=_places(lengths, torch.ones(n, dtype=torch.bool)),
    )


def _places(lengths: Sequence[int], mask: Tensor) -> Tensor:
    """The index [N] of each token among the trained ones of its row; those left out have any."""
    return torch.cat([(row.cumsum(0) - 1).clamp(min=0) for row in mask.split(list(lengths))])


def part(given: LossInputs, here: Tensor) -> LossInputs:
    """Some of the tokens."""
    values = {name: value[here] for name, value in vars(given).items() if value is not None}
    return LossInputs(**values)


def gradient(terms: Tensor, given: LossInputs) -> list[float]:
    """d(sum of terms) / d(logprob) [N], rounded."""
    (grad,) = torch.autograd.grad(terms.sum(), given.logprobs, retain_graph=True)
    return [round(value, 5) + 0.0 for value in grad.tolist()]
