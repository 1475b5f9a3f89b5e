"""Collates sequences into the tensors of one forward pass.

Models with tree attention get a forest in one line, without duplicate tokens and with padding only
to a multiple. Other models get padded lines, one per sequence.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.databases.token_tree import TokenTree
from agentrl.training.attention import TreeLayout
from agentrl.training.data.forest import Forest, merge
from agentrl.training.data.packing import PackedPass
from agentrl.training.data.sequences import TrainingSequence
from agentrl.training.losses import LossInputs


@dataclass(frozen=True)
class MicroBatch:
    """The tensors of one forward pass: B lines of T tokens, M predictions, N trained tokens.

    Sequences that share a prefix share its predictions: several of the N trained tokens may have
    the same of the M predictions.
    """

    input_ids: Tensor  # [B, T] int64, padded with 0
    position_ids: Tensor  # [B, T] int64, position in the sequence
    tree: TreeLayout | None  # of the one line; None: causal lines padded on the right
    positions: Tensor  # [M] int64, index of the predicting hidden state in [prefix_tokens + B * T]
    targets: Tensor  # [M] int64, the predicted token
    temperatures: Tensor  # [M] float32
    prediction: Tensor  # [N] int64, index into [M]
    sequence: Tensor  # [N] int64, index of the token's row among this rank's rows
    place: Tensor  # [N] int64, index among the trained tokens of its row
    columns: Mapping[str, Tensor]  # [N] each, by name, see `COLUMNS`; integers as int64
    sequence_tokens: Tensor  # [N] float32, trained tokens of the token's row
    mask: Tensor  # [N] bool, False only in a placeholder, see `placeholder`
    prefix_tokens: int = 0  # number of tokens before the line, computed by a `SharedPrefixBatch`
    first_read: int = 0  # in [B * T]: no hidden state before it predicts anything

    def loss_inputs(self, logprobs: Tensor, entropy: Tensor | None) -> LossInputs:
        """The inputs of the loss [N], given the predictions' logprobs and entropy [M]."""
        return LossInputs.of_columns(
            self.columns,
            logprobs=logprobs[self.prediction],
            entropy=None if entropy is None else entropy[self.prediction],
            mask=self.mask,
            sequence=self.sequence,
            sequence_tokens=self.sequence_tokens,
            place=self.place,
        )


@dataclass(frozen=True)
class SharedPrefixBatch:
    """The tensors of a forward pass over a shared prefix."""

    input_ids: Tensor  # [1, T] int64, padded with 0
    position_ids: Tensor  # [1, T] int64
    tree: TreeLayout
    tokens: int  # without padding


def collate_forest(
    sequences: Sequence[TrainingSequence],
    rows: Sequence[int],
    pad_to_multiple_of: int = 1,
    device: torch.device | str = "cpu",
) -> MicroBatch:
    """Merge `sequences` (at least one; `rows`: the row of each) into one line."""
    forest = merge([sequence.inputs for sequence in sequences])
    whole = PackedPass(tuple(range(len(forest.tree.nodes))), tuple(range(len(sequences))))
    return collate_pass(forest, whole, (), sequences, rows, pad_to_multiple_of, device)


def collate_pass(
    forest: Forest,
    packed: PackedPass,
    prefix: Sequence[int],
    sequences: Sequence[TrainingSequence],
    rows: Sequence[int],
    pad_to_multiple_of: int = 1,
    device: torch.device | str = "cpu",
) -> MicroBatch:
    """Collate the nodes and sequences of `packed` into one line that follows the nodes of `prefix`.

    `forest` is the forest of `sequences`; `rows` the row of each sequence.
    """
    tokens = forest.tree.places((*prefix, *packed.nodes))
    prefix_tokens = sum(forest.tree.nodes[node].length for node in prefix)
    line, padding = _padded(forest.tree["ids"][tokens[prefix_tokens:]], pad_to_multiple_of)
    layout = _layout(forest, packed.nodes, prefix_tokens, padding)
    place = np.full(len(forest.tree), -1, dtype=np.int64)
    place[tokens] = np.arange(len(tokens))
    return _micro_batch(
        line[None],
        layout.positions[None],
        layout,
        [place[forest.places[sequence]] for sequence in packed.sequences],
        [sequences[sequence] for sequence in packed.sequences],
        [rows[sequence] for sequence in packed.sequences],
        device,
        prefix_tokens,
    )


def collate_prefix(
    forest: Forest,
    prefix: Sequence[int],
    pad_to_multiple_of: int = 1,
    device: torch.device | str = "cpu",
) -> SharedPrefixBatch:
    """Collate the nodes of `prefix`, from a root downwards, into one line."""
    tokens = forest.tree.places(prefix)
    line, padding = _padded(forest.tree["ids"][tokens], pad_to_multiple_of)
    layout = _layout(forest, (), len(tokens), padding, prefix_asks=True)
    return SharedPrefixBatch(
        input_ids=torch.from_numpy(line[None]).to(device),
        position_ids=torch.from_numpy(layout.positions[None]).to(device),
        tree=layout,
        tokens=len(tokens),
    )


def _padded(tokens: NDArray[np.int32], multiple: int) -> tuple[NDArray[np.int64], int]:
    padding = -len(tokens) % multiple
    return np.pad(tokens.astype(np.int64), (0, padding)), padding


def _layout(
    forest: Forest,
    nodes: Sequence[int],
    prefix_tokens: int,
    padding: int,
    *,
    prefix_asks: bool = False,
) -> TreeLayout:
    """The layout of the prefix as one node, `nodes` under it, and padding, which no token sees.

    Queries are all tokens except the prefix; with `prefix_asks` all tokens.
    """
    parents, lengths = ([-1], [prefix_tokens]) if prefix_tokens else ([], [])
    number = {-1: -1}
    for node in nodes:
        number[node] = len(parents)
        # A parent outside of `nodes` is the prefix, node 0.
        parents.append(number.get(forest.tree.nodes[node].parent, 0))
        lengths.append(forest.tree.nodes[node].length)
    if padding:
        parents.append(-1)
        lengths.append(padding)
    layout = TreeLayout(parents, lengths)
    if prefix_tokens and not prefix_asks:
        return layout.restrict(prefix_tokens, layout.n_tokens)
    return layout


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
    positions = np.tile(np.arange(width), (len(sequences), 1))
    return _micro_batch(input_ids, positions, None, places, sequences, rows, device)


def placeholder(
    pad_to_multiple_of: int = 1, device: torch.device | str = "cpu", *, tree: bool = True
) -> MicroBatch:
    """A micro-batch of weight 0, for a rank that has fewer micro-batches than others.

    It goes through the model, so that all ranks run the same collectives. Its token is masked and
    adds exactly 0 to loss and gradients.
    """
    collate = collate_forest if tree else collate_padded
    batch = collate([_nothing()], [0], pad_to_multiple_of, device)
    return replace(batch, mask=torch.zeros_like(batch.mask))


def placeholder_prefix(
    pad_to_multiple_of: int = 1, device: torch.device | str = "cpu"
) -> SharedPrefixBatch:
    """A shared prefix that no micro-batch follows, for a rank with fewer prefixes than others."""
    return collate_prefix(merge([_nothing().inputs]), [0], pad_to_multiple_of, device)


def _nothing() -> TrainingSequence:
    """Two tokens, of which the second is trained."""
    return TrainingSequence(TokenTree.line([0, 0], mask=[0, 1]), temperature=1.0, row_tokens=1)


def _micro_batch(
    input_ids: NDArray[np.int64],
    position_ids: NDArray[np.int64],
    layout: TreeLayout | None,
    places: Sequence[NDArray[np.int64]],
    sequences: Sequence[TrainingSequence],
    rows: Sequence[int],
    device: torch.device | str,
    prefix_tokens: int = 0,
) -> MicroBatch:
    """`places`: the indices of each sequence's inputs in the prefix and the flattened `input_ids`.

    `prefix_tokens`: those of the prefix.
    """
    trained = [sequence.trained for sequence in sequences]
    counts = [len(own) for own in trained]

    def repeated(values: Sequence[float]) -> NDArray[np.float64]:
        return np.repeat(np.asarray(values, dtype=np.float64), counts)

    def tensor(array: NDArray[np.generic], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device=device, dtype=dtype)

    sources = np.concatenate([place[own - 1] for place, own in zip(places, trained, strict=True)])
    row_places = [s.trained_before + np.arange(n) for s, n in zip(sequences, counts, strict=True)]
    tokens = TokenTree.concat(
        [sequence.tokens.take(own) for sequence, own in zip(sequences, trained, strict=True)]
    )
    targets = tokens["ids"]
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
        place=tensor(np.concatenate(row_places), torch.int64),
        columns={
            name: tensor(values, torch.float32 if values.dtype.kind == "f" else torch.int64)
            for name, values in tokens.columns.items()
        },
        sequence_tokens=tensor(repeated([float(s.row_tokens) for s in sequences]), torch.float32),
        mask=torch.ones(sum(counts), dtype=torch.bool, device=device),
        prefix_tokens=prefix_tokens,
        first_read=int(sources[sources >= prefix_tokens].min()) - prefix_tokens,
    )


def _distinct(
    *columns: NDArray[np.generic],
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Deduplicate N entries by their `columns` [N].

    Returns the indices [M] of the distinct entries, and for each entry the index into them [N].
    """
    key = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        values, number = np.unique(column, return_inverse=True)
        key = key * len(values) + number
    _, first, which = np.unique(key, return_index=True, return_inverse=True)
    return first, which
