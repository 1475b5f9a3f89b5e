"""Agents in frameworks that others wrote, unmodified, under the agent `program`.

Each asks for two items at once, then for the stock, then answers. What they send as the history is
recognised, so that all turns are one line of tokens; smolagents' calls, which it writes into the
prompt in words of its own, begin segments.
"""

import os
from itertools import chain
from pathlib import Path

import pytest
from stage import Stage, tool_call

from agentrl.rollout.groups.row_building import build_row

PYTHON = os.environ["FRAMEWORKS_PYTHON"]
PROGRAM = Path(__file__).with_name("program.py")
CHATS = (
    "langgraph", "langgraph_streaming", "openai_agents", "openai_agents_streaming", "pydantic_ai",
    "pydantic_ai_anthropic", "litellm", "litellm_anthropic",
)  # fmt: skip


async def assert_trained(stage: Stage, framework: str, n_segments: int = 1) -> None:
    stage.flags = (
        "--agent_name", "program", "--agent_command", f"{PYTHON} {PROGRAM} {framework}",
        "--max_tokens", "60000", "--max_new_tokens", "2000", "--record_timeout", "120",
    )  # fmt: skip
    record = await stage.attempt("program")
    assert (record.final_answer, record.score) == ("42", 1.0)
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
