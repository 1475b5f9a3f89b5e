"""A program that goes on where an earlier attempt ended: only what is missing is sampled."""

import asyncio
import sys
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from asking_program import TURNS
from forked import Forked
from sampler_at_work import add, at_work, records_of
from scripted_run import all_tasks, begin_run, completed, until
from stage import END, Stage

from agentrl.databases.arrays import unpack_floats, unpack_ints
from agentrl.databases.documents import DBRecordData, Record, RecordStatus
from agentrl.databases.mongod import EmbeddedMongod
from agentrl.databases.policies import publish
from agentrl.launcher.report import gather_report

HERE = Path(__file__).parent
PROGRAM = HERE / "asking_program.py"


def command(*arguments: object) -> str:
    return " ".join(map(str, [sys.executable, PROGRAM, *arguments]))


def say_something_new(stage: Stage) -> None:
    """Each answer of the service differs from all others."""
    numbers = count()

    async def answer(prompt: str) -> str:
        return f"note {next(numbers)}{END}"

    stage.service.answer = answer


async def attempts_of(stage: Stage, rollout: int) -> list[Record]:
    found = [record for record in await records_of(stage.database) if record.rollout == rollout]
    return sorted(found, key=lambda record: record.attempt)


async def outputs_of(stage: Stage, record: Record) -> list[list[int]]:
    return [unpack_ints(turn.output_ids).tolist() for turn in await stage.turns(record)]


async def assert_rows_are_what_was_sampled(stage: Stage, records: Sequence[Record]) -> None:
    """The trained tokens of all rows are answers of the service, with the logprobs of their ids."""
    for record in records:
        document = await stage.database.rows.find_one({"_id": record.id})
        assert document is not None
        tree = DBRecordData.from_mongo(document).tree
        trained = tree["mask"] == 1
        sampled = [ids for turn in await outputs_of(stage, record) for ids in turn]
        assert tree["ids"][trained].tolist() == sampled
        assert tree["logprobs"][trained] == pytest.approx(-tree["ids"][trained] / 1000)
        assert set(tree["versions"][trained].tolist()) == {2}  # of the service
        for turn in await stage.turns(record):
            logprobs = unpack_floats(turn.output_logprobs)
            assert logprobs == pytest.approx(-unpack_ints(turn.output_ids) / 1000)


async def test_a_program_that_was_killed_is_asked_again_only_for_the_turns_that_were_missing(
    stage: Stage, tmp_path: Path
) -> None:
    say_something_new(stage)
    await add(stage.database, 1)
    async with at_work(stage, "program", "--agent_command", command(2)):
        await until(completed(stage.database, 1))
    # Two rollouts of five turns each, however often they were begun.
    assert len(stage.service.prompts) == 2 * TURNS
    finished = []
    for rollout in range(2):
        killed, resumed = await attempts_of(stage, rollout)
        assert killed.status == RecordStatus.FAILED and "status 137" in str(killed.error)
        assert (killed.n_turns, killed.replay) == (3, None)
        assert resumed.replay is not None and resumed.n_turns == TURNS
        before, after = await outputs_of(stage, killed), await outputs_of(stage, resumed)
        assert after[:3] == before and len({*map(tuple, after)}) == TURNS
        assert resumed.replay.model_dump() == {
            "turns": 3, "tokens": sum(map(len, before)), "diverged": None,
        }  # fmt: skip
        assert [turn.replayed for turn in await stage.turns(resumed)] == [
            *killed.turns, None, None,
        ]  # fmt: skip
        finished.append(resumed)
    await assert_rows_are_what_was_sampled(stage, finished)
    tokens = (await gather_report(stage.database, tmp_path, 1.0)).summary.tokens
    assert tokens.replayed == sum(record.replay.tokens for record in finished if record.replay)
    assert tokens.sampled == sum(map(len, stage.service.outputs))


async def test_a_program_that_asks_otherwise_goes_on_with_new_tokens_and_its_record_says_where(
    stage: Stage, tmp_path: Path
) -> None:
    other = tmp_path / "other.py"
    source = PROGRAM.read_text().replace('f"And after {turn}?"', 'f"And, {first}, {turn}?"')
    other.write_text(source)
    say_something_new(stage)
    await add(stage.database, 1)
    async with at_work(stage, "program", "--agent_command", f"{sys.executable} {other} 2"):
        await until(completed(stage.database, 1))
    assert len(stage.service.prompts) == 2 * (3 + TURNS - 1)  # the first question is the same
    _, resumed = await attempts_of(stage, 0)
    assert resumed.replay is not None
    assert (resumed.replay.turns, resumed.replay.diverged) == (1, 1)
    await assert_rows_are_what_was_sampled(stage, [resumed])


async def test_turns_that_led_to_the_same_error_twice_are_not_replayed_a_third_time(
    stage: Stage, tmp_path: Path
) -> None:
    fails = tmp_path / "fails.py"
    fails.write_text(
        PROGRAM.read_text()
        .replace("os.kill(os.getpid(), signal.SIGKILL)", "1 / 0")
        .replace('first = os.environ["AGENTRL_SESSION_URL"].endswith("-a0")', "first = True")
    )
    say_something_new(stage)
    await add(stage.database, 1)
    command = f"{sys.executable} {fails} 2"
    async with at_work(stage, "program", "--agent_command", command, "--max_failures", "3"):
        await until(completed(stage.database, 1))
    first, second, third = await attempts_of(stage, 0)
    assert [record.n_turns for record in (first, second, third)] == [3, 3, 3]
    assert await outputs_of(stage, first) == await outputs_of(stage, second)
    assert second.replay is not None and second.replay.turns == 3
    assert third.replay is None
    assert not {*map(tuple, await outputs_of(stage, third))}.intersection(
        map(tuple, await outputs_of(stage, first))
    )


async def test_turns_too_old_to_be_trained_are_not_replayed(stage: Stage) -> None:
    numbers = count()

    async def answer(prompt: str) -> str:
        if next(numbers) == 0:
            # Sampled by version 2, which is four steps old when the attempt is over.
            await publish(stage.database, 2, 0, "x")
            await publish(stage.database, 3, 4, "x")
        return f"note{END}"

    stage.service.answer = answer
    await add(stage.database, 1)
    flags = ("--agent_command", command(2), "--max_staleness", "2")
    async with at_work(stage, "program", *flags):
        await until(completed(stage.database, 1))
    for rollout in range(2):
        _, again = await attempts_of(stage, rollout)
        assert again.replay is None
    assert len(stage.service.prompts) == 2 * (3 + TURNS)


@pytest.mark.slow
async def test_a_sampler_that_was_killed_costs_no_turn_that_was_stored(
    stage: Stage, mongod: EmbeddedMongod
) -> None:
    numbers, never = count(), asyncio.Event()
    waiting = 0
    held = True

    async def answer(prompt: str) -> str:
        nonlocal waiting
        if held and "And after 2?" in prompt:
            waiting += 1
            await never.wait()
        return f"note {next(numbers)}{END}"

    stage.service.answer = answer
    await add(stage.database, 1)
    await begin_run(stage.database, service=stage.service.url)
    flags: tuple[Any, ...] = ("--agent_name", "program", "--agent_command", command())
    lease = ("--lease_seconds", "2", "--drop_zero_advantage", "false", "--max_tokens", "900")
    process = Forked(
        [str(HERE / "sampling_process.py"), mongod.url, stage.database.name, *flags, *lease]
    )
    try:

        async def both_wait() -> bool:
            return waiting == 2

        await until(both_wait, 60)
    finally:
        process.kill()
        process.wait()
    held = False
    assert next(numbers) == 6  # three turns of each
    async with at_work(stage, "program", *flags, "--lease_seconds", "2"):
        await until(completed(stage.database, 1), 60)
    assert next(numbers) == 6 + 1 + 4  # and two of each in the next attempts
    [task] = await all_tasks(stage.database)
    assert [(slot.attempt, slot.failures) for slot in task.slots] == [(1, 0)] * 2
    finished = []
    for rollout in range(2):
        lost, resumed = await attempts_of(stage, rollout)
        assert lost.error == "its sampler went silent" and resumed.replay is not None
        assert (resumed.replay.turns, resumed.n_turns) == (3, TURNS)
        finished.append(resumed)
    await assert_rows_are_what_was_sampled(stage, finished)
