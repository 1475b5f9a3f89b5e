"""A part of a step's sequences as the tensors of one forward pass.

Two shapes: a forest in one line, for models with tree attention, where no token stands twice and
none is padding but to a multiple; and padded lines, one per sequence, for the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.training.attention import TreeLayout
from agentrl.training.forest import merge
from agentrl.training.losses import LossInputs
from agentrl.training.sequences import TrainingSequence


@dataclass(frozen=True)
class MicroBatch:
    """The tensors of one forward pass: B lines of T tokens, M predictions, N trained tokens.

    Where sequences share a prefix they share its predictions too: a prediction is one token at one
    place, and it is the prediction of every trained token that it serves.
    """

    input_ids: Tensor  # [B, T] int64, padded with 0
    position_ids: Tensor  # [B, T] int64, how many tokens stand before it in its sequence
    tree: TreeLayout | None  # of the one line; None: causal lines padded on the right
    positions: Tensor  # [M] int64, into [B * T]: whose hidden state predicts the token
    targets: Tensor  # [M] int64, the token
    temperatures: Tensor  # [M] float32
    prediction: Tensor  # [N] int64, into [M]
    sequence: Tensor  # [N] int64, which of this rank's rows the token is of
    behaviour_logprobs: Tensor  # [N] float32
    advantages: Tensor  # [N] float32
    staleness: Tensor  # [N] int64, see `TrainingSequence`
    sequence_tokens: Tensor  # [N] float32, trained tokens of the token's row
    mask: Tensor  # [N] bool, False only in a placeholder, see `placeholder`

    def loss_inputs(self, logprobs: Tensor, entropy: Tensor | None) -> LossInputs:
        """What the loss sees, given the predictions' logprobs and entropy [M]."""
        return LossInputs(
            logprobs=logprobs[self.prediction],
            behaviour_logprobs=self.behaviour_logprobs,
            advantages=self.advantages,
            mask=self.mask,
            staleness=self.staleness,
            sequence_tokens=self.sequence_tokens,
            sequence=self.sequence,
            entropy=None if entropy is None else entropy[self.prediction],
        )


def collate_forest(
    sequences: Sequence[TrainingSequence],
    rows: Sequence[int],
    pad_to_multiple_of: int = 1,
    device: torch.device | str = "cpu",
) -> MicroBatch:
    """Merge `sequences` (at least one; `rows`: the row of each) into one line."""
    forest = merge([sequence.inputs for sequence in sequences])
    parents, lengths = forest.parents, forest.lengths
    padding = -len(forest.input_ids) % pad_to_multiple_of
    if padding:  # a tree of its own, which nobody sees
        parents, lengths = (*parents, -1), (*lengths, padding)
    layout = TreeLayout(parents, lengths)
    input_ids = np.pad(forest.input_ids.astype(np.int64), (0, padding))
    return _micro_batch(
        input_ids[None], layout.positions[None], layout, forest.places, sequences, rows, device
    )


def collate_padded(
    sequences: Sequence[TrainingSequence],
    rows: Sequence[int],
    pad_to_multiple_of: int = 1,
    device: torch.device | str = "cpu",
) -> MicroBatch:
    """Pad `sequences` (at least one; `rows`: the row of each) on the right, each in its line."""
    longest = max(len(sequence.inputs) for sequence in sequences)
    width = -(-longest // pad_to_multiple_of) * pad_to_multiple_of
    input_ids = np.zeros((len(sequences), width), dtype=np.int64)
    places = []
    for line, sequence in enumerate(sequences):
        inputs = sequence.inputs
        input_ids[line, : len(inputs)] = inputs
        places.append(line * width + np.arange(len(inputs)))
    positions = np.broadcast_to(np.arange(width), input_ids.shape)
    return _micro_batch(input_ids, positions, None, places, sequences, rows, device)


def placeholder(
    pad_to_multiple_of: int = 1, device: torch.device | str = "cpu", *, tree: bool = True
) -> MicroBatch:
    """A micro-batch without weight, for a rank that has fewer than the others.

    It goes through the model like any other, so that all ranks meet in the same collectives, and
    its masked token adds exactly 0 to loss and gradients.
    """
    nothing = TrainingSequence(
        input_ids=np.zeros(2, dtype=np.int32),
        loss_mask=np.array([False, True]),
        advantages=np.zeros(2, dtype=np.float32),
        logprobs=np.zeros(2, dtype=np.float32),
        staleness=np.zeros(2, dtype=np.int32),
        temperature=1.0,
        row_tokens=1,
    )
    collate = collate_forest if tree else collate_padded
    batch = collate([nothing], [0], pad_to_multiple_of, device)
    return replace(batch, mask=torch.zeros_like(batch.mask))


def _micro_batch(
    input_ids: NDArray[np.int64],
    position_ids: NDArray[np.int64],
    layout: TreeLayout | None,
    places: Sequence[NDArray[np.int64]],
    sequences: Sequence[TrainingSequence],
    rows: Sequence[int],
    device: torch.device | str,
) -> MicroBatch:
    """`places`: where each sequence's inputs stand in the flattened `input_ids`."""
    trained = [sequence.trained for sequence in sequences]
    counts = [len(tokens) for tokens in trained]

    def gathered(arrays: Sequence[NDArray[np.generic]]) -> NDArray[np.generic]:
        return np.concatenate(
            [array[tokens] for array, tokens in zip(arrays, trained, strict=True)]
        )

    def repeated(values: Sequence[float]) -> NDArray[np.float64]:
        return np.repeat(np.asarray(values, dtype=np.float64), counts)

    def tensor(array: NDArray[np.generic], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device=device, dtype=dtype)

    sources = np.concatenate(
        [place[tokens - 1] for place, tokens in zip(places, trained, strict=True)]
    )
    targets = gathered([sequence.input_ids for sequence in sequences])
    temperatures = repeated([sequence.temperature for sequence in sequences])
    entries, prediction = _distinct(sources, targets, temperatures)
    return MicroBatch(
        input_ids=tensor(input_ids, torch.int64),
        position_ids=tensor(position_ids, torch.int64),
        tree=layout,
        positions=tensor(sources[entries], torch.int64),
        targets=tensor(targets[entries], torch.int64),
        temperatures=tensor(temperatures[entries], torch.float32),
        prediction=tensor(prediction, torch.int64),
        sequence=tensor(np.repeat(np.asarray(rows), counts), torch.int64),
        behaviour_logprobs=tensor(gathered([s.logprobs for s in sequences]), torch.float32),
        advantages=tensor(gathered([s.advantages for s in sequences]), torch.float32),
        staleness=tensor(gathered([s.staleness for s in sequences]), torch.int64),
        sequence_tokens=tensor(repeated([float(s.row_tokens) for s in sequences]), torch.float32),
        mask=torch.ones(sum(counts), dtype=torch.bool, device=device),
    )


def _distinct(
    *columns: NDArray[np.generic],
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Of N entries that are equal in all `columns` [N] one each, [M]; and whose it is, [N]."""
    key = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        values, number = np.unique(column, return_inverse=True)
        key = key * len(values) + number
    _, first, which = np.unique(key, return_index=True, return_inverse=True)
    return first, which
