"""Rows as sequences, and sequences as tensors."""

from collections.abc import Callable

import numpy as np
import pytest
from tiny import make_row, sequences_of

from agentrl.databases.documents import DBRecordData
from agentrl.training.data.batch import MicroBatch, collate_forest, collate_padded
from agentrl.training.data.sequences import count_totals

#        0: tokens 0-6
#        ├── 1: 6-12
#        │   ├── 2: 12-17
#        │   └── 3: 17-24
#        └── 4: 24-30
TREE = [(0, 6, -1), (6, 12, 0), (12, 17, 1), (17, 24, 1), (24, 30, 0)]


def test_a_row_of_one_node_is_one_sequence() -> None:
    row = make_row("a", 0, [(0, 20, -1)], temperature=0.7, version=3)
    (sequence,) = sequences_of(row)
    assert sequence.tokens["ids"].tolist() == row.tree["ids"].tolist()
    assert sequence.tokens["mask"].tolist() == row.tree["mask"].tolist()
    assert sequence.row_tokens == row.n_train_tokens
    assert sequence.temperature == 0.7


def test_a_tree_is_its_root_to_leaf_paths() -> None:
    row = make_row("a", 0, TREE)
    ids = row.tree["ids"]
    paths = [sequence.tokens["ids"].tolist() for sequence in sequences_of(row)]
    assert paths == [
        ids[:17].tolist(),
        np.concatenate([ids[:12], ids[17:24]]).tolist(),
        np.concatenate([ids[:6], ids[24:]]).tolist(),
    ]


def test_a_shared_nodes_tokens_are_trained_exactly_once() -> None:
    row = make_row("a", 0, TREE)
    sequences = sequences_of(row)
    assert sum(int(sequence.tokens["mask"].sum()) for sequence in sequences) == row.n_train_tokens
    assert all(sequence.row_tokens == row.n_train_tokens for sequence in sequences)
    assert not sequences[1].tokens["mask"][:12].any()
    assert not sequences[2].tokens["mask"][:6].any()


def test_a_path_that_trains_nothing_is_left_out() -> None:
    row = make_row("a", 0, TREE, trained_nodes=[1, 4])
    assert [len(sequence) for sequence in sequences_of(row)] == [17, 12]


def test_the_first_token_of_a_sequence_is_never_trained() -> None:
    row = make_row("a", 0, [(0, 4, -1)])
    tree = row.tree.with_columns(mask=[1, 1, 0, 1])
    row = row.model_copy(update={"tree": tree, "n_train_tokens": 3})
    (sequence,) = sequences_of(row)
    assert sequence.tokens["mask"].tolist() == [False, True, False, True]
    assert sequence.row_tokens == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"logprobs": b"\0" * 4}, "1 tokens where n_tokens says 20"),
        ({"nodes": [{"start": 0, "end": 19, "parent": -1}]}, "end at token 19"),
        ({"nodes": [{"start": 0, "end": 20, "parent": 0}]}, "node 0"),
    ],
)
def test_a_damaged_row_is_named(change: dict[str, object], said: str) -> None:
    stored = {**make_row("the-row", 0, [(0, 20, -1)]).to_mongo(), **change}
    with pytest.raises(ValueError, match=f"the-row.*{said}"):
        DBRecordData.from_mongo(stored)


def two_rows() -> list[DBRecordData]:
    return [make_row("a", 0, [(0, 9, -1)], version=1), make_row("b", 1, TREE, version=2)]


@pytest.mark.parametrize("collate", [collate_forest, collate_padded])
def test_the_tensors_hold_each_trained_token_beside_its_predecessor(
    collate: Callable[..., MicroBatch],
) -> None:
    rows = two_rows()
    sequences = [sequence for row in rows for sequence in sequences_of(row, 4)]
    batch = collate(sequences, [0, 1, 1, 1], pad_to_multiple_of=8)
    assert len(batch.prediction) == sum(row.n_train_tokens for row in rows)
    before = np.concatenate([s.tokens["ids"][s.trained - 1] for s in sequences])
    trained = np.concatenate([s.tokens["ids"][s.trained] for s in sequences])
    depths = np.concatenate([s.trained - 1 for s in sequences])
    source = batch.positions[batch.prediction]
    assert batch.input_ids.flatten()[source].tolist() == before.tolist()
    assert batch.position_ids.flatten()[source].tolist() == depths.tolist()
    assert batch.targets[batch.prediction].tolist() == trained.tolist()
    n_first = rows[0].n_train_tokens
    assert batch.columns["staleness"].tolist() == [3] * n_first + [2] * rows[1].n_train_tokens
    assert batch.sequence.tolist() == [0] * n_first + [1] * rows[1].n_train_tokens
    assert batch.sequence_tokens[0] == n_first
    trained = np.flatnonzero(rows[0].tree["mask"])
    expected = rows[0].tree["logprobs"][trained]
    assert batch.columns["logprobs"][:n_first].tolist() == expected.tolist()
    assert batch.mask.all()


def test_a_forest_holds_no_token_twice_and_none_that_predicts_nothing() -> None:
    tree = make_row("b", 1, [(0, 20, -1), (20, 40, 0), (40, 45, 1), (45, 52, 1), (52, 58, 0)])
    sequences = [*sequences_of(two_rows()[0]), *sequences_of(tree)]
    batch = collate_forest(sequences, [0, 1, 1, 1], pad_to_multiple_of=8)
    assert batch.tree is not None
    # the last token of each of the four leaves is only predicted
    assert batch.tree.lengths == (8, 20, 20, 4, 6, 5, 1)
    assert batch.tree.parents == (-1, -1, 1, 2, 2, 1, -1)
    assert batch.input_ids.shape == (1, 64)


def test_totals_count_rows_not_paths() -> None:
    rows = [make_row("a", 0, [(0, 9, -1)]), make_row("b", 1, TREE)]
    totals = count_totals([sequences_of(row) for row in rows])
    assert totals.tokens == sum(row.n_train_tokens for row in rows)
    assert totals.sequences == 2
