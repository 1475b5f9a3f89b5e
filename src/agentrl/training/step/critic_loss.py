"""The critic's loss and statistics: pure functions of tokens' values."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class CriticStatistics:
    """Statistics over all trained tokens of the global batch, with the values before the step.

    None in a run without a critic.
    """

    value_loss: float | None = None  # mean of the last update's
    value_mean: float | None = None
    return_mean: float | None = None
    # 1 - Var(R - V) / Var(R): 1 is perfect, 0 no better than a constant
    explained_variance: float | None = None
    critic_grad_norm: float | None = None  # of the last update, before clipping


NO_CRITIC = CriticStatistics()


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> Tensor:
    """The critic's token losses [N]. Tensors are [N] float32; `values` have gradients.

        L = 1/2 * max((V - R)^2, (V_old + clamp(V - V_old, -clip, clip) - R)^2)

    With `clip` None it is half the squared error. The maximum removes the gradient of values that
    left the range around `old_values` towards their return, as in PPO's implementation
    (openai/baselines ppo2; arXiv 2005.12729, section 3).
    """
    error = (values - returns).square()
    if clip is not None:
        near = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(error, (near - returns).square())
    return 0.5 * error


class Moments:
    """Mean and variance of several quantities over the tokens of all ranks."""

    def __init__(self, *quantities: Tensor, group: dist.ProcessGroup | None = None) -> None:
        """`quantities`: each [N] of this rank's tokens. Collective over `group`."""
        stacked = torch.stack([quantity.detach().double() for quantity in quantities])
        count = torch.full_like(stacked[:, :1], stacked.shape[1]).sum(-1)
        sums = torch.stack([count, stacked.sum(-1)])
        dist.all_reduce(sums, group=group)
        self._count = sums[0].clamp(min=1)
        self._mean = sums[1] / self._count
        squares = (stacked - self._mean[:, None]).square().sum(-1)
        dist.all_reduce(squares, group=group)
        self._variance = squares / self._count

    def __getitem__(self, quantity: int) -> tuple[float, float]:
        """Mean and variance of the quantity with this index."""
        return float(self._mean[quantity]), float(self._variance[quantity])


def explained_variance(error_variance: float, return_variance: float) -> float:
    """1 - Var(R - V) / Var(R); 0 if all returns are equal."""
    return 1.0 - error_variance / return_variance if return_variance > 1e-12 else 0.0
