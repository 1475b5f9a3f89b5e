"""From the scores of a group to what is trained of it: pure functions, in one visible order.

    scores -> estimator (`advantages.py`) -> efficiency -> scaling    an advantage for each Record
           -> rules that leave Records out, one after the other       which Records become rows
           -> statuses of turns                                       an advantage for each turn

A group consists of all scored Records of a Task. Random draws depend only on the ids of Task and
Record, so the same group always gives the same result, in any order of its Records.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from agentrl.configs import RewardConfig
from agentrl.databases.documents import Record, StopReason, TurnStatus
from agentrl.rollout.groups.advantages import GREEDY_ROLLOUT, find_estimator, score_of

ZERO = 1e-6  # an advantage below this carries no gradient
SUCCESS_SCORE = 0.5  # a Record with at least this score counts as right
EFFICIENCY_SPREAD = 0.2  # advantage between the right Records with the fewest and most turns
LIMITS = frozenset(
    {
        StopReason.MAX_TURNS,
        StopReason.MAX_TOKENS,
        StopReason.MAX_PROMPT_TOKENS,
        StopReason.MAX_NEW_TOKENS,
    }
)


def efficiency(scores: Sequence[float], turns: Sequence[int]) -> list[float]:
    """`--efficient_rewarding`: bonuses [n] to the advantages for fewer turns.

    The m right Records are ranked from 0 by their turns; ties get the mean of their ranks.
    B_i = s * ((m - 1) / 2 - rank_i) / (m - 1), with s = `EFFICIENCY_SPREAD`. B is 0 for wrong
    Records and for a single right one, and sums to 0. It is added after the estimator, so it
    changes an advantage by at most s / 2, not by a whole standard deviation.
    """
    right = [index for index, score in enumerate(scores) if score >= SUCCESS_SCORE]
    added = [0.0 for _ in scores]
    for index in right if len(right) > 1 else []:
        fewer = sum(turns[other] < turns[index] for other in right)
        tied = sum(turns[other] == turns[index] for other in right)
        rank = fewer + (tied - 1) / 2
        added[index] = EFFICIENCY_SPREAD * (0.5 - rank / (len(right) - 1))
    return added


# Rules that leave out Records. Each takes the indices of the kept Records and returns those that
# stay.

Kept = Sequence[int]


def sampled(records: Sequence[Record], kept: Kept) -> list[int]:
    """`--advantage remax`: the greedy rollout is the baseline and is not trained."""
    return [i for i in kept if records[i].rollout != GREEDY_ROLLOUT]


def more_turns_than(min_turns: int, records: Sequence[Record], kept: Kept) -> list[int]:
    """`--min_turns`: leave out right Records with at most `min_turns` turns."""
    return [i for i in kept if not (_is_right(records[i]) and records[i].n_turns <= min_turns)]


def few_at_limits(count: int, task: str, records: Sequence[Record], kept: Kept) -> list[int]:
    """`--reserve_context_error_count`: of the Records that ended at a limit of turns or tokens,
    keep `count`, drawn at random."""
    limited = [i for i in kept if records[i].stop_reason in LIMITS]
    reserved = _draw(count, task, records, limited)
    return [i for i in kept if i not in limited or i in reserved]


def balanced(task: str, records: Sequence[Record], kept: Kept) -> list[int]:
    """`--balance_sample`: keep min(right, wrong) right and as many wrong Records, drawn at random.

    All stay if there are no right or no wrong ones.
    """
    right = [i for i in kept if _is_right(records[i])]
    wrong = [i for i in kept if not _is_right(records[i])]
    if not right or not wrong:
        return list(kept)
    count = min(len(right), len(wrong))
    drawn = _draw(count, task, records, right) | _draw(count, task, records, wrong)
    return [i for i in kept if i in drawn]


def with_gradient(records: Sequence[Record], advantages: Sequence[float], kept: Kept) -> list[int]:
    """`--drop_zero_advantage`: leave out Records without a turn of nonzero advantage."""
    return [i for i in kept if _has_gradient(records[i], advantages[i])]


def above(least: float, advantages: Sequence[float], kept: Kept) -> list[int]:
    """`--minimal_advantage`: leave out Records with an advantage of at most `least`."""
    return [i for i in kept if advantages[i] > least]


@dataclass(frozen=True, slots=True)
class RecordOutcome:
    """The advantage of a Record. `left_out`: the rule that leaves it out; None if trained."""

    advantage: float
    left_out: str | None


def apply_group_rules(
    task: str, records: Sequence[Record], config: RewardConfig
) -> list[RecordOutcome]:
    """The advantage of each Record of a group, and whether it is trained; in the given order.

    `task`: the Task's id. `records`: its scored Records. Raises `ConfigError` for a user's
    estimator that fails.
    """
    if not records:
        return []
    scores = [score_of(record) for record in records]
    advantages = find_estimator(config.estimator)(records)
    if config.efficient_rewarding:
        added = efficiency(scores, [record.n_turns for record in records])
        advantages = [a + b for a, b in zip(advantages, added, strict=True)]
    advantages = [advantage * config.adv_scaling for advantage in advantages]
    left_out: dict[int, str] = {}
    kept = list(range(len(records)))
    for name, rule in _rules(task, records, advantages, config).items():
        stay = rule(kept)
        left_out.update({i: name for i in kept if i not in stay})
        kept = stay
    return [RecordOutcome(advantage, left_out.get(i)) for i, advantage in enumerate(advantages)]


def _rules(
    task: str, records: Sequence[Record], advantages: Sequence[float], config: RewardConfig
) -> Mapping[str, Callable[[Kept], list[int]]]:
    """The rules that the flags enable, in the order of application."""
    rules: dict[str, Callable[[Kept], list[int]]] = {}
    if config.estimator == "remax":
        rules["greedy_baseline"] = partial(sampled, records)
    if config.min_turns > 0:
        rules["min_turns"] = partial(more_turns_than, config.min_turns, records)
    if config.reserve_context_error_count is not None:
        count = config.reserve_context_error_count
        rules["reserve_context_error_count"] = partial(few_at_limits, count, task, records)
    if config.balance_sample:
        rules["balance_sample"] = partial(balanced, task, records)
    # With `score` the trainer computes the advantage later, so 0 does not mean zero gradient.
    if config.drop_zero_advantage and config.estimator != "score":
        rules["drop_zero_advantage"] = partial(with_gradient, records, advantages)
    if config.minimal_advantage is not None:
        rules["minimal_advantage"] = partial(above, config.minimal_advantage, advantages)
    return rules


def turn_advantages(advantage: float, statuses: Sequence[TurnStatus]) -> list[float]:
    """The advantage of each turn of a Record: A_t = A if turn t is completed, else min(A, 0).

    A failed turn (malformed call, failed tool, repetition, truncation) is never reinforced. With a
    negative advantage it is discouraged like the other turns.
    """
    return [
        advantage if status == TurnStatus.COMPLETED else min(advantage, 0.0) for status in statuses
    ]


def _is_right(record: Record) -> bool:
    return score_of(record) >= SUCCESS_SCORE


def _has_gradient(record: Record, advantage: float) -> bool:
    if abs(advantage) < ZERO:
        return False
    failed_turns_only = bool(record.turn_statuses) and not record.turn_statuses.get(
        TurnStatus.COMPLETED
    )
    return advantage < 0 or not failed_turns_only


def _draw(count: int, task: str, records: Sequence[Record], places: Kept) -> set[int]:
    """Draw `count` indices: those whose Records have the smallest hashes."""

    def ticket(place: int) -> bytes:
        return hashlib.blake2b(f"{task}\n{records[place].id}".encode(), digest_size=16).digest()

    return set(sorted(places, key=ticket)[:count])
