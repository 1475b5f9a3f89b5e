"""What is asked of a run of any size reads what it answers, by indexes, on a real mongod."""

import pytest
from plans import noted_plans

from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import Split
from agentrl.databases.due import anything_due, finalisations_due, scorings_due
from agentrl.databases.feeder import make_tasks
from agentrl.databases.finalisations import Finalisations
from agentrl.databases.free_groups import KINDS_AT_ONCE
from agentrl.databases.scorings import ScoringLedger
from agentrl.databases.task_choice import NO_TASKS, TaskChoice
from agentrl.databases.task_file import TaskLine
from agentrl.databases.tasks import UNBOUNDED, TaskLedger, open_groups

HELD_BACK = 2000


def ledger(database: RunDatabase) -> TaskLedger:
    return TaskLedger(database, "sampler", lease_seconds=30, max_failures=2)


async def fill(database: RunDatabase, *kinds: tuple[str | None, str]) -> None:
    """Two thousand groups of the first kind, then two of each other."""
    named = [*(HELD_BACK * [kinds[0]]), *(kind for kind in kinds[1:] for _ in range(2))]
    lines = [
        TaskLine(id=str(number), query="?", agent_name=agent, scorer=scorer)
        for number, (agent, scorer) in enumerate(named)
    ]
    await ledger(database).add(make_tasks(lines, Split.TRAIN, 0, 2, range(len(lines))))
    other = [TaskLine(id="other", query="?", agent_name="z", scorer="z")]
    await ledger(database).add(make_tasks(other, Split.EVAL, 0, 2, range(1)))


@pytest.mark.parametrize(
    "without",
    [TaskChoice(agents=frozenset({None, "a"})), TaskChoice(scorers=frozenset({"judge"}))],
)
async def test_a_claim_reads_none_of_the_groups_that_are_held_back(
    database: RunDatabase, without: TaskChoice
) -> None:
    await fill(database, (None, "0.5*judge + 0.5*math"), ("b", "math"), ("c", "f1"))
    sampler = ledger(database)
    async with noted_plans(database) as plans:
        for place, limit in enumerate((UNBOUNDED, HELD_BACK + 1, HELD_BACK + 3), HELD_BACK):
            claims = await sampler.claim(
                Split.TRAIN, count=2, admission_limit=limit, without=without
            )
            assert [claim.task.group_order for claim in claims] == [place, place]
        await sampler.release(claims[0])
        # begun already, so that no admission limit counts
        [again] = await sampler.claim(Split.TRAIN, admission_limit=None, without=without)
        assert again.task.group_order == HELD_BACK + 2
        assert await sampler.claim(Split.TRAIN, epoch=1, without=without) == []
    assert plans.documents <= 4 and plans.keys <= 12
    assert await open_groups(database, Split.TRAIN) == 3


@pytest.mark.slow
async def test_groups_of_more_kinds_than_one_query_names_are_all_claimed(
    database: RunDatabase,
) -> None:
    kinds = [(None, f"s{number}") for number in range(KINDS_AT_ONCE + 20)]
    await fill(database, (None, "judge"), *kinds)
    sampler = ledger(database)
    held = TaskChoice(scorers=frozenset({"judge"}))
    claimed = set()
    async with noted_plans(database) as plans:
        while claims := await sampler.claim(Split.TRAIN, count=2, without=held):
            claimed.add(claims[0].task.id)
    assert len(claimed) == 2 * len(kinds)
    assert plans.documents <= 2 * KINDS_AT_ONCE


async def test_a_look_finds_what_is_due_and_costs_one_query(database: RunDatabase) -> None:
    await fill(database, (None, "math"), (None, "judge"))
    sampler = ledger(database)
    scorings = ScoringLedger(database, sampler, 3)

    async def due(without: TaskChoice = NO_TASKS) -> tuple[bool, bool]:
        scoring, finalisation = scorings_due(without=without), finalisations_due()
        both = await anything_due(database, scoring, finalisation)
        assert both == (
            await anything_due(database, scoring) or await anything_due(database, finalisation)
        )
        return await anything_due(database, scoring), await anything_due(database, finalisation)

    async with noted_plans(database) as plans:
        assert await due() == (False, False)
        first, second = await sampler.claim(Split.TRAIN, count=2)
        await sampler.complete(second, 1.0)
        assert await due() == (False, False)
        await scorings.hand_back(first)
        assert await due() == (True, False)
        assert await due(TaskChoice(scorers=frozenset({"math"}))) == (False, False)
        again = await scorings.claim()
        assert again is not None
        ended = await sampler.complete(again, 0.0)
        assert ended is not None and await due() == (False, False)  # its finalisation is held
        await Finalisations(database, "sampler", 30, 3).leave(ended)
        assert await due() == (False, True)
        assert await sampler.claim_finalisation() is not None
        [third] = await sampler.claim(Split.TRAIN)
        await scorings.put_off(third, "status 503", counts=False)
        assert await due() == (False, False)  # not yet
    assert plans.documents <= 2
