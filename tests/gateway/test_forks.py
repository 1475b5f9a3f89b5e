"""Programs whose finished rollouts are forked: the shared turns are replayed and trained once."""

import sys
from itertools import chain, count
from pathlib import Path

import numpy as np
from asking_program import TURNS
from sampler_at_work import add, at_work, records_of
from scripted_run import all_tasks, completed, until
from stage import END, Stage

from agentrl.databases.documents import DBRecordData, RecordStatus, SlotStatus
from agentrl.training.data.forest import merge

PROGRAM = Path(__file__).with_name("asking_program.py")
FORKS = ("--fork_turns", "1", "--fork_at", "every", "--forks", "2", "--advantage", "mean")


async def rows_of(stage: Stage) -> list[DBRecordData]:
    return [DBRecordData.from_mongo(row) async for row in stage.database.rows.find().sort("_id", 1)]


async def test_each_sampled_token_of_a_group_with_forks_is_sampled_and_trained_once(
    stage: Stage,
) -> None:
    numbers = count()

    async def answer(prompt: str) -> str:
        number = next(numbers)
        if f"And after {TURNS - 2}?" in prompt:  # the last turn
            return f"<answer>{42 if number % 3 else 7}</answer>{END}"
        return f"note {number}{END}"

    stage.service.answer = answer
    await add(stage.database, 1)
    command = f"{sys.executable} {PROGRAM}"
    async with at_work(stage, "program", "--agent_command", command, *FORKS):
        await until(completed(stage.database, 1), 60)
    records = {record.id: record for record in await records_of(stage.database)}
    forks = [record for record in records.values() if record.fork is not None]
    assert (len(records), len(forks)) == (2 + 2 * 2, 4)
    # The turn before the fork is not sampled again.
    assert len(stage.service.prompts) == 2 * TURNS + 4 * (TURNS - 1)
    for fork in forks:
        assert fork.fork is not None and fork.fork.turn == 1 and fork.replay is not None
        assert (fork.n_turns, fork.replay.turns) == (TURNS, 1)
        [shared, *_] = await stage.turns(fork)
        [made, *_] = await stage.turns(records[fork.fork.record])
        assert (shared.output_ids, shared.replayed) == (made.output_ids, made.id)
        # By hand: against the mean of the forked rollout and its two forks.
        siblings = [r for r in forks if r.fork == fork.fork] + [records[fork.fork.record]]
        value = sum(record.score or 0.0 for record in siblings) / 3
        assert [s.turn for s in fork.stretches] == [1]
        assert abs(fork.stretches[0].advantage - ((fork.score or 0.0) - value)) < 1e-9
    assert len({record.score for record in records.values()}) == 2
    rows = await rows_of(stage)
    assert len(rows) == len(records)  # one for each trajectory
    trained = chain(*(row.tree["ids"][row.tree["mask"] == 1].tolist() for row in rows))
    assert sorted(trained) == sorted(chain(*stage.service.outputs))
    # The trainer's forest has a forked rollout and its forks as one tree.
    lines = [np.ascontiguousarray(row.tree["ids"]) for row in rows]
    forest = merge(lines)
    one = next(row for row in rows if row.id == forks[0].fork.record)  # type: ignore[union-attr]
    saved = sum(map(len, lines)) - len(forest.tree)
    assert len(forest.tree.nodes) >= 1 + 6
    assert saved >= 5 * (one.prompt_len - 8) and len(forest.places) == 6


async def test_a_program_that_does_not_do_the_same_again_gives_no_fork_and_costs_no_tokens(
    stage: Stage, tmp_path: Path
) -> None:
    other = tmp_path / "other.py"
    other.write_text(
        PROGRAM.read_text().replace('"How many?"', '"How many, " + os.environ["OPENAI_API_KEY"]')
    )

    async def answer(prompt: str) -> str:
        return f"note{END}"

    stage.service.answer = answer
    await add(stage.database, 1)
    command = f"{sys.executable} {other}"
    async with at_work(stage, "program", "--agent_command", command, *FORKS):
        await until(completed(stage.database, 1), 60)
    [task] = await all_tasks(stage.database)
    forks = [slot for slot in task.slots if slot.fork is not None]
    assert [(slot.status, slot.attempt) for slot in forks] == [(SlotStatus.FAILED, 0)] * 4
    assert all("does not do again what it did before turn 1" in str(s.error) for s in forks)
    assert len(stage.service.prompts) == 2 * TURNS
    assert len(await rows_of(stage)) == 2
    states = {record.status for record in await records_of(stage.database) if not record.fork}
    assert states == {RecordStatus.READY}
