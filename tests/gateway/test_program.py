"""The agent `program`: a command of the user's, run for each attempt."""

import asyncio
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from open_session import opened
from stage import Stage

from agentrl.configs import ConfigError
from agentrl.databases.documents import Record, StopReason, ToolResult
from agentrl.gateway.function import EntrySession, run_function
from agentrl.rollout.agents import load_agents

PROGRAM = Path(__file__).with_name("agent_program.py")
HOSTILE = PROGRAM.with_name("hostile_program.py")
FUNCTIONS = Path(__file__).with_name("agent_functions.py")


def runs(stage: Stage, mode: str) -> None:
    stage.flags = ("--agent_name", "program", "--agent_command",
                   f"{sys.executable} {PROGRAM} {mode}", "--max_turns", "3")  # fmt: skip


async def written(stage: Stage, record: Record) -> str:
    """What the program wrote, as it is stored."""
    document = await stage.database.tool_results.find_one({"record_id": record.id})
    assert document is not None
    return ToolResult.from_mongo(document).text


async def test_a_program_answers_and_its_task_s_scorer_scores_it(stage: Stage) -> None:
    runs(stage, "answer")
    stage.lines = ["<answer>42</answer>"]
    record = await stage.attempt("program")
    assert (record.final_answer, record.score, record.stop_reason) == ("42", 1.0, "answered")
    [turn] = await stage.turns(record)
    assert turn.output_text == "<answer>42</answer>" and turn.messages[0]["content"] == "How many?"
    assert record.turns == [turn.id] and record.n_turns == 1
    said = await written(stage, record)
    assert "It said: <answer>42" in said and "I asked once" in said


async def test_a_reported_reward_is_the_score_and_a_program_that_is_done_is_ended(
    stage: Stage,
) -> None:
    runs(stage, "reward")
    stage.lines = ["<answer>1</answer>"]
    began = time.monotonic()
    record = await stage.attempt("program")
    assert (record.score, record.explanations) == (0.25, {"reward": "a quarter"})
    assert record.final_answer == "1" and time.monotonic() - began < 30


async def test_a_program_that_fails_fails_its_attempt_with_its_last_words(stage: Stage) -> None:
    runs(stage, "fail")
    stage.lines = ["<answer>1</answer>"]
    with pytest.raises(RuntimeError, match=r"ended with status 1: KeyError: 'no such bin'"):
        await stage.attempt("program")


async def test_a_program_that_never_asks_is_named(stage: Stage) -> None:
    runs(stage, "never")
    with pytest.raises(ValueError, match="did not ask the model"):
        await stage.attempt("program")


async def test_a_limit_ends_the_record_with_its_turns_however_the_program_takes_it(
    stage: Stage,
) -> None:
    runs(stage, "greedy")
    stage.lines = ["one", "two", "three"]
    record = await stage.attempt("program")
    assert (record.stop_reason, record.n_turns) == (StopReason.MAX_TURNS, 3)


async def test_a_program_that_is_cancelled_leaves_no_process(stage: Stage, tmp_path: Path) -> None:
    runs(stage, "hang")
    stage.lines = ["one"]
    pids = tmp_path / "pids"
    async with stage.sampler("program", fields={"pid_file": str(pids)}) as sampler:
        running = asyncio.create_task(sampler.run())
        while not (pids.exists() and pids.read_text()):
            await asyncio.sleep(0.05)
        family = [int(pid) for pid in pids.read_text().split()]
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert len(family) == 2 and not [pid for pid in family if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize("mode", ["kills_its_subreaper", "stops_its_subreaper"])
async def test_a_program_that_turns_on_its_subreaper_is_ended_with_all_that_it_started(
    stage: Stage, tmp_path: Path, mode: str
) -> None:
    pids = tmp_path / "pids"
    stage.flags = ("--agent_name", "program", "--agent_command",
                   f"{sys.executable} {HOSTILE} {mode}")  # fmt: skip
    stage.lines = ["one"]
    async with stage.sampler("program", fields={"pid_file": str(pids)}) as sampler:
        running = asyncio.create_task(sampler.run())
        if mode == "stops_its_subreaper":  # it stands still until the attempt's time is up
            while not (pids.exists() and pids.read_text()):
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.5)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(running, 30)
        else:
            with pytest.raises(RuntimeError, match="the process that watches over the program"):
                await asyncio.wait_for(running, 30)
    family = [int(pid) for pid in pids.read_text().split()]
    assert len(family) == 2 and not [pid for pid in family if still_runs(pid)]


async def test_a_process_that_nobody_can_find_holds_up_no_attempt(
    stage: Stage, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    stage.flags = ("--agent_name", "program", "--agent_command",
                   f"{sys.executable} {HOSTILE} outlives_all")  # fmt: skip
    stage.lines = ["one"]
    try:
        with pytest.raises(RuntimeError, match="was killed, and all ended: it wrote nothing"):
            await asyncio.wait_for(stage.attempt("program", fields={"pid_file": str(pids)}), 30)
        hidden = int(pids.read_text())
        assert still_runs(hidden)
    finally:
        os.kill(int(pids.read_text()), signal.SIGKILL)


def still_runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_a_program_sees_none_of_the_run_s_secrets(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DB_URL", "mongodb://user:password@host")
    assert os.environ["DB_URL"]
    runs(stage, "secrets")
    stage.lines = ["x"]
    assert (await stage.attempt("program")).final_answer == "none"


@pytest.mark.parametrize(
    ("name", "answer", "score"), [("awaited", "42", 1.0), ("threaded", "42", 0.5)]
)
async def test_a_function_asks_the_model_by_a_client_of_its_own(
    stage: Stage, name: str, answer: str, score: float
) -> None:
    stage.flags = ("--agent_name", "program", "--agent_entry", f"{FUNCTIONS}:{name}")
    stage.lines = ["Hm.", "<answer>42</answer>"]
    record = await stage.attempt("program")
    assert (record.final_answer, record.score, record.n_turns) == (answer, score, 2)
    assert record.n_segments == 1


async def test_functions_that_wait_keep_neither_others_nor_the_process_from_working(
    stage: Stage,
) -> None:
    n_functions = 2 * ((os.cpu_count() or 1) + 4)  # more than the process's pool has threads
    began, let_go = threading.Barrier(n_functions), threading.Event()

    def waits(task: dict[str, Any], session: EntrySession) -> str:
        began.wait(5)
        let_go.wait(20)
        return str(threading.current_thread().daemon)

    async with opened(stage) as there:
        calls = [run_function(waits, there.session, there.url) for _ in range(n_functions)]
        outcomes = asyncio.gather(*calls)
        await asyncio.sleep(0.1)
        try:  # the names of services are looked up in the pool
            async with asyncio.timeout(3):
                await asyncio.get_running_loop().getaddrinfo("localhost", 80)
        finally:
            let_go.set()
        assert [outcome.answer for outcome in await outcomes] == ["True"] * n_functions


async def test_a_function_that_never_began_says_so(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async with opened(stage) as there:
        monkeypatch.setattr(threading.Thread, "start", refuses)
        outcome = await run_function(lambda task, session: "x", there.session, there.url)
        monkeypatch.undo()
        assert "the agent's function never began" in str(outcome.error)


async def test_a_function_that_raises_fails_its_attempt(stage: Stage) -> None:
    stage.flags = ("--agent_name", "program", "--agent_entry", f"{FUNCTIONS}:raises")
    with pytest.raises(ZeroDivisionError):
        await stage.attempt("program")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "give --agent_command"),
        (("--agent_command", "python x", "--agent_entry", "x.py:run"), "give --agent_command"),
        (("--agent_entry", "no_such_file.py:run"), "there is no such Python file"),
        (("--agent_entry", f"{FUNCTIONS}:none"), "has no function"),
        (("--agent_entry", f"{FUNCTIONS}:short"), "must take"),
        (("--agent_command", "no-such-program-here x"), "there is no program"),
        (("--agent_command", "python 'open"), "No closing quotation"),
    ],
)
async def test_a_command_that_cannot_run_is_refused_at_the_start(
    stage: Stage, flags: tuple[str, ...], said: str
) -> None:
    stage.flags = ("--agent_name", "program", *flags)
    with pytest.raises(ConfigError, match=said):  # by a launch, before anything is started
        load_agents(stage.config)
    with pytest.raises(ConfigError, match=said):
        await stage.attempt("program")
