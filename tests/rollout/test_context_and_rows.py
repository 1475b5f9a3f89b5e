"""The token context of a record, and the row that is made of its turns."""

from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.databases.arrays import (
    pack_floats,
    pack_ints,
    unpack_ints,
)
from agentrl.databases.documents import (
    DBRecordData,
    DispatchedSamplingTask,
    Record,
    Split,
    TurnStatus,
)
from agentrl.policy_version import VersionSpan
from agentrl.rollout.chat.tokens import PromptChange, TokenContext, TurnTokens
from agentrl.rollout.groups.row_building import NothingToTrain, build_row, replay


def make_record(score: float | None = 1.0) -> Record:
    return Record(
        _id="r", task="t", task_id="line", rollout=0, attempt=0, split=Split.TRAIN, epoch=0,
        owner="me", query="?", score=score,
    )  # fmt: skip


@dataclass(frozen=True)
class Output:
    ids: list[int]
    logprobs: list[float]
    spans: list[VersionSpan]


def make_turn(tokens: TurnTokens, output: Output) -> DispatchedSamplingTask:
    return DispatchedSamplingTask(
        _id=f"r-{tokens.turn}",
        record_id="r",
        turn=tokens.turn,
        segment=tokens.segment,
        parent=f"r-{tokens.branch.turn}" if tokens.branch else None,
        shared_len=tokens.branch.shared_len if tokens.branch else 0,
        service="http://s",
        messages=[],
        prompt_delta_ids=pack_ints(tokens.prompt_delta),
        prompt_len=tokens.prompt_len,
        output_ids=pack_ints(output.ids),
        output_logprobs=pack_floats(output.logprobs),
        output_text="",
        finish_reason="stop",
        versions=output.spans,
        generate_latency_s=0.0,
        created_at=datetime.now(UTC),
    )


def output_of(*ids: int, version: int = 3) -> Output:
    spans = [VersionSpan(version=version, start=0, end=len(ids))]
    return Output(list(ids), [-float(token) for token in ids], spans)


def generate(context: TokenContext, output: Output) -> DispatchedSamplingTask:
    return make_turn(context.add_turn(output.ids, output.logprobs, output.spans), output)


def row_of(turns: list[DispatchedSamplingTask]) -> DBRecordData:
    return build_row(make_record(), turns, 0.5, 1.0, 7)


def test_a_turn_that_failed_is_not_reinforced_wherever_its_tokens_stand_in_the_tree() -> None:
    context = TokenContext()
    context.begin_segment([1, 2])
    first = generate(context, output_of(10, 11))
    context.observe([3])
    failed = generate(context, output_of(20, 21, 22)).model_copy(
        update={"status": TurnStatus.FORMAT_ERROR}
    )
    # A segment that shares the first turn and a part of the failed one.
    context.begin_segment([1, 2, 10, 11, 3, 20, 21, 9])
    last = generate(context, output_of(30))
    row = row_of([first, failed, last])
    ids = row.tree["ids"].tolist()
    of_token = dict(zip(ids, row.tree["advantages"].tolist(), strict=True))
    assert [of_token[token] for token in (10, 11, 30)] == [0.5] * 3
    assert [of_token[token] for token in (1, 2, 3, 9, 20, 21, 22)] == [0.0] * 7
    worse = build_row(make_record(), [first, failed, last], -0.5, 1.0, 7)
    generated = worse.tree["mask"] == 1
    assert set(worse.tree["advantages"][generated].tolist()) == {-0.5}


def test_a_linear_record_is_one_node_whose_generated_tokens_alone_are_trained() -> None:
    context = TokenContext()
    context.begin_segment([1, 2, 3])
    first = generate(context, output_of(10, 11, 99, version=3))
    context.observe([4, 5])
    second = generate(context, output_of(12, 99, version=4))
    row = row_of([second, first])  # in any order
    assert row.tree["ids"].tolist() == [1, 2, 3, 10, 11, 99, 4, 5, 12, 99]
    assert row.tree["mask"].tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 1, 1]
    assert row.tree["logprobs"].tolist() == [0, 0, 0, -10, -11, -99, 0, 0, -12, -99]
    assert row.tree["versions"].tolist() == [-1, -1, -1, 3, 3, 3, -1, -1, 4, 4]
    assert row.tree["advantages"].tolist() == [0, 0, 0, 0.5, 0.5, 0.5, 0, 0, 0.5, 0.5]
    assert [node._asdict() for node in row.tree.nodes] == [{"start": 0, "end": 10, "parent": -1}]
    assert (row.n_tokens, row.n_train_tokens, row.prompt_len) == (10, 5, 3)
    assert row.cost == sum(range(1, 11)), "each token sees itself and all before it"
    assert (row.policy_versions, row.group_order, row.reward) == ([3, 4], 7, 1.0)
    assert context.counts.model_dump() == {"prompt": 3, "generated": 5, "observed": 2}
    assert context.versions is not None
    assert (context.versions.min, context.versions.max) == (3, 4)


def test_a_prompt_change_says_what_was_kept_inserted_appended_and_dropped() -> None:
    context = TokenContext()
    assert context.begin_segment([1, 2, 3]) is None
    generate(context, output_of(10, 99))
    extended = context.observe([7, 4, 5], n_separator=1)
    assert extended == PromptChange(
        turn=0, kept=5, dropped=0, appended=3, n_separator=1, extends=True
    )
    generate(context, output_of(11, 99))
    drifted = context.begin_segment([1, 2, 3, 8], drift="why", n_rewritten=2)
    assert drifted == PromptChange(
        turn=1, kept=3, dropped=7, appended=1, n_separator=0, extends=False, drift="why",
        n_rewritten=2,
    )  # fmt: skip
    assert (context.n_continuations, context.n_drifts) == (2, 1)
    assert generate(context, output_of(12, 99)).parent == "r-0"


def test_what_was_appended_and_not_generated_from_is_taken_back_by_another_prompt() -> None:
    context = TokenContext()
    context.begin_segment([1, 2])
    generate(context, output_of(10, 99))
    context.begin_segment([3], drift="why")
    context.begin_segment([1, 2, 10, 99, 6])
    assert (context.n_continuations, context.n_drifts, len(context.segments)) == (1, 0, 2)
    assert context.n_tokens == 5
    turn = generate(context, output_of(11, 99))
    assert (turn.segment, turn.shared_len, turn.prompt_len) == (1, 4, 5)


def test_segments_that_share_a_prefix_share_its_node_and_its_generated_tokens_train_once() -> None:
    context = TokenContext()
    context.begin_segment([1, 2, 3])
    turns = [generate(context, output_of(10, 99))]
    context.observe([4])
    turns.append(generate(context, output_of(20, 99)))
    context.begin_segment([1, 2, 3, 10, 7])  # leaves turn 0 in the middle of its output
    turns.append(generate(context, output_of(30, 99)))
    row = row_of(turns)
    assert (turns[2].parent, turns[2].shared_len) == ("r-0", 4)
    assert [(node.start, node.end, node.parent) for node in row.tree.nodes] == [
        (0, 4, -1), (4, 8, 0), (8, 11, 0),
    ]  # fmt: skip
    assert row.tree["ids"].tolist() == [1, 2, 3, 10, 99, 4, 20, 99, 7, 30, 99]
    assert row.tree["mask"].tolist() == [0, 0, 0, 1, 1, 0, 1, 1, 0, 1, 1]


def test_a_turn_that_begins_a_segment_stores_what_no_turn_before_it_has() -> None:
    context = TokenContext()
    context.begin_segment([1, 2, 3])
    turns = [generate(context, output_of(10, 99))]
    for thought in (20, 21, 22):  # a template that drops the last thought at every turn
        context.begin_segment([*range(1, 4), *range(50, 30 + thought), thought])
        turns.append(generate(context, output_of(10, thought, 99)))
    deltas = [unpack_ints(turn.prompt_delta_ids).tolist() for turn in turns]
    assert deltas == [[1, 2, 3], [20], [50, 21], [51, 22]]
    tree = row_of(turns).tree
    assert [tree.take(tree.places(path))["ids"].tolist() for path in tree.paths()] == [
        [1, 2, 3, 10, 99],
        [1, 2, 3, 20, 10, 20, 99],
        [1, 2, 3, 50, 21, 10, 21, 99],
        [1, 2, 3, 50, 51, 22, 10, 22, 99],
    ]


def test_a_branch_that_no_turn_has_is_refused() -> None:
    context = TokenContext()
    context.begin_segment([1, 2, 3])
    first = generate(context, output_of(10, 99))
    context.begin_segment([1, 2, 7])
    second = generate(context, output_of(20, 99))
    for update in ({"parent": "r-7"}, {"parent": None}, {"shared_len": 6}):
        with pytest.raises(ValueError, match="record r do not fit together: turn"):
            row_of([first, second.model_copy(update=update)])


def test_two_samples_of_the_same_prompt_are_never_merged_where_both_were_generated() -> None:
    context = TokenContext()
    context.begin_segment([1, 2])
    turns = [generate(context, output_of(10, 99))]
    context.begin_segment([1, 2])
    turns.append(generate(context, output_of(10, 98)))
    row = row_of(turns)
    assert [(node.start, node.end, node.parent) for node in row.tree.nodes] == [
        (0, 2, -1), (2, 4, 0), (4, 6, 0),
    ]  # fmt: skip
    assert row.n_train_tokens == 4


def test_siblings_with_the_same_prompt_have_the_same_prefix_hash() -> None:
    def row(prompt: list[int], answer: int) -> DBRecordData:
        context = TokenContext()
        context.begin_segment(prompt)
        return row_of([generate(context, output_of(answer))])

    assert row([1, 2], 10).prefix_hash == row([1, 2], 11).prefix_hash
    assert row([1, 2], 10).prefix_hash != row([1, 3], 10).prefix_hash


@pytest.mark.parametrize(
    "spans",
    [[(1, 0, 1)], [(1, 0, 3)], [(1, 1, 2)], [(1, 0, 1), (2, 0, 1)], [(1, 0, 1), (2, 2, 2)], []],
)
def test_version_spans_that_do_not_cover_the_output_are_refused(
    spans: list[tuple[int, int, int]],
) -> None:
    context = TokenContext()
    context.begin_segment([1])
    with pytest.raises(ValueError, match="do not cover its 2 tokens"):
        context.add_turn(
            [5, 6], [0, 0], [VersionSpan(version=v, start=s, end=e) for v, s, e in spans]
        )


def test_turns_that_do_not_fit_together_are_refused_with_the_record() -> None:
    context = TokenContext()
    context.begin_segment([1, 2, 3])
    first = generate(context, output_of(10, 99))
    context.observe([4])
    second = generate(context, output_of(20, 99))
    with pytest.raises(ValueError, match="record r do not fit together: turn 0 is missing"):
        row_of([second])
    with pytest.raises(ValueError, match=r"record r do not fit together: turn 1 has a prompt"):
        row_of([first, second.model_copy(update={"prompt_len": 5})])
    with pytest.raises(ValueError, match="no turns"):
        row_of([])
    with pytest.raises(ValueError, match="record r has no score"):
        build_row(make_record(score=None), [first], 0.5, 1.0, 0)


TOKENS = st.integers(0, 3)  # few, so that prefixes coincide


@st.composite
def outputs(draw: st.DrawFn) -> Output:
    ids = draw(st.lists(TOKENS, min_size=1, max_size=4))
    cuts = sorted(draw(st.sets(st.integers(1, len(ids)), max_size=2)) | {0, len(ids)})
    versions = draw(st.lists(st.integers(0, 9), min_size=len(cuts), max_size=len(cuts)))
    spans = [
        VersionSpan(version=version, start=start, end=end)
        for version, start, end in zip(versions, cuts, cuts[1:], strict=False)
    ]
    logprobs = draw(st.lists(st.floats(-9, 0, width=32), min_size=len(ids), max_size=len(ids)))
    return Output(ids, logprobs, spans)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[TokenContext, list[DispatchedSamplingTask]]:
    """A context and its turns, with segments that begin with prefixes of earlier ones."""
    context = TokenContext()
    turns: list[DispatchedSamplingTask] = []
    for index in range(draw(st.integers(1, 6))):
        # What was appended may be taken back before a turn is generated, by another prompt.
        for _ in range(draw(st.integers(1, 2))):
            ends = context.segments[-1].turn_ends if context.segments else []
            may_observe = bool(ends) and len(context.ids) == ends[-1][1]
            if may_observe and draw(st.booleans()):
                context.observe(draw(st.lists(TOKENS, min_size=1, max_size=3)))
            else:
                segments = range(len(context.segments))
                earlier = context.line(draw(st.sampled_from(segments)))["ids"] if segments else []
                kept = list(earlier[: draw(st.integers(0, len(earlier)))])
                drift = draw(st.sampled_from([None, "why"])) if index else None
                prompt = kept + draw(st.lists(TOKENS, min_size=1, max_size=3))
                context.begin_segment(prompt, drift)
        turns.append(generate(context, draw(outputs())))
    return context, turns


@settings(max_examples=settings.default.max_examples * 3)
@given(conversations())
def test_a_row_holds_exactly_the_deltas_and_outputs_of_its_turns(
    conversation: tuple[TokenContext, list[DispatchedSamplingTask]],
) -> None:
    context, turns = conversation
    row = row_of(turns)
    ids, mask = row.tree["ids"], row.tree["mask"]
    versions, logprobs = row.tree["versions"], row.tree["logprobs"]

    # The nodes are a tree in depth-first order that covers the arrays.
    nodes = row.tree.nodes
    assert [node.start for node in nodes] == [0, *(node.end for node in nodes)][:-1]
    assert nodes[-1].end == row.n_tokens == len(ids) == context.n_tokens
    open_path: list[int] = []
    for index, node in enumerate(nodes):
        assert node.end > node.start
        while open_path and open_path[-1] != node.parent:
            open_path.pop()
        assert (open_path[-1] if open_path else -1) == node.parent
        open_path.append(index)

    # Following the tree from its roots gives each segment, token by token.
    def places(index: int) -> list[int]:
        node = nodes[index]
        above = [] if node.parent < 0 else places(node.parent)
        return above + list(range(node.start, node.end))

    paths = [places(index) for index in range(len(nodes))]
    trained: set[int] = set()
    for number, segment in enumerate(context.segments):
        shared = segment.branch.shared_len if segment.branch else 0
        line = context.line(number)

        def is_segment(
            path: list[int], line=line, shared=shared, trained=frozenset(trained)
        ) -> bool:
            own = path[shared:]
            return (
                ids[path].tolist() == line["ids"].tolist()
                and mask[own].tolist() == line["mask"][shared:].tolist()
                and versions[own].tolist() == line["versions"][shared:].tolist()
                and np.array_equal(logprobs[own], line["logprobs"][shared:])
                and not trained & {place for place in own if mask[place]}
            )

        path = next((path for path in paths if is_segment(path)), None)
        assert path is not None
        trained |= {place for place in path[shared:] if mask[place]}

    # Every generated token is trained once, nothing else is.
    assert trained == set(np.flatnonzero(mask).tolist())
    assert row.n_train_tokens == sum(len(turn.output_ids) // 4 for turn in turns)
    assert row.tree["advantages"].tolist() == (mask * 0.5).tolist()
    generated = [span.version for turn in turns for span in turn.versions if span.end > span.start]
    assert row.policy_versions == sorted(set(generated))


@given(conversations())
def test_replaying_the_stored_turns_gives_the_context_they_came_from(
    conversation: tuple[TokenContext, list[DispatchedSamplingTask]],
) -> None:
    context, turns = conversation
    again = replay(turns)
    assert again.segments == context.segments
    for number in range(len(context.segments)):
        assert again.line(number)["ids"].tolist() == context.line(number)["ids"].tolist()
    assert again.counts == context.counts
    assert again.versions == context.versions
    assert (again.n_continuations, again.n_tokens) == (context.n_continuations, context.n_tokens)


def test_turns_beyond_the_longest_sequence_are_not_trained_and_not_in_the_row() -> None:
    context = TokenContext()
    context.begin_segment([1, 2, 3])
    turns = [generate(context, output_of(10, 11, 99))]  # ends at 6
    context.observe([4, 5])
    turns.append(generate(context, output_of(20, 21, 99)))  # ends at 11
    context.begin_segment([1, 2, 3, 30])
    turns.append(generate(context, output_of(40, 99)))  # another context, ends at 6
    whole = build_row(make_record(), turns, 0.5, 1.0, 7, 11)
    assert whole == build_row(make_record(), turns, 0.5, 1.0, 7)
    row = build_row(make_record(), turns, 0.5, 1.0, 7, 10)
    ids, mask = row.tree["ids"], row.tree["mask"]
    assert ids[mask == 1].tolist() == [10, 11, 99, 40, 99] and row.n_train_tokens == 5
    paths = [row.tree.take(row.tree.places(path))["ids"].tolist() for path in row.tree.paths()]
    assert paths == [[1, 2, 3, 10, 11, 99, 4, 5, 20, 21], [1, 2, 3, 30, 40, 99]]
    short = build_row(make_record(), turns, 0.5, 1.0, 7, 7)
    assert max(sum(short.tree.lengths[n] for n in path) for path in short.tree.paths()) == 7
    with pytest.raises(NothingToTrain, match="no turn of record r ends within 5 tokens"):
        build_row(make_record(), turns, 0.5, 1.0, 7, 5)


def test_turns_of_agents_have_the_advantages_of_their_agents() -> None:
    context = TokenContext()
    context.begin_segment([1, 2])
    turns = []
    for number, agent in enumerate(("planner", "critic", "scout")):
        turn = generate(context, output_of(10 + number, 20 + number))
        turns.append(turn.model_copy(update={"agent": agent}))
        context.observe([3])
    failed = turns[1].model_copy(update={"status": TurnStatus.FORMAT_ERROR})
    own = {"planner": -0.25, "critic": 2.0}
    record = make_record().model_copy(update={"agent_advantages": own})
    row = build_row(record, turns, 0.5, 1.0, 7)
    trained = row.tree["mask"] == 1
    assert row.tree["advantages"][trained].tolist() == [-0.25] * 2 + [2.0] * 2 + [0.5] * 2
    row = build_row(record, [turns[0], failed, turns[2]], 0.5, 1.0, 7)
    assert row.tree["advantages"][trained].tolist() == [-0.25] * 2 + [0.0] * 2 + [0.5] * 2
    assert row.tree["capped"][trained].tolist() == [0] * 2 + [1] * 2 + [0] * 2
    # Also a negative advantage of a failed turn may not become positive, below a lower mean.
    record = record.model_copy(update={"agent_advantages": {"planner": 0.0, "critic": -1.0}})
    row = build_row(record, [turns[0], failed, turns[2]], 0.5, 1.0, 7)
    assert row.tree["advantages"][trained].tolist() == [0.0] * 2 + [-1.0] * 2 + [0.5] * 2
    assert row.tree["capped"][trained].tolist() == [0] * 2 + [1] * 2 + [0] * 2


def test_a_turn_of_another_model_is_passed_over_wherever_it_stands() -> None:
    context = TokenContext()
    assert context.pass_turn() == 0
    context.begin_segment([1, 2])
    first = generate(context, output_of(10, 11))
    assert context.pass_turn() == 2
    context.observe([3])
    last = generate(context, output_of(12))
    other = first.model_copy(update={
        "id": "r-0", "turn": 0, "segment": -1, "output_ids": b"", "prompt_delta_ids": b"",
        "trained": False,
    })  # fmt: skip
    turns = [other, first, other.model_copy(update={"id": "r-2", "turn": 2}), last]
    row = row_of(turns)
    assert row.tree["ids"].tolist() == [1, 2, 10, 11, 3, 12]
    assert row.tree["mask"].tolist() == [0, 0, 1, 1, 0, 1] and row.prompt_len == 2
    assert np.array_equal(context.tree()["ids"], row.tree["ids"])
    with pytest.raises(ValueError, match="turn 2 is missing"):
        row_of([*turns[:2], last])
