"""From a finished Record and its turns to the row that the trainer reads: pure functions.

The turns are put into a `TokenContext` again, so a row contains exactly the stored deltas and
outputs. The context's token tree, which contains a shared prefix once, becomes the row's tree. Each
turn then has further columns, such as its advantage. Turns that end beyond the longest sequence of
the run are not trained, and no tokens beyond it are in the row.
"""

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from agentrl.databases.arrays import unpack_floats, unpack_ints
from agentrl.databases.documents import (
    DBRecordData,
    DispatchedSamplingTask,
    Record,
    TurnStatus,
)
from agentrl.databases.records import record_of_turn
from agentrl.rollout.chat.tokens import TokenContext, TurnTokens
from agentrl.rollout.groups.fork_values import of_turns
from agentrl.rollout.groups.group_rules import ZERO, ZERO_ADVANTAGE, turn_advantage

# Why no turn of a Record is trained.
NOT_CHOSEN = "not_trained"  # all its turns are marked so: of other agents, or sampled otherwise
TOO_LONG = "too_long"  # they end beyond --max_tokens
# and ZERO_ADVANTAGE: those that are trained have none


class NothingToTrain(ValueError):
    """No turn of a Record is trained. `reason`: for `left_out`."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


def build_row(
    record: Record,
    turns: Sequence[DispatchedSamplingTask],
    advantage: float,
    temperature: float,
    group_order: int,
    longest: int | None = None,
    drops_zero: bool = False,
) -> DBRecordData:
    """The training row of a scored Record.

    `turns`: all turns, in any order. `advantage`: the Record's, see `advantages_of`.
    `temperature`: of sampling, above 0. `group_order`: the Task's. `longest`: most tokens of a
    sequence (`--max_tokens`); None: any number. `drops_zero`: whether a row needs a turn whose
    advantage is not 0 (`--drop_zero_advantage`).

    Generated tokens are trained, stop tokens included; prompts, tool results and headers are not,
    nor turns that are marked as not trained. Of a fork, its own turns are trained. Raises
    ValueError, naming the record, if the turns do not fit together or it has no score, and
    `NothingToTrain` if no turn is trained, none ends within `longest`, or all have the advantage 0.
    """
    if record.score is None:
        raise ValueError(f"record {record.id} has no score, so no row can be made of it")
    if temperature <= 0:
        raise ValueError(
            f"record {record.id} was sampled at temperature {temperature}, not above 0"
        )
    ordered = sorted(turns, key=lambda turn: turn.turn)
    given = given_advantages(record, ordered, advantage)
    # Shared turns are trained in the row of the Record that made them.
    chosen = [turn.trained and not is_shared(record, turn) for turn in ordered]
    within = [longest is None or _end(turn) <= longest for turn in ordered]
    if ordered and not any(chosen):
        raise NothingToTrain(f"no turn of record {record.id} is to be trained", NOT_CHOSEN)
    trained = [wanted and fits for wanted, fits in zip(chosen, within, strict=True)]
    if ordered and not any(trained):
        fault = f"no turn of record {record.id} ends within {longest} tokens"
        raise NothingToTrain(fault, TOO_LONG)
    columns: list[dict[str, ArrayLike]] = [
        _of_turn(TurnStatus(turn.status), value) if is_trained else {"mask": 0}
        for turn, value, is_trained in zip(ordered, given, trained, strict=True)
    ]
    if drops_zero and ordered and not any(map(_has_gradient, columns)):
        fault = f"the advantage of all trained turns of record {record.id} is 0"
        raise NothingToTrain(fault, ZERO_ADVANTAGE)
    try:
        context = replay(ordered, columns)
    except ValueError as error:
        raise ValueError(f"the turns of record {record.id} do not fit together: {error}") from None
    tree = context.tree()
    if longest is not None and not all(within):
        tree = tree.up_to(longest)
    made = tree["versions"][tree["mask"] == 1]
    first = next(turn for turn in ordered if turn.output_ids)
    return DBRecordData(
        id=record.id,
        task=record.task,
        group_order=group_order,
        reward=record.score,
        n_train_tokens=len(made),
        cost=float(tree.pairs),
        policy_versions=np.unique(made).tolist(),
        temperature=temperature,
        tree=tree,
        n_segments=record.n_segments,
        n_continuations=record.n_continuations,
        n_drifts=record.n_drifts,
        # Siblings begin with the same prompt. Not the first node, which may contain more.
        prompt_len=first.prompt_len,
        prefix_hash=hashlib.blake2b(first.prompt_delta_ids, digest_size=16).hexdigest(),
    )


def given_advantages(
    record: Record, turns: Sequence[DispatchedSamplingTask], advantage: float
) -> list[float]:
    """What each turn [n] of a Record is given, before its status counts.

    `advantage`: the Record's. Stretches of a group with forks come before it, and so do agents with
    rewards of their own. A fork has one stretch, of its own turns.
    """
    if record.fork is not None:
        return [0.0 if is_shared(record, turn) else advantage for turn in turns]
    if record.stretches:
        return of_turns(record.stretches, len(turns))
    own = record.agent_advantages
    return [advantage if turn.agent is None else own.get(turn.agent, advantage) for turn in turns]


def is_shared(record: Record, turn: DispatchedSamplingTask) -> bool:
    """Whether a turn of a fork is one of the rollout that it forks.

    Not by its number: of several conversations at once, one may come to the fork first.
    """
    if record.fork is None or turn.replayed is None:
        return False
    return record_of_turn(turn.replayed) == record.fork.record


def advantages_of(
    record: Record, turns: Sequence[DispatchedSamplingTask], advantage: float
) -> list[float]:
    """The advantage of each turn [n] of a Record, whose own is `advantage`."""
    given = given_advantages(record, turns, advantage)
    return [
        turn_advantage(value, TurnStatus(turn.status))
        for turn, value in zip(turns, given, strict=True)
    ]


def _of_turn(status: TurnStatus, given: float) -> dict[str, ArrayLike]:
    """The columns of a trained turn."""
    return {
        "advantages": turn_advantage(given, status),
        "capped": int(status != TurnStatus.COMPLETED),
    }


def _has_gradient(columns: Mapping[str, ArrayLike]) -> bool:
    return bool(np.abs(columns.get("advantages", 0.0)) >= ZERO)


def _end(turn: DispatchedSamplingTask) -> int:
    """Tokens of the sequence up to the end of a turn."""
    return turn.prompt_len + len(unpack_ints(turn.output_ids))


def replay(
    turns: Sequence[DispatchedSamplingTask], columns: Sequence[Mapping[str, ArrayLike]] = ()
) -> TokenContext:
    """Rebuild the token context of a record from its turns, in order.

    `columns`: further columns of each turn's output (`TokenContext.add_turn`), or empty. Raises
    ValueError if a turn is missing or does not continue the tokens before it. Turns of other models
    have no tokens and are passed over.
    """
    return replay_turns(turns, columns)[0]


def replay_turns(
    turns: Sequence[DispatchedSamplingTask], columns: Sequence[Mapping[str, ArrayLike]] = ()
) -> tuple[TokenContext, list[TurnTokens]]:
    """As `replay`; also returns the tokens of each turn."""
    if not turns:
        raise ValueError("there are no turns")
    context, made = TokenContext(), []
    numbers = {turn.id: turn.turn for turn in turns}
    for index, turn in enumerate(turns):
        if turn.turn != index:
            raise ValueError(f"turn {index} is missing")
        if not turn.output_ids:
            context.pass_turn()
            continue
        delta = unpack_ints(turn.prompt_delta_ids)
        if turn.segment == len(context.segments):
            parent = None if turn.parent is None else numbers.get(turn.parent, -1)
            context.begin_branch(parent, turn.shared_len, delta)
        elif context.segments and turn.segment == len(context.segments) - 1:
            context.observe(delta)
        else:
            raise ValueError(f"turn {index} is of segment {turn.segment}, which is not the current")
        tokens = context.add_turn(
            unpack_ints(turn.output_ids),
            unpack_floats(turn.output_logprobs),
            turn.versions,
            columns[index] if columns else None,
        )
        shared_len = tokens.branch.shared_len if tokens.branch else 0
        if (tokens.prompt_len, shared_len) != (turn.prompt_len, turn.shared_len):
            raise ValueError(
                f"turn {index} has a prompt of {turn.prompt_len} tokens with {turn.shared_len} "
                f"shared, but its deltas make {tokens.prompt_len} with {shared_len} shared"
            )
        made.append(tokens)
    return context, made
