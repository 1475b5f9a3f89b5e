"""The agents of one turn: asked once, answered once, without tools."""

import pytest
from stage import Stage

from agentrl.databases.documents import StopReason, TurnStatus
from agentrl.rollout.agents.math import INSTRUCTION


@pytest.mark.parametrize("agent", ["single_turn", "single_turn_agent"])
async def test_a_single_turn_is_the_answer_and_needs_no_tools(stage: Stage, agent: str) -> None:
    stage.mcp_url = "http://127.0.0.1:1/mcp"  # nobody is there
    stage.lines = ["<answer>42</answer>"]
    record = await stage.attempt(agent)
    assert (record.score, record.n_turns, record.stop_reason) == (1.0, 1, StopReason.ANSWERED)
    question = [{"role": "user", "content": "How many?"}]
    assert stage.service.prompts == [stage.renderer.render_prompt(question)]
    [turn] = await stage.turns(record)
    assert turn.messages == question


async def test_a_turn_that_was_cut_off_is_no_answer(stage: Stage) -> None:
    stage.flags = ("--max_new_tokens", "3")
    stage.lines = ["<answer>42</answer> and so on"]
    record = await stage.attempt("single_turn")
    assert (record.stop_reason, record.final_answer) == (StopReason.MAX_NEW_TOKENS, None)
    assert (record.score, record.turn_statuses) == (0.0, {TurnStatus.TRUNCATED: 1})


@pytest.mark.parametrize("agent", ["single_turn", "mcp"])
async def test_a_final_answer_holds_no_control_text(stage: Stage, agent: str) -> None:
    stage.lines = ["<think>hm</think>It is <|im_start|>42."]
    record = await stage.attempt(agent, answer_schema=None)
    assert record.final_answer == "<think>hm</think>It is 42."


async def test_a_task_given_as_messages_is_asked_in_them(stage: Stage) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How many are there?"},
    ]
    stage.flags = ("--system_prompt", "Be long.")
    stage.lines = ["<answer>42</answer>"] * 4
    for agent in ("single_turn", "math", "mcp"):
        await stage.attempt(agent, messages=messages)
    tools = stage.renderer.codec.decode(stage.service.prompts[2])
    assert stage.service.prompts[:2] == [stage.renderer.render_prompt(messages)] * 2
    assert "Be brief." in tools and "Be long." not in tools
    await stage.attempt("single_turn", messages=messages[1:])
    begun = [{"role": "system", "content": "Be long."}, messages[1]]
    assert stage.service.prompts[3] == stage.renderer.render_prompt(begun)


async def test_the_math_agent_asks_for_a_box_and_reads_it(stage: Stage) -> None:
    stage.lines = [r"It is \boxed{\frac{84}{2}}.", "<answer>42</answer>"]
    boxed = await stage.attempt("math", answer_schema=None, scorer="math")
    assert (boxed.final_answer, boxed.score) == (r"\frac{84}{2}", 1.0)
    [turn] = await stage.turns(boxed)
    assert turn.messages == [{"role": "user", "content": f"How many?\n\n{INSTRUCTION}"}]
    # A task that says how it is to be answered is asked as it is.
    tagged = await stage.attempt("math", answer_schema="answer", scorer="math")
    [turn] = await stage.turns(tagged)
    assert turn.messages == [{"role": "user", "content": "How many?"}]
    assert tagged.score == 1.0


@pytest.mark.parametrize("agent", ["single_turn", "mcp"])
async def test_a_run_may_say_how_answers_are_written(stage: Stage, agent: str) -> None:
    stage.flags = ("--answer_schema", "answer")
    stage.lines = ["So <answer>42</answer>.", r"So \boxed{42}.", "<answer>42</answer>"]
    record = await stage.attempt(agent, answer_schema=None)
    assert (record.final_answer, record.score) == ("42", 1.0)
    boxed = await stage.attempt(agent, answer_schema="boxed")
    assert boxed.final_answer == "42"
    await stage.attempt(agent, answer_schema=None, system_prompt="Be brief.")
    said = [stage.renderer.codec.decode(prompt) for prompt in stage.service.prompts]
    assert "between <answer> and </answer>" in said[0]
    assert r"\boxed{...}" in said[1] and "<answer>" not in said[1]
    assert "Be brief." in said[2] and "<answer>" not in said[2]


async def test_a_tasks_own_system_prompt_takes_the_place_of_the_runs(stage: Stage) -> None:
    stage.flags = ("--system_prompt", "Be long.")
    stage.lines = ["<answer>42</answer>"] * 2
    await stage.attempt("single_turn", system_prompt="Be brief.")
    await stage.attempt("single_turn")
    said = [stage.renderer.codec.decode(prompt) for prompt in stage.service.prompts]
    assert "Be brief." in said[0] and "Be long." not in said[0]
    assert "Be long." in said[1]
