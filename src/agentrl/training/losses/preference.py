"""Losses of pairs: a chosen and a rejected answer to one prompt. Pure functions.

Each is a function of the answers' log ratios to a frozen reference and returns one loss for a pair.
Let c and r be log(pi / reference) of the chosen and of the rejected answer, each the sum over its
trained tokens, of which there are n_c and n_r.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from agentrl.configs.preferences import LOSS_TYPES, PreferenceConfig
from agentrl.training.losses.inputs import LossInputs


@dataclass(frozen=True)
class PairRatios:
    """The log ratios of P pairs. All tensors are [P] float32; only the ratios have gradients."""

    chosen: Tensor  # c
    rejected: Tensor  # r
    chosen_tokens: Tensor  # n_c
    rejected_tokens: Tensor  # n_r


PairLoss = Callable[[PairRatios, PreferenceConfig], Tensor]


def pair_ratios(inputs: LossInputs) -> tuple[PairRatios, Tensor]:
    """The log ratios of the rows in `inputs`, and the pair [N] of each token.

    A row is a pair. Its tokens have advantage 1 in the chosen and -1 in the rejected answer. All
    trained tokens of a row must be there.
    """
    assert inputs.reference_logprobs is not None, "a preference loss is given the reference"
    rows, pair = torch.unique(inputs.sequence, return_inverse=True)
    ratio = inputs.logprobs - inputs.reference_logprobs
    sides = [inputs.mask & (inputs.advantages > 0), inputs.mask & (inputs.advantages < 0)]

    def summed(values: Tensor, side: Tensor) -> Tensor:
        return values.new_zeros(len(rows)).index_add(0, pair, torch.where(side, values, 0.0))

    ratios = [summed(ratio, side) for side in sides]
    counts = [summed(torch.ones_like(ratio), side) for side in sides]
    return PairRatios(ratios[0], ratios[1], counts[0], counts[1]), pair


def sigmoid(pairs: PairRatios, config: PreferenceConfig) -> Tensor:
    """DPO: the chosen answer wins by the Bradley-Terry model.

        L = -log sigmoid(beta (c - r))

    arXiv 2305.18290, equation 7.
    """
    return -logsigmoid(config.beta * (pairs.chosen - pairs.rejected))


def ipo(pairs: PairRatios, config: PreferenceConfig) -> Tensor:
    """IPO: the difference is led to a value instead of ever further.

        L = (c / n_c - r / n_r - 1 / (2 beta))^2

    arXiv 2310.12036, equation 17, whose tau is beta. The mean over tokens, which its authors use,
    makes beta mean the same for answers of any length.
    """
    chosen = pairs.chosen / pairs.chosen_tokens.clamp(min=1.0)
    rejected = pairs.rejected / pairs.rejected_tokens.clamp(min=1.0)
    return (chosen - rejected - 1.0 / (2.0 * config.beta)).square()


def hinge(pairs: PairRatios, config: PreferenceConfig) -> Tensor:
    """SLiC's hinge with DPO's ratios: no gradient beyond a margin of 1.

        L = max(0, 1 - beta (c - r))

    arXiv 2309.06657 (RSO), equation 9; the hinge is that of SLiC-HF, arXiv 2305.10425.
    """
    return torch.relu(1.0 - config.beta * (pairs.chosen - pairs.rejected))


def robust(pairs: PairRatios, config: PreferenceConfig) -> Tensor:
    """Robust DPO: unbiased where a share e = label_smoothing of pairs is the wrong way round.

        L = (-(1 - e) log sigmoid(d) + e log sigmoid(-d)) / (1 - 2 e),   d = beta (c - r)

    arXiv 2403.00409, equation 10.
    """
    difference = config.beta * (pairs.chosen - pairs.rejected)
    flipped = config.label_smoothing
    right, wrong = -logsigmoid(difference), -logsigmoid(-difference)
    return ((1.0 - flipped) * right - flipped * wrong) / (1.0 - 2.0 * flipped)


def sppo_hard(pairs: PairRatios, config: PreferenceConfig) -> Tensor:
    """SPPO where the chosen answer wins for certain: each answer is led to its own value.

        L = (c - 1 / (2 beta))^2 + (r + 1 / (2 beta))^2

    arXiv 2405.00675, equation 4.7 with P = 1 and 0; the paper's eta is 1 / beta.
    """
    value = 0.5 / config.beta
    return (pairs.chosen - value).square() + (pairs.rejected + value).square()


PREFERENCE_LOSSES: Mapping[str, PairLoss] = dict(
    zip(LOSS_TYPES, (sigmoid, ipo, hinge, robust, sppo_hard), strict=True)
)
