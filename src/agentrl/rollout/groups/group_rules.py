"""From the scores of a group to what is trained of it: pure functions, in one visible order.

    records -> rules that leave Records out, one after the other      which Records may become rows
    scores -> ranks of turns -> estimator (`advantages.py`) -> bonus -> scaling
                                                                      an advantage for each Record
              with forks: values of states (`fork_values.py`) -> scaling
                                                                      advantages for its turns
           -> rules by advantage                                      which Records become rows
           -> statuses of turns                                       an advantage for each turn

A group consists of all scored Records of a Task. Random draws depend only on the ids of Task and
Record, so the same group always gives the same result, in any order of its Records.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from agentrl.configs import RewardConfig
from agentrl.databases.documents import Record, StopReason, Stretch, TurnStatus
from agentrl.databases.success import SUCCESS_SCORE
from agentrl.rollout.groups.advantages import GREEDY_ROLLOUT, find_estimator, score_of
from agentrl.rollout.groups.fork_values import fork_advantages

ZERO = 1e-6  # an advantage below this carries no gradient
ZERO_ADVANTAGE = "drop_zero_advantage"  # why a Record without a gradient is left out
EFFICIENCY_SPREAD = 0.2  # between the right Records with the fewest and the most turns
LIMITS = frozenset(
    {
        StopReason.MAX_TURNS,
        StopReason.MAX_TOKENS,
        StopReason.MAX_PROMPT_TOKENS,
        StopReason.MAX_NEW_TOKENS,
    }
)


def ranked_by_turns(turns: Sequence[int], members: Sequence[int]) -> list[float]:
    """The members of a group [n] ranked by their turns: 0.1 for the fewest, -0.1 for the most.

    The m members are ranked from 0; ties get the mean of their ranks.
    B_i = s * ((m - 1) / 2 - rank_i) / (m - 1), with s = `EFFICIENCY_SPREAD`. B is 0 for others and
    for a single member, and sums to 0.
    """
    ranked = [0.0 for _ in turns]
    for index in members if len(members) > 1 else []:
        fewer = sum(turns[other] < turns[index] for other in members)
        tied = sum(turns[other] == turns[index] for other in members)
        rank = fewer + (tied - 1) / 2
        ranked[index] = EFFICIENCY_SPREAD * (0.5 - rank / (len(members) - 1))
    return ranked


def moved_by_turns(records: Sequence[Record], kept: Sequence[int]) -> list[float]:
    """`--efficient_rewarding`: the scores [n], those of the kept Records moved by their turns.

    Right Records (score >= 0.5) are moved up for few turns, wrong ones for many.
    """
    turns = [record.n_turns for record in records]
    right = [i for i in kept if _is_right(records[i])]
    wrong = [i for i in kept if not _is_right(records[i])]
    up, down = ranked_by_turns(turns, right), ranked_by_turns(turns, wrong)
    return [score_of(record) + up[i] - down[i] for i, record in enumerate(records)]


# Rules that leave out Records. Each takes the indices of the kept Records and returns those that
# stay.

Kept = Sequence[int]


def sampled(records: Sequence[Record], kept: Kept) -> list[int]:
    """`--advantage remax`: the greedy rollout is the baseline and is not trained."""
    return [i for i in kept if records[i].rollout != GREEDY_ROLLOUT]


def with_spread(least: float, records: Sequence[Record], kept: Kept) -> list[int]:
    """`--min_score_spread`: leave out the whole group if its scores are closer than `least`."""
    scores = [score_of(record) for record in records]
    return list(kept) if max(scores) - min(scores) >= least else []


def more_turns_than(min_turns: int, records: Sequence[Record], kept: Kept) -> list[int]:
    """`--min_turns`: leave out Records with a score above 0 and at most `min_turns` turns."""
    return [i for i in kept if score_of(records[i]) <= 0 or records[i].n_turns > min_turns]


def few_at_limits(count: int, task: str, records: Sequence[Record], kept: Kept) -> list[int]:
    """`--reserve_context_error_count`: of the Records that ended at a limit of turns or tokens,
    keep `count`, drawn at random."""
    limited = [i for i in kept if records[i].stop_reason in LIMITS]
    reserved = _draw(count, task, records, limited)
    return [i for i in kept if i not in limited or i in reserved]


def balanced(task: str, records: Sequence[Record], kept: Kept) -> list[int]:
    """`--balance_sample`: keep m + 1 of the Records of score 0 and m + 2 of the others, drawn at
    random, where m is the smaller of their numbers."""
    wrong = [i for i in kept if score_of(records[i]) == 0]
    right = [i for i in kept if score_of(records[i]) != 0]
    count = min(len(wrong), len(right))
    drawn = _draw(count + 1, task, records, wrong) | _draw(count + 2, task, records, right)
    return [i for i in kept if i in drawn]


def equally_many(task: str, records: Sequence[Record], kept: Kept) -> list[int]:
    """`--balance_equally`: keep min(right, wrong) right and as many wrong Records, drawn at random.

    All stay if there are no right or no wrong ones.
    """
    right = [i for i in kept if _is_right(records[i])]
    wrong = [i for i in kept if not _is_right(records[i])]
    if not right or not wrong:
        return list(kept)
    count = min(len(right), len(wrong))
    drawn = _draw(count, task, records, right) | _draw(count, task, records, wrong)
    return [i for i in kept if i in drawn]


# The advantages of each Record: its own, those of its stretches, and those of agents with rewards
# of their own.
Every = Sequence[Sequence[float]]


def with_gradient(records: Sequence[Record], advantages: Every, kept: Kept) -> list[int]:
    """`--drop_zero_advantage`: leave out Records without a turn of nonzero advantage."""
    return [i for i in kept if any(_has_gradient(records[i], a) for a in advantages[i])]


def at_least(least: float, advantages: Every, kept: Kept) -> list[int]:
    """`--minimal_advantage`: leave out Records with an advantage below `least`."""
    return [i for i in kept if max(advantages[i]) >= least]


@dataclass(frozen=True, slots=True)
class RecordOutcome:
    """The advantage of a Record. `left_out`: the rule that leaves it out; None if trained.

    `stretches`: in a group with forks, the advantages of its turns; `advantage` is then the
    greatest of them in size. `agent_advantages`: in other groups, of agents with rewards of their
    own, whose turns have these.
    """

    advantage: float
    left_out: str | None
    stretches: tuple[Stretch, ...] = ()
    agent_advantages: Mapping[str, float] = field(default_factory=dict)


def apply_group_rules(
    task: str, records: Sequence[Record], config: RewardConfig
) -> list[RecordOutcome]:
    """The advantage of each Record of a group, and whether it is trained; in the given order.

    `task`: the Task's id. `records`: its scored Records. Raises `ConfigError` for a user's
    estimator that fails, and for one that is not of groups with forks in such a group.
    """
    if not records:
        return []
    left_out: dict[int, str] = {}
    kept = _apply(_rules_of_records(task, records, config), range(len(records)), left_out)
    stretches = _stretches(records, config)
    if stretches is None:
        advantages = _advantages(records, kept, config)
        stretches = [()] * len(records)
    else:
        advantages = [max((s.advantage for s in each), key=abs) for each in stretches]
    # Their rewards are of whole rollouts, and forks have only the ends of such.
    forked = any(stretches)
    of_agents = [{} for _ in records] if forked else agent_advantages(records, config)
    every = [
        (a, *(stretch.advantage for stretch in each), *own.values())
        for a, each, own in zip(advantages, stretches, of_agents, strict=True)
    ]
    _apply(_rules_of_advantages(records, every, config), kept, left_out)
    return [
        RecordOutcome(advantage, left_out.get(i), stretches[i], of_agents[i])
        for i, advantage in enumerate(advantages)
    ]


def _stretches(records: Sequence[Record], config: RewardConfig) -> list[tuple[Stretch, ...]] | None:
    """The advantages of each Record's turns in a group with forks; None without forks."""
    if all(record.fork is None for record in records):
        return None
    return [
        tuple(Stretch(turn=s.turn, advantage=s.advantage * config.adv_scaling) for s in stretches)
        for stretches in fork_advantages(records, config.estimator)
    ]


def _advantages(records: Sequence[Record], kept: Kept, config: RewardConfig) -> list[float]:
    """The advantage of each Record [n]; baselines are over all, also those that are left out."""
    scores = [score_of(record) for record in records]
    if config.efficient_rewarding:
        scores = moved_by_turns(records, kept)
    advantages = find_estimator(config.estimator)(records, scores)
    if config.efficiency_bonus:
        right = [i for i, record in enumerate(records) if _is_right(record)]
        bonus = ranked_by_turns([record.n_turns for record in records], right)
        advantages = [a + b for a, b in zip(advantages, bonus, strict=True)]
    return [advantage * config.adv_scaling for advantage in advantages]


def agent_advantages(records: Sequence[Record], config: RewardConfig) -> list[dict[str, float]]:
    """For each Record [n], the advantages of the agents that have rewards of their own in it.

    An agent's rewards are compared with its own in the Records of the group that have some.
    """
    found: list[dict[str, float]] = [{} for _ in records]
    estimate = find_estimator(config.estimator)
    for agent in dict.fromkeys(name for record in records for name in record.agent_rewards):
        having = [i for i, record in enumerate(records) if agent in record.agent_rewards]
        rewards = [records[i].agent_rewards[agent] for i in having]
        # The Record's score is that of the agent here: some estimators look at it.
        told = [
            records[i].model_copy(update={"score": reward})
            for i, reward in zip(having, rewards, strict=True)
        ]
        for i, advantage in zip(having, estimate(told, rewards), strict=True):
            found[i][agent] = advantage * config.adv_scaling
    return found


Rules = Mapping[str, Callable[[Kept], list[int]]]


def _apply(rules: Rules, kept: Kept, left_out: dict[int, str]) -> list[int]:
    """Apply rules one after the other; returns the indices that stay, and names the others."""
    for name, rule in rules.items():
        stay = rule(kept)
        left_out.update({i: name for i in kept if i not in stay})
        kept = stay
    return list(kept)


def _rules_of_records(task: str, records: Sequence[Record], config: RewardConfig) -> Rules:
    """The rules by scores, turns and stop reasons that the flags enable, in their order."""
    rules: dict[str, Callable[[Kept], list[int]]] = {}
    if config.estimator == "remax":
        rules["greedy_baseline"] = partial(sampled, records)
    if config.min_score_spread > 0:
        rules["min_score_spread"] = partial(with_spread, config.min_score_spread, records)
    if config.balance_sample:
        return {**rules, "balance_sample": partial(balanced, task, records)}
    if config.min_turns > 0:
        rules["min_turns"] = partial(more_turns_than, config.min_turns, records)
    if config.reserve_context_error_count is not None and not config.efficient_rewarding:
        count = config.reserve_context_error_count
        rules["reserve_context_error_count"] = partial(few_at_limits, count, task, records)
    if config.balance_equally:
        rules["balance_equally"] = partial(equally_many, task, records)
    return rules


def _rules_of_advantages(
    records: Sequence[Record], advantages: Every, config: RewardConfig
) -> Rules:
    """The rules by advantage that the flags enable. `--minimal_advantage` replaces the other."""
    if config.minimal_advantage:
        return {"minimal_advantage": partial(at_least, config.minimal_advantage, advantages)}
    if config.drops_zero:
        return {ZERO_ADVANTAGE: partial(with_gradient, records, advantages)}
    return {}


def turn_advantage(advantage: float, status: TurnStatus) -> float:
    """The advantage of a turn of a Record: A_t = A if turn t is completed, else min(A, 0).

    A failed turn (malformed call, failed tool, repetition, truncation) is never reinforced. With a
    negative advantage it is discouraged like the other turns.
    """
    return advantage if status == TurnStatus.COMPLETED else min(advantage, 0.0)


def turn_advantages(advantage: float, statuses: Sequence[TurnStatus]) -> list[float]:
    """The advantage of each turn of a Record."""
    return [turn_advantage(advantage, status) for status in statuses]


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
