"""Per-token columns on their whole way: a conversation, a stored row, sequences, a micro-batch."""

import time

import numpy as np
import pytest

from agentrl.databases.arrays import FLOAT32
from agentrl.databases.documents import DBRecordData, TurnStatus
from agentrl.databases.policies import Lineage
from agentrl.databases.token_tree import COLUMNS, Column, TokenTree
from agentrl.policy_version import VersionSpan
from agentrl.rollout.chat.tokens import TokenContext
from agentrl.rollout.groups.group_rules import turn_advantages
from agentrl.training.data.batch import collate_forest, collate_padded
from agentrl.training.data.sequences import row_sequences


def spans(*versions: int) -> list[VersionSpan]:
    """One span for each token."""
    return [VersionSpan(version=v, start=i, end=i + 1) for i, v in enumerate(versions)]


def worked_example(**columns: list[list[float]]) -> TokenContext:
    """The conversation in the docstring of `TokenTree`. `columns`: of each turn's tokens."""
    of_turn = [{name: values[turn] for name, values in columns.items()} for turn in range(3)]
    context = TokenContext()
    context.begin_segment([1, 2, 3])
    context.add_turn([10, 11], [-0.5, -0.25], spans(4, 4), of_turn[0])
    context.observe([20, 21])
    context.add_turn(np.array([12, 13]), np.array([-1.0, -0.125]), spans(4, 5), of_turn[1])
    context.begin_segment([1, 2, 3, 30])
    context.add_turn([14], [-2.0], spans(5), of_turn[2])
    return context


def row_of(tree: TokenTree) -> DBRecordData:
    return DBRecordData(
        id="r", task="t", group_order=0, reward=1.0, n_train_tokens=5, cost=1.0,
        policy_versions=[4, 5],
        temperature=1.0, tree=tree, prefix_hash="p",
    )  # fmt: skip


def test_a_conversation_grows_the_tree_of_the_worked_example() -> None:
    tree = worked_example().tree()
    assert [tuple(node) for node in tree.nodes] == [(0, 3, -1), (3, 9, 0), (9, 11, 0)]
    assert tree["ids"].tolist() == [1, 2, 3, 10, 11, 20, 21, 12, 13, 30, 14]
    assert tree["mask"].tolist() == [0, 0, 0, 1, 1, 0, 0, 1, 1, 0, 1]
    assert tree["logprobs"].tolist() == [0, 0, 0, -0.5, -0.25, 0, 0, -1, -0.125, 0, -2]
    assert tree["versions"].tolist() == [-1, -1, -1, 4, 4, -1, -1, 4, 5, -1, 5]


def test_a_column_of_the_table_goes_from_the_conversation_to_the_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(COLUMNS, "weights", Column(FLOAT32, 1.0, "token_weights"))
    context = worked_example(weights=[[0.5, 0.25], [2.0, 3.0], [4.0]])
    document = row_of(context.tree()).to_mongo()
    assert np.frombuffer(document["token_weights"], FLOAT32).tolist() == [
        1.0, 1.0, 1.0, 0.5, 0.25, 1.0, 1.0, 2.0, 3.0, 1.0, 4.0,
    ]  # fmt: skip
    row = DBRecordData.from_mongo(document)
    sequences = row_sequences(row, Lineage({4: 0, 5: 1}), 1)
    assert [sequence.tokens["weights"].tolist() for sequence in sequences] == [
        [1.0, 1.0, 1.0, 0.5, 0.25, 1.0, 1.0, 2.0, 3.0], [1.0, 1.0, 1.0, 1.0, 4.0],
    ]  # fmt: skip
    for collate in (collate_forest, collate_padded):
        batch = collate(sequences, [0, 0])
        assert batch.columns["weights"].tolist() == [0.5, 0.25, 2.0, 3.0, 4.0]
        assert batch.columns["staleness"].tolist() == [1, 1, 1, 0, 0]
        assert batch.columns["versions"].tolist() == [4, 4, 4, 5, 5]
        inputs = batch.loss_inputs(batch.columns["logprobs"], None)
        assert inputs.behaviour_logprobs.tolist() == [-0.5, -0.25, -1.0, -0.125, -2.0]


@pytest.mark.parametrize("sign", [1, -1])
def test_the_trainer_knows_which_turns_of_a_right_record_failed(sign: int) -> None:
    of_turns = turn_advantages(
        sign * 0.5, [TurnStatus.COMPLETED, TurnStatus.FORMAT_ERROR, TurnStatus.COMPLETED]
    )
    tree = worked_example(advantages=[[a] * n for a, n in zip(of_turns, (2, 2, 1), strict=True)])
    sequences = row_sequences(row_of(tree.tree()), Lineage({4: 0, 5: 1}), 1)
    for collate in (collate_forest, collate_padded):
        batch = collate(sequences, [0, 0])
        inputs = batch.loss_inputs(batch.columns["logprobs"], None)
        assert inputs.capped is not None
        assert inputs.capped.tolist() == [False, False, sign > 0, sign > 0, False]


def test_a_row_says_which_turns_a_positive_advantage_was_taken_from() -> None:
    # As of turns of several agents: the zeros are of a completed and of two failed turns.
    advantages = [[0.5, 0.5], [0.0, 0.0], [0.0]]
    for said in ([0, 0, 0, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1]):
        capped = [said[:2], said[2:4], said[4:]]
        row = row_of(worked_example(advantages=advantages, capped=capped).tree())
        stored = DBRecordData.from_mongo(row.to_mongo())
        sequences = row_sequences(stored, Lineage({4: 0, 5: 1}), 1)
        batch = collate_forest(sequences, [0, 0])
        inputs = batch.loss_inputs(batch.columns["logprobs"], None)
        assert inputs.capped is not None
        assert inputs.capped.tolist() == [value == 1 for value in said]


def test_a_row_that_was_stored_before_it_said_so_is_capped_where_a_zero_follows() -> None:
    document = row_of(worked_example(advantages=[[0.5, 0.5], [0.0, 0.0], [0.5]]).tree()).to_mongo()
    del document["capped"]
    sequences = row_sequences(DBRecordData.from_mongo(document), Lineage({4: 0, 5: 1}), 1)
    assert [line.tokens["capped"].tolist() for line in sequences] == [
        [0, 0, 0, 0, 0, 0, 0, 1, 1], [0] * 5,
    ]  # fmt: skip


def test_a_long_conversation_costs_by_its_tokens_not_by_their_square() -> None:
    def seconds(turns: int) -> float:
        context = TokenContext()
        context.begin_segment(range(100))
        began = time.process_time()  # the processors belong to other tests too
        for turn in range(turns):
            if turn:
                context.observe([1] * 20)
            context.add_turn([2] * 20, [-1.0] * 20, [VersionSpan(version=0, start=0, end=20)])
        assert context.n_tokens == 100 + 40 * turns - 20
        return time.process_time() - began

    short, long = (min(seconds(turns) for _ in range(5)) for turns in (250, 2500))
    assert long < 40 * short, "ten times the turns: a quadratic cost is a hundred times"
