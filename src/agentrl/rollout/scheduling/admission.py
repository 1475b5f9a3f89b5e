"""How far samplers may run ahead of the trainer: the bound on staleness, as formulas.

Groups are begun in their group order, so the bound gives an *admission limit*: the group order of
the last group that may be begun now. Any number of samplers work it out each for itself from the
same ledger, and every one claims only up to its own.

Two samplers with the same view open the same groups, not twice as many. And an admission limit
stays right as it gets older: what it admits was counted when it was worked out, whoever begins it
and when. Beginning an admitted group changes nothing in that count; ending it, and training its
rows, only make it smaller. What comes later may move the admission limit on, never back (but for a
trainer that resumes: it makes trained rows ready again).

What was counted must be read in the order `not begun`, `running`, `accepted`, the way of every
group. One that moves on meanwhile is then counted twice, never missed, and the admission limit is
at worst too near, until the next look. Reading is not done here (`work_view.py`).
"""

from collections.abc import Sequence


def room(*, max_staleness: int, version: int, batch: int, accepted: int, running: int) -> int:
    """How many further rows may be begun; none if this is 0 or negative.

    The bound of AReaL (arXiv 2505.24298, section 5.1): work may begin while

        accepted + running < (max_staleness + version + 1) * batch

    `accepted`: all rows so far, trained ones included. `running`: rollouts of groups that are begun
    and not finalised. `version`: steps so far, each of which trained `batch` rows. A row begun now
    is trained after those before it, by a policy at most `max_staleness` versions newer.

    `version * batch` of the accepted rows are trained, so the bound is the same if only rows that
    are *not trained yet* count and `version` is 0. The ledger is queried that way, which is also
    right after restarts and for rows that are trained several times.
    """
    return (max_staleness + version + 1) * batch - accepted - running


def admitted_groups(room: int, group_size: int) -> int:
    """How many groups may be begun with `room` rows, rounded up.

    The last group may exceed the room by less than its size. If it were rounded down, the trainer
    could wait forever for the rest of a batch.
    """
    return max(0, -(-room // group_size))


def admission_limit(not_begun: Sequence[int], room: int, group_size: int) -> int | None:
    """The group order of the last group that may be begun; None if there is none.

    `not_begun`: sorted group orders of unclaimed groups, at least as many as the whole bound
    admits, or all.
    """
    admitted = not_begun[: admitted_groups(room, group_size)]
    return admitted[-1] if admitted else None
