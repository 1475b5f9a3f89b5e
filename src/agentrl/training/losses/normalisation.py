"""Normalisation of token losses to one loss, independent of the split into micro-batches."""

from enum import StrEnum

from torch import Tensor

from agentrl.training.losses.inputs import BatchTotals


class Normalisation(StrEnum):
    """Each divides by counts of the global batch."""

    TOKEN = "token"  # mean over all trained tokens
    SEQUENCE = "sequence"  # mean over the tokens of a sequence, then over sequences
    CONSTANT = "constant"  # sum over tokens divided by a constant length, then over sequences


def normalise(
    token_losses: Tensor,
    sequence_tokens: Tensor,
    normalisation: Normalisation,
    totals: BatchTotals,
    length: int = 1,
) -> Tensor:
    """This part's share of the global batch's loss, a scalar.

    `token_losses` [N]; `sequence_tokens` [N]: number of trained tokens of each token's whole
    sequence; `length`: the divisor of `Normalisation.CONSTANT`, in tokens. The loss is the sum of
    the results over all parts of the batch. Tokens that a loss
    leaves out (band, `rollout_rs`) stay in the counts, which are known before any forward pass;
    leaving out many tokens makes the step smaller.
    """
    if normalisation is Normalisation.TOKEN:
        return token_losses.sum() / max(totals.tokens, 1)
    if normalisation is Normalisation.SEQUENCE:
        return (token_losses / sequence_tokens).sum() / max(totals.sequences, 1)
    return token_losses.sum() / length / max(totals.sequences, 1)
