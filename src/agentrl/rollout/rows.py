"""From a finished Record and its turns to the row that the trainer reads: pure functions.

The turns are replayed into a `TokenContext`, so that a row holds the prompts' deltas and the
outputs as they are stored and nothing else. Its segments are then laid out as a token tree, in
which a prefix that segments share stands once.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from agentrl.databases.arrays import pack_floats, pack_ints, pack_mask, unpack_floats, unpack_ints
from agentrl.databases.documents import (
    DBRecordData,
    DispatchedSamplingTask,
    Node,
    Record,
    TurnStatus,
)
from agentrl.rollout.context import Segment, TokenContext
from agentrl.rollout.group_rules import turn_advantages


def build_row(
    record: Record,
    turns: Sequence[DispatchedSamplingTask],
    advantage: float,
    temperature: float,
    seq: int,
) -> DBRecordData:
    """The training row of a scored Record.

    `turns`: all of its turns, in any order. `advantage`: of the Record; each turn's follows from it
    and the turn's status (`group_rules.turn_advantages`). `temperature`: of the sampling. `seq`:
    the row's place in the order of leasing.

    Every generated token is trained, the stop token that ended a turn included; prompts, tool
    results and headers are not. Raises ValueError, naming the record, if the turns do not fit
    together.
    """
    if record.score is None:
        raise ValueError(f"record {record.id} has no score, so no row can be made of it")
    if temperature <= 0:
        raise ValueError(
            f"record {record.id} was sampled at temperature {temperature}, not above 0"
        )
    ordered = sorted(turns, key=lambda turn: turn.turn)
    try:
        context = replay(ordered)
    except ValueError as error:
        raise ValueError(f"the turns of record {record.id} do not fit together: {error}") from None
    nodes = _lay_out(context.segments)
    ends = np.cumsum([node.end - node.start for node in nodes]).tolist()
    place = {id(node): index for index, node in enumerate(nodes)}
    tree = _concatenate(nodes, context.segments, _token_advantages(ordered, context, advantage))
    made = tree.versions[tree.mask == 1]
    return DBRecordData(
        id=record.id,
        task=record.task,
        seq=seq,
        reward=record.score,
        n_tokens=len(tree.ids),
        n_train_tokens=len(made),
        cost=float(_pairs(nodes)),
        policy_versions=np.unique(made).tolist(),
        temperature=temperature,
        nodes=[
            Node(start=start, end=end, parent=-1 if node.parent is None else place[id(node.parent)])
            for node, start, end in zip(nodes, [0, *ends], ends, strict=False)
        ],
        input_ids=pack_ints(tree.ids),
        loss_mask=pack_mask(tree.mask),
        advantages=pack_floats(tree.advantages),
        logprobs=pack_floats(tree.logprobs),
        versions=pack_ints(tree.versions),
        n_segments=record.n_segments,
        n_continuations=record.n_continuations,
        n_drifts=record.n_drifts,
        # Of the first prompt, not of the first node: a linear record is one node, and siblings
        # are those that begin with the same prompt.
        prompt_len=ordered[0].prompt_len,
        prefix_hash=hashlib.blake2b(ordered[0].prompt_delta_ids, digest_size=16).hexdigest(),
    )


def replay(turns: Sequence[DispatchedSamplingTask]) -> TokenContext:
    """The token context that a record's turns, in order, were made from.

    Raises ValueError where a turn is missing or does not continue what stands before it.
    """
    if not turns:
        raise ValueError("there are no turns")
    context = TokenContext()
    for index, turn in enumerate(turns):
        if turn.turn != index:
            raise ValueError(f"turn {index} is missing")
        delta = unpack_ints(turn.prompt_delta_ids).tolist()
        if turn.segment == len(context.segments):
            context.begin_segment(delta)
        elif context.segments and turn.segment == len(context.segments) - 1:
            context.observe(delta)
        else:
            raise ValueError(f"turn {index} is of segment {turn.segment}, which is not the current")
        tokens = context.add_turn(
            unpack_ints(turn.output_ids).tolist(),
            unpack_floats(turn.output_logprobs).tolist(),
            turn.versions,
        )
        shared_len = tokens.branch.shared_len if tokens.branch else 0
        if (tokens.prompt_len, shared_len) != (turn.prompt_len, turn.shared_len):
            raise ValueError(
                f"turn {index} has a prompt of {turn.prompt_len} tokens with {turn.shared_len} "
                f"shared, but its deltas make {tokens.prompt_len} with {shared_len} shared"
            )
    return context


FloatArray = np.ndarray[tuple[int], np.dtype[np.float32]]


def _token_advantages(
    turns: Sequence[DispatchedSamplingTask], context: TokenContext, advantage: float
) -> list[FloatArray]:
    """For each segment, the advantage of each token: that of its turn, or 0 where there is none."""
    advantages = [np.zeros(len(segment.ids), dtype=np.float32) for segment in context.segments]
    statuses = [TurnStatus(turn.status) for turn in turns]
    for turn, of_turn in zip(turns, turn_advantages(advantage, statuses), strict=True):
        end = turn.prompt_len + len(unpack_ints(turn.output_ids))
        advantages[turn.segment][turn.prompt_len : end] = of_turn
    return advantages


@dataclass(slots=True, eq=False)
class _TreeNode:
    """Tokens `start` to `end` of a segment, which stand at these depths of the tree."""

    segment: int
    start: int
    end: int
    parent: "_TreeNode | None"
    children: list["_TreeNode"] = field(default_factory=list)


def _lay_out(segments: Sequence[Segment]) -> list[_TreeNode]:
    """The segments as one forest of nodes, in depth-first order."""
    roots: list[_TreeNode] = []
    leaves: list[_TreeNode] = []  # of each segment
    for index, segment in enumerate(segments):
        parent, shared = None, 0
        if segment.branch is not None:
            shared = segment.branch.shared_len
            parent = _node_ending_at(shared, leaves, segment.branch.segment)
        node = _TreeNode(index, shared, len(segment.ids), parent)
        (roots if parent is None else parent.children).append(node)
        leaves.append(node)
    ordered: list[_TreeNode] = []
    stack = roots[::-1]
    while stack:
        node = stack.pop()
        ordered.append(node)
        stack.extend(reversed(node.children))
    return ordered


def _pairs(nodes: Sequence[_TreeNode]) -> int:
    """Pairs of a token and one that it sees; `start` is what stands before a node on its way."""
    lengths = [(node.start, node.end - node.start) for node in nodes]
    return sum(length * before + length * (length + 1) // 2 for before, length in lengths)


def _node_ending_at(depth: int, leaves: list[_TreeNode], segment: int) -> _TreeNode:
    """The node on a segment's path that ends at `depth`, cut there if it went further."""
    node = leaves[segment]
    while node.start >= depth:
        assert node.parent is not None, "a branch shares tokens that its segment does not have"
        node = node.parent
    if node.end > depth:
        rest = _TreeNode(node.segment, depth, node.end, node, node.children)
        for child in rest.children:
            child.parent = rest
        node.end, node.children = depth, [rest]
        leaves[:] = [rest if leaf is node else leaf for leaf in leaves]
    return node


@dataclass(frozen=True, slots=True)
class _Arrays:
    """One entry per token of the tree."""

    ids: np.ndarray[tuple[int], np.dtype[np.int32]]
    mask: np.ndarray[tuple[int], np.dtype[np.uint8]]
    logprobs: FloatArray
    advantages: FloatArray
    versions: np.ndarray[tuple[int], np.dtype[np.int32]]


def _concatenate(
    nodes: Sequence[_TreeNode], segments: Sequence[Segment], advantages: Sequence[FloatArray]
) -> _Arrays:
    ids: list[int] = []
    mask = bytearray()
    logprobs: list[float] = []
    versions: list[int] = []
    for node in nodes:
        segment, part = segments[node.segment], slice(node.start, node.end)
        ids += segment.ids[part]
        mask += segment.generated[part]
        logprobs += segment.logprobs[part]
        versions += segment.versions[part]
    return _Arrays(
        np.asarray(ids, dtype=np.int32),
        np.frombuffer(mask, dtype=np.uint8),
        np.asarray(logprobs, dtype=np.float32),
        np.concatenate([advantages[node.segment][node.start : node.end] for node in nodes]),
        np.asarray(versions, dtype=np.int32),
    )
