"""Generalised advantage estimation: from rewards and values of tokens to advantages and returns.

Pure functions. A row is an episode whose steps are its trained tokens in order. The state of a
token is everything that it was predicted from. Tool results between two generated tokens are part
of the transition, not separate steps. `critic` computes the values.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_STD_FLOOR = 1e-8  # keeps a batch of equal advantages finite


@dataclass(frozen=True)
class Estimates:
    """Estimates for N trained tokens, [N] float32, in the order of the given values."""

    advantages: Tensor
    returns: Tensor  # targets of the critic: advantage + value


def outcome_rewards(outcomes: Tensor, sequence: Tensor, place: Tensor) -> Tensor:
    """Rewards [N] of tokens: the row's outcome for its last token, 0 for all others.

    `outcomes` [rows] float32; `sequence` [N] int64: the row of each token; `place` [N] int64: its
    index among the trained tokens of its row.
    """
    lengths = _lengths(sequence, place, len(outcomes))
    return torch.where(place == lengths[sequence] - 1, outcomes[sequence], 0.0)


def generalised_advantages(
    rewards: Tensor,
    values: Tensor,
    sequence: Tensor,
    place: Tensor,
    *,
    gamma: float,
    lam: float,
) -> Estimates:
    """GAE(gamma, lambda) along the trained tokens of each row (arXiv 1506.02438, equation 16).

        delta_t = r_t + gamma * V_t+1 - V_t,    V after the last token is 0
        A_t     = delta_t + gamma * lambda * A_t+1
        R_t     = A_t + V_t

    `rewards`, `values` [N] float32; `values` are of the states that the tokens were sampled in.
    `sequence`, `place` [N] int64 as in `outcome_rewards`: the places of a row are 0, 1, ... without
    gaps, in any order. Computed in float64 on the CPU, one step for each place.
    """
    rows = int(sequence.max()) + 1 if len(sequence) else 0
    places = int(place.max()) + 1 if len(place) else 0
    at = (place.cpu().numpy(), sequence.cpu().numpy())
    rewards_PR, values_PR = np.zeros((places, rows)), np.zeros((places, rows))
    rewards_PR[at] = rewards.detach().double().cpu().numpy()
    values_PR[at] = values.detach().double().cpu().numpy()
    advantages_PR = np.zeros((places, rows))
    # After the end of a row, rewards and values are 0, and so are its advantages.
    next_value = next_advantage = np.zeros(rows)
    for step in reversed(range(places)):
        delta = rewards_PR[step] + gamma * next_value - values_PR[step]
        next_advantage = delta + gamma * lam * next_advantage
        next_value = values_PR[step]
        advantages_PR[step] = next_advantage
    advantages = torch.from_numpy(advantages_PR[at])
    returns = advantages + torch.from_numpy(values_PR[at])
    return Estimates(
        advantages=advantages.to(values.device, torch.float32),
        returns=returns.to(values.device, torch.float32),
    )


def normalized(advantages: Tensor, mean: float, variance: float) -> Tensor:
    """Advantages [N] with mean 0 and variance 1, given both over the whole batch."""
    return (advantages - mean) / (math.sqrt(variance) + _STD_FLOOR)


def _lengths(sequence: Tensor, place: Tensor, rows: int) -> Tensor:
    """Number of trained tokens of each row, [rows]."""
    lengths = torch.zeros(rows, dtype=torch.int64, device=sequence.device)
    return lengths.scatter_reduce(0, sequence, place + 1, reduce="amax")
