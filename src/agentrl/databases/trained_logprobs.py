"""The trainer's logprobs and entropies of a row's tokens, as a step that trained the row left them.

With `--store_trainer_logprobs` the mark of a step on its rows (`TrainedStep`) has the logprobs of
the row's trained tokens under the weights before the step, at the temperature of sampling; and the
entropies of these distributions, if the step computes them (`--log_entropy`, `--entropy_coef`).
They are written with the mark, so what undoes the one undoes the other.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.databases.arrays import unpack_floats, unpack_halves
from agentrl.databases.documents import TrainedStep
from agentrl.databases.token_tree import TokenTree

KeptColumns = Mapping[str, bytes]  # of a row: `logprobs`, and perhaps `entropies`, of a TrainedStep
# Of a row with more trained tokens none are kept: several marks must fit into its document.
MOST_TOKENS = 2**18


def trained_places(tree: TokenTree) -> NDArray[np.intp]:
    """Where the trained tokens [n] of a row's tree are, in the order in which they are kept.

    The first token of a sequence has no prediction and is never trained.
    """
    mask = tree["mask"].astype(bool)
    mask[[node.start for node in tree.nodes if node.parent < 0 and node.length]] = False
    return np.flatnonzero(mask)


def trainer_logprobs(tree: TokenTree, trained: Sequence[TrainedStep]) -> NDArray[np.float32] | None:
    """The trainer's logprob of each token [n_tokens] of a row, by the last step that kept them.

    Tokens that are not trained have 0. None if no step has kept any.
    """
    kept = [unpack_floats(mark.logprobs) for mark in trained if mark.logprobs is not None]
    return _at_places(tree, kept[-1], "logprobs") if kept else None


def trainer_entropies(
    tree: TokenTree, trained: Sequence[TrainedStep]
) -> NDArray[np.float32] | None:
    """The entropy of the trainer's policy at each token [n_tokens], in nats, as above."""
    kept = [unpack_halves(mark.entropies) for mark in trained if mark.entropies is not None]
    return _at_places(tree, kept[-1], "entropies") if kept else None


def _at_places(tree: TokenTree, own: NDArray[Any], what: str) -> NDArray[np.float32]:
    """Values of the trained tokens as a column of the tree."""
    values: NDArray[Any] = np.zeros(len(tree), dtype=np.float32)
    places = trained_places(tree)
    if len(own) != len(places):
        raise ValueError(f"{len(own)} {what} of the trainer are kept of {len(places)} tokens")
    values[places] = own
    return values
