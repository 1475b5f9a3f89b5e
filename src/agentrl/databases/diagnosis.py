"""Sentences on why a run makes no progress: pure functions of the ends of attempts and groups.

Lists are newest first. `outcomes.py` reads them from the database. `hopeless.py` uses them to end a
run.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

_SHOWN_CHARACTERS = 200  # of an error
_SHOWN_KINDS = 3
MOST = 0.75  # the share of the recently attempted rollouts that counts as most of them
_SHOWN_REASONS = 2
_OF_EQUAL = frozenset({"min_score_spread", "drop_zero_advantage"})  # rules
_MENDED = "use tasks that it solves sometimes, raise --num_generations, or start from a better"


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """How an attempt at a rollout ended: with a score (`error` None) or with an error."""

    at: datetime
    error: str | None
    rollout: str


@dataclass(frozen=True, slots=True)
class GroupEnd:
    """How a training group ended.

    `rows`: number of training rows; None if not known. `left_out`: number of Records left out, by
    reason. `scores`: of all scored rollouts. `given_up`: errors of rollouts, without forks, that
    failed `--max_failures` times. `scorer_error`: why the group could not be finalised.
    """

    at: datetime
    rows: int | None
    left_out: Mapping[str, int]
    scores: Sequence[float]
    given_up: Sequence[str]
    scorer_error: str | None


class Barren(StrEnum):
    """Why a group gave no training rows."""

    SCORER = "scorer"  # the scorer of the group failed
    FAILED = "failed"  # at least half of its rollouts were given up
    EQUAL = "equal"  # all scores were equal
    UNSCORED = "unscored"  # the scorers returned None for all rollouts
    LEFT_OUT = "left_out"  # the rules set by the run's flags left all rollouts out


def failures(attempts: Sequence[AttemptEnd], groups: Sequence[GroupEnd] = ()) -> str | None:
    """Count, share and errors (by kind) of failed attempts and groups; None if nothing failed."""
    errors = [attempt.error for attempt in attempts if attempt.error is not None]
    unscored = [group.scorer_error for group in groups if group.scorer_error is not None]
    parts = [
        f"{len(failed)} of the last {among} {what} ({len(failed) / among:.0%}): {_by_kind(failed)}"
        for failed, among, what in (
            (errors, len(attempts), "attempts failed"),
            (unscored, len(groups), "groups could not be finalised"),
        )
        if failed
    ]
    return "; ".join(parts) or None


def why_no_step(
    attempts: Sequence[AttemptEnd], groups: Sequence[GroupEnd], services: int, silent: int
) -> str | None:
    """Why the trainer still waits for rows; None if nothing is unusual.

    `services`: number of inference services. `silent`: rollouts whose lease has expired.
    """
    if not services:
        return "no inference service is there yet"
    if silent:
        return (
            f"the samplers of {silent} rollouts have been silent for longer than --lease_seconds: "
            "they died, or an agent, a scorer or a tool of their process ended or blocks them "
            "(os._exit; time.sleep, a long computation: await it, or use asyncio.to_thread)"
        )
    barren = [group for group in groups if group.rows == 0]
    if barren:
        # A few barren groups are normal. If most are, each step takes visibly longer.
        return barren_groups(groups) if 2 * len(barren) > len(groups) else None
    if not groups and attempts and all(attempt.error is not None for attempt in attempts):
        return f"no group finished: all {len(attempts)} attempts failed so far"
    return None


def barren_groups(groups: Sequence[GroupEnd]) -> str:
    """How many groups gave no training rows, and why, most frequent reason first."""
    # Equally frequent reasons stay in the order of `Barren`: failures first.
    by_reason: dict[Barren, list[GroupEnd]] = {reason: [] for reason in Barren}
    for group in groups:
        if group.rows == 0:
            by_reason[_why_barren(group)].append(group)
    frequent = sorted(by_reason.items(), key=lambda found: -len(found[1]))
    told = [
        f"in {len(ours)} of them {_in_words(reason, ours)}" for reason, ours in frequent if ours
    ]
    return f"{len(groups)} groups finished, {'; '.join(told[:_SHOWN_REASONS])}"


def hopeless_attempts(run: str, attempts: Sequence[AttemptEnd], limit: int) -> str | None:
    """Why the run is ended if its last `limit` attempts all failed, or if most rollouts failed in
    the same way; None otherwise.

    "Most" is a share of `MOST` of the attempted rollouts, each counted by its newest attempt: a
    rollout that fails is attempted more often than one that succeeds.
    """
    if len(attempts) < limit:
        return None
    errors = [attempt.error for attempt in attempts if attempt.error is not None]
    newest: dict[str, AttemptEnd] = {}
    for attempt in attempts:
        newest.setdefault(attempt.rollout, attempt)
    failing = kinds_of(end.error for end in newest.values() if end.error is not None)
    if len(errors) == len(attempts):
        told = f"its last {len(attempts)} attempts all failed"
    elif failing and failing[0][0] >= MOST * len(newest):
        told = (
            f"{len(errors)} of its last {len(attempts)} attempts failed, and {failing[0][0]} of "
            f"{len(newest)} rollouts in the same way"
        )
    else:
        return None
    return (
        f"run {run} gets nowhere, {told}: {_by_kind(errors)} "
        f"(`agentrl show {run} --failed` lists them; {_ended_by(limit)})"
    )


def hopeless_groups(run: str, groups: Sequence[GroupEnd], limit: int) -> str | None:
    """Why the run is ended if `limit` groups in a row gave no training rows; None otherwise.

    `groups`: the groups since the last one that gave rows.
    """
    if len(groups) < limit:
        return None
    return f"run {run} gets nowhere: {barren_groups(groups)} ({_ended_by(limit)})"


def never_trained(
    run: str, attempts: Sequence[AttemptEnd], groups: Sequence[GroupEnd], epochs: int
) -> str:
    """Why a run ends without a step after all epochs of its tasks."""
    if any(group.rows == 0 for group in groups):
        why = barren_groups(groups)
    else:
        why = failures(attempts, groups) or "there were no tasks"
    return f"run {run} trained nothing in all {epochs} epochs of its tasks: {why}"


def kinds_of(errors: Iterable[str]) -> list[tuple[int, str]]:
    """Errors by kind, most frequent first, as pairs (count, newest error)."""
    counts: Counter[tuple[str, str]] = Counter()
    newest: dict[tuple[str, str], str] = {}
    for error in errors:
        kind = kind_of(error)
        counts[kind] += 1
        newest.setdefault(kind, error)
    return [(count, newest[kind]) for kind, count in counts.most_common()]


def kind_of(error: str) -> tuple[str, str]:
    """The exception and the place where it was raised. The message between may vary."""
    return error.partition(":")[0], error.rpartition(" (at ")[2] if " (at " in error else ""


def _by_kind(errors: Sequence[str]) -> str:
    kinds = kinds_of(errors)
    if len(kinds) == 1:
        return shown_error(kinds[0][1])
    told = [f"{count} x {shown_error(error)}" for count, error in kinds[:_SHOWN_KINDS]]
    others = len(kinds) - len(told)
    return "; ".join(told) + (f"; and {others} other kinds" if others else "")


def shown_error(error: str) -> str:
    """An error on one line, shortened; the place where it was raised is kept."""
    line = " ".join(error.split())
    if len(line) <= _SHOWN_CHARACTERS:
        return line
    # The place stands at the end.
    words, at, place = line.rpartition(" (at ")
    return f"{(words or line)[: _SHOWN_CHARACTERS - 3]}...{at}{place if at else ''}"


def _why_barren(group: GroupEnd) -> Barren:
    if group.scorer_error is not None:
        return Barren.SCORER
    if group.given_up and len(group.given_up) >= len(group.scores):
        return Barren.FAILED
    if not group.scores:
        return Barren.UNSCORED
    if len(set(group.scores)) == 1 and not _OF_EQUAL.isdisjoint(group.left_out):
        return Barren.EQUAL
    return Barren.LEFT_OUT


def _in_words(reason: Barren, groups: Sequence[GroupEnd]) -> str:
    """What happened in `groups`, which are all barren for this reason, and what to do."""
    match reason:
        case Barren.SCORER:
            errors = [group.scorer_error for group in groups if group.scorer_error is not None]
            return f"the scorer of the group failed: {_by_kind(errors)}"
        case Barren.FAILED:
            errors = [error for group in groups for error in group.given_up]
            return f"most rollouts were given up: {_by_kind(errors)}"
        case Barren.EQUAL:
            scores = {score for group in groups for score in group.scores}
            hard = "too hard" if max(scores) <= 0 else "too easy" if min(scores) >= 1 else None
            rules = sorted({rule for group in groups for rule in group.left_out} & _OF_EQUAL)
            return (
                f"all scores were equal: the tasks are {hard or 'too hard or too easy'} for this "
                f"model, and --{' and --'.join(rules)} leaves such groups out: {_MENDED} model"
            )
        case Barren.UNSCORED:
            return "no rollout has a score: the scorers returned None for all of them"
        case Barren.LEFT_OUT:
            rules = sorted({rule for group in groups for rule in group.left_out})
            return (
                f"all rollouts were left out, by {', '.join(rules)} (see docs/reference/rewards.md)"
            )


def _ended_by(limit: int) -> str:
    return f"--max_failures_without_success {limit} ended it"
