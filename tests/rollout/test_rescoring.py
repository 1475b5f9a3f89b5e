"""Stored groups are scored anew, on a real mongod: their Records, rows and Tasks follow."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest
from stored_turn import make_turn

from agentrl.configs import RewardConfig
from agentrl.databases.arrays import pack_ints
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import (
    DBRecordData,
    Record,
    RecordStatus,
    RowStatus,
    Slot,
    SlotStatus,
    Split,
    Task,
    TaskStatus,
    TrainedStep,
    TurnStatus,
)
from agentrl.databases.finalisations import Finalisations
from agentrl.databases.policies import Lineage
from agentrl.databases.records import RecordLedger
from agentrl.databases.rescoring import Rescoring, RowOutcome
from agentrl.databases.row_ledger import RowLedger
from agentrl.databases.tasks import TaskLedger
from agentrl.rollout.groups.finalise import Finaliser
from agentrl.rollout.groups.rescoring import Rescorer, RescoringReport
from agentrl.rollout.llm.models import AgentModels
from agentrl.rollout.scorers import Score, Scorers, register_scorer

REWARD = RewardConfig(advantage="mean")
ANSWERS = ("left", "right", "right")


async def completed_group(
    database: RunDatabase, name: str = "g", split: Split = Split.TRAIN
) -> None:
    """A group of three, finalised as its sampler does: "right" is right, so that of the Records 1
    and 2 the advantage is 1/3, and of 0 -2/3."""
    ids = [f"{name}-t{rollout}-a0" for rollout in range(3)]
    scores = [float(answer == "right") for answer in ANSWERS]
    order = "gh".index(name)  # no two groups of a split have the same
    task = Task(
        _id=name, split=split, epoch=0, seq=order, group_order=order, task_id=name, query="q",
        answer="right",
        scorer="exact_match", pending=0, status=TaskStatus.FINALISING,
        slots=[
            Slot(
                rollout=rollout, status=SlotStatus.COMPLETED, record=ids[rollout],
                score=scores[rollout],
            )
            for rollout in range(3)
        ],
        finalisation={"owner": "a", "lease_expires": "2100-01-01"},
    )  # fmt: skip
    await database.tasks.insert_one(task.to_mongo())
    for rollout, score in enumerate(scores):
        record = Record(
            _id=ids[rollout], task=name, task_id=name, rollout=rollout, attempt=0, split=split,
            epoch=0,
            owner="a", query="q", turns=[f"{ids[rollout]}-0"], n_turns=rollout + 1,
            final_answer=ANSWERS[rollout], status=RecordStatus.SCORED, score=score,
            scores={"exact_match": score},
        )  # fmt: skip
        await database.records.insert_one(record.to_mongo())
        await database.turns.insert_one(make_turn(record.id).to_mongo())
    records = RecordLedger(database, lease_seconds=60)
    await Finaliser(
        TaskLedger(database, "a", 60, max_failures=1),
        Finalisations(database, "a", 60, max_failures=2), records,
        Scorers(AgentModels(), records), REWARD, temperature=1.0, scoring_s=60.0,
    ).finalise(task)  # fmt: skip


@pytest.fixture
async def scorers(database: RunDatabase) -> AsyncIterator[Scorers]:
    async with Scorers(AgentModels(), RecordLedger(database, lease_seconds=60)) as opened:
        yield opened


async def rescore(
    database: RunDatabase,
    scorers: Scorers,
    scorer: str,
    where: dict[str, Any] | None = None,
    reward: RewardConfig = REWARD,
) -> RescoringReport:
    ledger = Rescoring(database)
    records = RecordLedger(database, lease_seconds=60)
    rescorer = Rescorer(ledger, records, scorers, reward, temperature=1.0)
    return await rescorer.rescore(await ledger.groups(where or {}), scorer)


async def records_of(database: RunDatabase, task: str = "g") -> list[Record]:
    cursor = database.records.find({"task": task}).sort("rollout", 1)
    return [Record.from_mongo(document) async for document in cursor]


async def rows_of(database: RunDatabase) -> dict[str, DBRecordData]:
    return {row["_id"]: DBRecordData.from_mongo(row) async for row in database.rows.find()}


def advantages(rows: dict[str, DBRecordData]) -> list[float]:
    """Of the generated tokens of each row, in the order of ids."""
    return [float(rows[name].tree["advantages"][-1]) for name in sorted(rows)]


def scores_by_rollout(name: str, scores: Sequence[float | None]) -> str:
    """A scorer that gives the attempts these scores."""

    async def by_rollout(record: Record) -> Score:
        return Score(scores[record.rollout], f"rollout {record.rollout}")

    register_scorer(name, by_rollout)
    return name


async def test_records_rows_and_slots_follow_the_new_scores_and_the_old_ones_are_kept(
    database: RunDatabase, scorers: Scorers
) -> None:
    await completed_group(database)
    assert advantages(await rows_of(database)) == pytest.approx([-2 / 3, 1 / 3, 1 / 3])
    report = await rescore(database, scorers, scores_by_rollout("first_best", [1.0, 0.0, 0.5]))
    assert (report.groups, report.records, report.failures) == (1, 3, {})
    assert report.rows == {RowOutcome.REWRITTEN: 2, RowOutcome.WITHDRAWN: 1}
    first, second, third = await records_of(database)
    assert (first.score, first.scores) == (1.0, {"first_best": 1.0})
    assert first.explanations == {"first_best": "rollout 0"}
    assert first.advantage == pytest.approx(0.5)
    assert (third.status, third.left_out) == (RecordStatus.ABANDONED, "drop_zero_advantage")
    (before,) = second.score_history
    assert (before.scorer, before.score, before.scores) == (
        "exact_match", 1.0, {"exact_match": 1.0},
    )  # fmt: skip
    assert before.advantage == pytest.approx(1 / 3)
    assert not before.row_stayed
    rows = await rows_of(database)
    assert advantages(rows) == pytest.approx([0.5, -0.5, 1 / 3])
    assert [rows[name].status for name in sorted(rows)] == [
        RowStatus.READY, RowStatus.READY, RowStatus.WITHDRAWN,
    ]  # fmt: skip
    assert [rows[name].reward for name in sorted(rows)][:2] == [1.0, 0.0]
    task = Task.from_mongo(await database.tasks.find_one({"_id": "g"}) or {})
    assert task.scorer == "first_best"
    assert [slot.score for slot in task.slots] == [1.0, 0.0, 0.5]


async def test_a_row_that_was_withdrawn_comes_back_and_one_that_never_was_is_made(
    database: RunDatabase, scorers: Scorers
) -> None:
    await completed_group(database)
    await rescore(database, scorers, scores_by_rollout("even", [1.0, 1.0, 1.0]))
    assert {row.status for row in (await rows_of(database)).values()} == {RowStatus.WITHDRAWN}
    await database.rows.delete_one({"_id": "g-t2-a0"})  # as if its group had left it out at first
    report = await rescore(database, scorers, scores_by_rollout("last_best", [0.0, 0.0, 3.0]))
    assert report.rows == {RowOutcome.ADDED: 3}
    rows = await rows_of(database)
    assert advantages(rows) == pytest.approx([-1.0, -1.0, 2.0])
    assert {row.status for row in rows.values()} == {RowStatus.READY}
    assert [record.status for record in await records_of(database)] == [RecordStatus.READY] * 3
    histories = [record.score_history for record in await records_of(database)]
    assert [[scoring.scorer for scoring in history] for history in histories] == [
        ["exact_match", "even"]
    ] * 3


async def test_a_row_of_new_advantages_says_which_turns_have_failed_as_before(
    database: RunDatabase, scorers: Scorers
) -> None:
    await completed_group(database)
    failed = {"id": "g-t0-a0-1", "turn": 1, "status": TurnStatus.TOOL_FAILED,
              "prompt_delta_ids": pack_ints([6]), "prompt_len": 6}  # fmt: skip
    await database.turns.insert_one(make_turn("g-t0-a0").model_copy(update=failed).to_mongo())
    await database.rows.delete_one({"_id": "g-t0-a0"})
    for name, scores, of_failed in (
        ("worst", [0.0, 1.0, 1.0], -2 / 3), ("best", [1.0, 0.0, 0.0], 0.0),
    ):  # fmt: skip
        await rescore(database, scorers, scores_by_rollout(f"first_{name}_of_all", scores))
        tree = (await rows_of(database))["g-t0-a0"].tree
        assert tree["capped"][tree["mask"] == 1].tolist() == [0, 0, 1, 1]
        assert tree["advantages"][tree["capped"] == 1].tolist() == pytest.approx([of_failed] * 2)


@pytest.mark.parametrize(
    "change",
    [
        {"status": RowStatus.TRAINED, "trained": [TrainedStep(step=1, trainer="t", fence=1)]},
        {"status": RowStatus.READY, "trained": [TrainedStep(step=1, trainer="t", fence=1)]},
        {"status": RowStatus.LEASED, "trainer": "t", "fence": 1, "step": 2},
        {"status": RowStatus.EVICTED, "fence": 1, "step": 2},
    ],
)
async def test_a_row_that_a_trainer_has_touched_stays_and_its_record_says_so(
    database: RunDatabase, scorers: Scorers, change: dict[str, Any]
) -> None:
    await completed_group(database)
    stored = [step.model_dump() for step in change.get("trained", [])]
    await database.rows.update_one({"_id": "g-t0-a0"}, {"$set": {**change, "trained": stored}})
    before = (await rows_of(database))["g-t0-a0"]
    # The first is in the middle now, and would be left out.
    report = await rescore(database, scorers, scores_by_rollout("middle", [0.5, 1.0, 0.0]))
    assert report.rows == {RowOutcome.STAYED: 1, RowOutcome.REWRITTEN: 2}
    assert (await rows_of(database))["g-t0-a0"] == before
    record = (await records_of(database))[0]
    assert record.status == RecordStatus.READY
    assert (record.score, record.advantage) == (0.5, 0.0)
    assert record.score_history[0].row_stayed


async def test_rewards_of_a_program_s_agents_stay_and_their_advantages_are_computed_anew(
    database: RunDatabase, scorers: Scorers
) -> None:
    await completed_group(database)
    rewards = [{"planner": 0.0}, {"planner": 3.0}, {"planner": 0.0}]
    for rollout, own in enumerate(rewards):
        told = {"agent_rewards": own, "agent_advantages": {"planner": 9.0}}
        await database.records.update_one({"_id": f"g-t{rollout}-a0"}, {"$set": told})
    await database.turns.update_many({}, {"$set": {"agent": "planner"}})
    await rescore(database, scorers, scores_by_rollout("of_no_planner", [1.0, 0.0, 0.0]))
    records = await records_of(database)
    assert [record.agent_rewards for record in records] == rewards
    assert [record.agent_advantages["planner"] for record in records] == [-1.0, 2.0, -1.0]
    assert advantages(await rows_of(database)) == [-1.0, 2.0, -1.0]


async def test_a_quarantined_record_stays_and_the_others_of_its_group_are_compared_anew(
    database: RunDatabase, scorers: Scorers
) -> None:
    await completed_group(database, "g")
    await completed_group(database, "h")
    quarantined = {"status": RecordStatus.QUARANTINED, "error": "no row"}
    await database.records.update_one({"_id": "g-t0-a0"}, {"$set": quarantined})
    before = (await records_of(database))[0]
    report = await rescore(database, scorers, scores_by_rollout("without_one", [9.0, 1.0, 0.0]))
    assert (report.groups, report.records, report.failures) == (2, 5, {})
    first, *others = await records_of(database)
    assert first == before
    assert [record.advantage for record in others] == [0.5, -0.5]


async def test_a_record_that_is_quarantined_meanwhile_fails_its_group_only(
    database: RunDatabase, scorers: Scorers
) -> None:
    async def meanwhile(record: Record) -> float:
        if record.id == "g-t1-a0":
            quarantined = {"status": RecordStatus.QUARANTINED, "error": "no row"}
            await database.records.update_one({"_id": record.id}, {"$set": quarantined})
        return float(record.rollout)

    register_scorer("meanwhile", meanwhile)
    await completed_group(database, "g")
    await completed_group(database, "h")
    report = await rescore(database, scorers, "meanwhile")
    assert (report.groups, list(report.failures)) == (1, ["g"])
    assert "g-t1-a0 is quarantined" in report.failures["g"]


async def test_a_trainer_leases_a_rescored_row_and_never_a_withdrawn_one(
    database: RunDatabase, scorers: Scorers
) -> None:
    await completed_group(database)
    await rescore(database, scorers, scores_by_rollout("middle", [0.5, 1.0, 0.0]))
    trainer = RowLedger(database, "t", fence=1)
    await trainer.rewind(0)
    headers = await trainer.lease(1, 9, Lineage({0: 0}), max_staleness=9)
    assert [header.id for header in headers] == ["g-t1-a0", "g-t2-a0"]
    assert [header.reward for header in headers] == [1.0, 0.0]


async def test_where_selects_groups_by_their_records_and_each_is_scored_as_a_whole(
    database: RunDatabase, scorers: Scorers
) -> None:
    await completed_group(database, "g")
    await completed_group(database, "h")
    await database.records.update_one({"_id": "h-t1-a0"}, {"$set": {"n_tool_errors": 4}})
    ledger = Rescoring(database)
    assert await ledger.groups({"n_tool_errors": {"$gt": 3}}) == ["h"]
    assert await ledger.groups({"$or": [{"task": "g"}, {"rollout": 1}]}) == ["g", "h"]
    assert await ledger.groups({"score": 7}) == []
    await rescore(database, scorers, "f1", {"n_tool_errors": 4})
    assert all(record.score_history for record in await records_of(database, "h"))
    assert not any(record.score_history for record in await records_of(database, "g"))


async def test_a_scorer_of_the_whole_group_compares_it_anew(
    database: RunDatabase, scorers: Scorers
) -> None:
    def fewest_turns(records: list[Record]) -> list[Score]:
        fewest = min(record.n_turns for record in records)
        return [Score(float(record.n_turns == fewest), "turns") for record in records]

    register_scorer("fewest_turns", fewest_turns)
    await completed_group(database)
    await rescore(database, scorers, "exact_match + 2*fewest_turns")
    assert [record.score for record in await records_of(database)] == [2.0, 1.0, 1.0]
    task = Task.from_mongo(await database.tasks.find_one({"_id": "g"}) or {})
    assert task.group_scores is not None
    assert [said.score for said in task.group_scores] == [1.0, 0.0, 0.0]


async def test_an_evaluation_has_new_scores_and_no_rows(
    database: RunDatabase, scorers: Scorers
) -> None:
    await completed_group(database, split=Split.EVAL)
    report = await rescore(database, scorers, scores_by_rollout("half", [0.5, 0.5, None]))
    assert (report.records, report.unscored) == (3, 1)
    records = await records_of(database)
    assert [record.score for record in records] == [0.5, 0.5, None]
    assert {record.status for record in records} == {RecordStatus.SCORED}
    assert await rows_of(database) == {}


async def test_a_group_that_cannot_be_scored_stays_as_it_was_and_the_others_go_on(
    database: RunDatabase, scorers: Scorers
) -> None:
    async def picky(record: Record) -> float:
        if record.task == "g":
            raise LookupError("no opinion")
        return float(record.rollout)

    register_scorer("picky", picky)
    await completed_group(database, "g")
    await completed_group(database, "h")
    before = await records_of(database, "g"), await database.tasks.find_one({"_id": "g"})
    report = await rescore(database, scorers, "picky")
    assert report.groups == 1
    assert report.failures == {"g": "LookupError: no opinion"}
    after = await records_of(database, "g"), await database.tasks.find_one({"_id": "g"})
    assert after == before
    assert [record.score for record in await records_of(database, "h")] == [0.0, 1.0, 2.0]


async def test_a_group_in_progress_is_left_to_its_samplers(
    database: RunDatabase, scorers: Scorers
) -> None:
    await completed_group(database)
    await database.tasks.update_one({"_id": "g"}, {"$set": {"status": TaskStatus.FINALISING}})
    report = await rescore(database, scorers, "f1")
    assert (report.groups, report.in_progress) == (0, 1)
    assert not any(record.score_history for record in await records_of(database))


async def test_other_rules_may_be_applied_to_the_same_scores(
    database: RunDatabase, scorers: Scorers
) -> None:
    await completed_group(database)
    efficient = RewardConfig(advantage="mean", efficiency_bonus=True)
    await rescore(database, scorers, "exact_match", reward=efficient)
    # Of the right ones the second took 2 turns and the third 3: a tenth more, and a tenth less.
    found = advantages(await rows_of(database))
    assert np.allclose(found, [-2 / 3, 1 / 3 + 0.1, 1 / 3 - 0.1])
