"""How the token losses of a batch become one number, whatever parts the batch is computed in."""

from enum import StrEnum

from torch import Tensor

from agentrl.training.losses.inputs import BatchTotals


class Normalisation(StrEnum):
    """Each divides by counts of the global batch."""

    TOKEN = "token"  # mean over all trained tokens
    SEQUENCE = "sequence"  # mean over the tokens of a sequence, then over sequences
    NONE = "none"  # no length normalisation: sum over tokens, mean over sequences


def normalise(
    token_losses: Tensor, sequence_tokens: Tensor, normalisation: Normalisation, totals: BatchTotals
) -> Tensor:
    """This part's share of the global batch's loss, a scalar.

    `token_losses` [N]; `sequence_tokens` [N] is how many trained tokens the token's whole sequence
    has, wherever they are computed. The sum of the results over every part of the batch is the
    loss. Tokens that a loss leaves out (clip mask, `strict_in_bound`) stay in the counts: leaving
    many out makes the step smaller, and the counts are known before any forward pass.
    """
    if normalisation is Normalisation.TOKEN:
        return token_losses.sum() / max(totals.tokens, 1)
    if normalisation is Normalisation.SEQUENCE:
        return (token_losses / sequence_tokens).sum() / max(totals.sequences, 1)
    return token_losses.sum() / max(totals.sequences, 1)
