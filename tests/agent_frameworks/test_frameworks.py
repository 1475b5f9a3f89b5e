"""Agents in frameworks that others wrote, unmodified, under the agent `program`.

Each asks for two items at once, then for the stock, then answers. What they send as the history is
recognised, so that all turns are one line of tokens; smolagents' calls, which it writes into the
prompt in words of its own, begin segments.
"""

import os
from itertools import chain
from pathlib import Path

import pytest
from slow_service import SlowService
from stage import Stage, tool_call

from agentrl.databases.documents import Record
from agentrl.rollout.groups.row_building import build_row

PYTHON = os.environ["FRAMEWORKS_PYTHON"]
PROGRAM = Path(__file__).with_name("program.py")
CHATS = (
    "langgraph", "langgraph_streaming", "openai_agents", "openai_agents_streaming", "pydantic_ai",
    "pydantic_ai_streaming", "pydantic_ai_anthropic", "litellm", "litellm_anthropic",
)  # fmt: skip


async def run_program(stage: Stage, command: str) -> Record:
    stage.flags = (
        "--agent_name", "program", "--agent_command", f"{PYTHON} {command}",
        "--max_tokens", "60000", "--max_new_tokens", "2000", "--record_timeout", "120",
    )  # fmt: skip
    return await stage.attempt("program")


async def assert_trained(stage: Stage, framework: str, n_segments: int = 1) -> None:
    record = await run_program(stage, f"{PROGRAM} {framework}")
    assert (record.final_answer, record.score) == ("42", 1.0)
    await assert_turns(stage, record, n_segments)


async def assert_turns(stage: Stage, record: Record, n_segments: int) -> None:
    """Three turns, which are trained as they were sampled."""
    assert (record.n_turns, record.n_segments, record.n_drifts) == (3, n_segments, 0)
    row = build_row(record, await stage.turns(record), 1.0, 1.0, 0)
    ids, mask = row.tree["ids"], row.tree["mask"]
    assert n_segments > 1 or len(row.tree.nodes) == 1
    assert ids[mask == 1].tolist() == list(chain(*stage.service.outputs))
    assert row.tree["logprobs"][mask == 1] == pytest.approx(-ids[mask == 1] / 1000)


@pytest.mark.parametrize("framework", CHATS)
async def test_its_turns_are_trained_as_they_were_sampled(stage: Stage, framework: str) -> None:
    stage.lines = [
        "I look.\n" + tool_call("find", '{"item":  "bolt"}') + "\n"
        + tool_call("find", '{"item": "nut"}'),
        tool_call("stock", '{"bin": "B7" }'),
        "So <answer>42</answer>",
    ]  # fmt: skip
    service = SlowService(stage.renderer, stage._say)  # its tokens come one by one
    async with service.running():
        stage.service = service
        await assert_trained(stage, framework)


async def test_smolagents_with_tool_calls_that_it_writes_anew_for_the_next_prompt(
    stage: Stage,
) -> None:
    stage.lines = [
        tool_call("find", '{"item":  "bolt"}'),
        tool_call("stock", '{"bin": "B7" }'),
        tool_call("final_answer", '{"answer": "<answer>42</answer>"}'),
    ]
    await assert_trained(stage, "smolagents", n_segments=3)


async def test_smolagents_with_code_and_stops(stage: Stage) -> None:
    stage.lines = [
        "Thought: I look.\n<code>\nprint(find('bolt'))\n</code>",
        "Thought: I count.\n<code>\nprint(stock(bin='B7'))\n</code>",
        "Thought: done.\n<code>\nfinal_answer('<answer>42</answer>')\n</code>",
    ]
    await assert_trained(stage, "smolagents_code", n_segments=3)


async def test_a_terminal_coding_agent_mends_a_file_and_its_turns_are_trained(
    stage: Stage,
) -> None:
    say = '{{"command": "{}"}}'.format
    stage.lines = [
        "I look.\n" + tool_call("bash", say("cat total.py && python check.py")),
        tool_call("bash", say("sed -i 's/a - b/a + b/' total.py && python check.py && echo good")),
        tool_call("bash", say("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")),
    ]
    command = str(Path(__file__).with_name("terminal_agent.py"))
    record = await run_program(stage, command)
    assert record.score == 1.0 and "return a + b" in (record.final_answer or "")
    prompts = [stage.renderer.codec.decode(prompt) for prompt in stage.service.prompts]
    assert "AssertionError" in prompts[1] and "good" in prompts[2], "it really ran them"
    await assert_turns(stage, record, n_segments=1)
