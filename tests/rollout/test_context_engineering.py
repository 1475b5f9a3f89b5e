"""Conversations that are rewritten: real MCP server, real MongoDB, a scripted model over real HTTP.

In every one of them, what is stored must give back each prompt that the model was asked with, token
for token.
"""

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from chat_endpoint import ChatEndpoint, chat_endpoint
from scripted_service import END, ScriptedService, Talk, stored_turns, tool_call

from agentrl.configs import ConfigError, parse_config
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import DispatchedSamplingTask, Record, StopReason, TurnStatus
from agentrl.rollout.agents.context_strategies import DISCARDED, SUMMARY_REQUEST, TAKEN_OUT
from agentrl.rollout.demonstrations.of_record import conversations
from agentrl.rollout.groups.row_building import build_row, replay
from agentrl.rollout.llm import client as llm_client

TALK = " ".join(map(str, range(200)))  # never the same, and longer than a turn may be
ANSWER = f"<answer>42</answer>{END}"
ROOM = ["--max_tokens", "6000", "--max_prompt_tokens"]  # the prompt with the tools is 121 tokens


LIMITS = (StopReason.MAX_PROMPT_TOKENS, StopReason.MAX_TOKENS, StopReason.MAX_TURNS)


def ask(name: str, arguments: str = "{}") -> str:
    return tool_call(name, arguments) + END


def big(n: int) -> str:
    return ask("big", f'{{"n": {n}}}')


def texts(service: ScriptedService) -> list[str]:
    """The prompts that the model was asked with, as text."""
    renderer = service.renderer
    return [renderer.codec.decode(request["input_ids"]) for request in service.requests]


async def check_tokens(
    database: RunDatabase, record: Record, service: ScriptedService
) -> list[DispatchedSamplingTask]:
    """Each stored turn's prompt is the one that was asked; the row trains each output once."""
    turns = await stored_turns(database, record)
    context = replay(turns)
    ends = [
        (turn, context.line(number)["ids"].tolist(), end)
        for number, segment in enumerate(context.segments)
        for turn, end in segment.turn_ends
    ]  # fmt: skip
    assert [turn for turn, _, _ in ends] == list(range(len(service.requests)))
    for (_, ids, end), document, request in zip(ends, turns, service.requests, strict=True):
        start = end - len(document.output_ids) // 4
        assert ids[:start] == request["input_ids"]
        assert document.prompt_len == start
    row = build_row(record.model_copy(update={"score": 1.0}), turns, 1.0, 1.0, 0)
    assert row.n_train_tokens == sum(len(turn.output_ids) // 4 for turn in turns)
    # A record that ends at a limit may have been prepared for a turn that was not made.
    unmade = record.n_continuations - (len(turns) - 1)
    assert unmade == 0 or (unmade == 1 and record.stop_reason in LIMITS)
    assert record.n_drifts == 0
    if not unmade:
        assert (record.n_segments, record.tokens) == (len(context.segments), context.counts)
    assert sum(record.turn_statuses.values()) == len(turns)
    await check_messages(database, record, turns, service)
    return turns


async def check_messages(
    database: RunDatabase,
    record: Record,
    turns: Sequence[DispatchedSamplingTask],
    service: ScriptedService,
) -> None:
    """The conversations told as messages are those that the model was asked with, and each turn is
    trained once."""
    stored = await database.tool_lists.find_one({"_id": record.tool_list})
    assert stored is not None
    tools = json.loads(stored["schemas"])
    for number, request in enumerate(service.requests, start=1):
        told = conversations(turns[:number], service.renderer, tools)[-1]
        asked = [{k: v for k, v in message.items() if k != "train"} for message in told.messages]
        written = service.renderer.render_prompt(asked[:-1], tools)
        # The template writes a line end before a call that the model may leave out.
        texts = [service.renderer.codec.decode(ids) for ids in (written, request["input_ids"])]
        assert "".join(texts[0].split()) == "".join(texts[1].split())
    completed = sum(turn.status == TurnStatus.COMPLETED for turn in turns)
    every = conversations(turns, service.renderer, tools)
    assert len(every) == 1 + sum(turn.rewrite is not None for turn in turns)
    trained = [
        message.get("train") is not False
        for told in every
        for message in told.messages
        if message["role"] == "assistant"
    ]
    assert sum(trained) == completed


async def test_earlier_results_make_room_and_the_last_ones_stay(
    talk: Talk, service: ScriptedService, database: RunDatabase
) -> None:
    flags = [*ROOM, "1000", "--new_context", "discard_all_tools"]
    async with talk(big(300), big(301), big(302), big(303), ANSWER, flags=flags) as (sampler, _):
        record = await sampler.run()
    turns = await check_tokens(database, record, service)
    assert (record.stop_reason, record.final_answer) == (StopReason.ANSWERED, "42")
    assert [turn.segment for turn in turns] == [0, 0, 0, 1, 2]
    assert [turn.rewrite for turn in turns] == [None] * 3 + ["discard_all_tools"] * 2
    prompts = texts(service)
    assert prompts[3].count(DISCARDED) == 2
    assert prompts[3].count("x" * 300) == 1 and "x" * 302 in prompts[3]
    assert prompts[4].count(DISCARDED) == 3 and "x" * 303 in prompts[4]
    for call in (big(300), big(301), big(302), big(303)):
        assert call in prompts[4]  # the model's own turns are all there
    # All that stands before the first result is shared, the first turn included.
    assert [turn.shared_len for turn in turns][3] > turns[0].prompt_len + len(
        turns[0].output_ids
    ) // 4
    assert turns[3].messages == [{"role": "tool", "content": "x" * 302}]


async def test_the_model_sums_up_and_goes_on_with_question_summary_and_last_turn(
    talk: Talk, service: ScriptedService, database: RunDatabase
) -> None:
    flags = [*ROOM, "1500", "--new_context", "discard_all"]
    summary = "<think>what was it?</think>I saw many x. Next: count them."
    script = (big(300), big(400), big(450), summary + END, ANSWER)
    async with talk(*script, flags=flags) as (sampler, _):
        record = await sampler.run()
    turns = await check_tokens(database, record, service)
    assert (record.stop_reason, record.final_answer) == (StopReason.ANSWERED, "42")
    assert [turn.segment for turn in turns] == [0, 0, 0, 1, 2]
    assert [turn.rewrite for turn in turns] == [None, None, None, "summary", "discard_all"]
    prompts = texts(service)
    # The summary is asked for with all but the last turn in view...
    assert SUMMARY_REQUEST in prompts[3] and "x" * 400 in prompts[3]
    assert big(450) not in prompts[3]
    assert len(service.requests[3]["input_ids"]) <= 1500
    assert turns[3].shared_len > turns[2].prompt_len - 20  # all but the next header
    # ...and the last turn and its result follow it.
    assert prompts[4].count("How many?") == 1
    assert "I saw many x. Next: count them." in prompts[4] and "what was it" not in prompts[4]
    assert big(450) in prompts[4] and "x" * 450 in prompts[4]
    assert "x" * 400 not in prompts[4].replace("x" * 450, "") and big(300) not in prompts[4]
    assert record.turn_statuses == {"completed": 5}


async def test_a_second_summary_takes_the_place_of_the_first(
    talk: Talk, service: ScriptedService, database: RunDatabase
) -> None:
    flags = [*ROOM, "1200", "--new_context", "discard_all"]
    script = (big(400), big(500), f"First.{END}", big(501), f"Second.{END}", ANSWER)
    async with talk(*script, flags=flags) as (sampler, _):
        record = await sampler.run()
    turns = await check_tokens(database, record, service)
    assert [turn.rewrite for turn in turns] == [
        None, None, "summary", "discard_all", "summary", "discard_all",
    ]  # fmt: skip
    last = texts(service)[-1]
    assert "Second." in last and "First." not in last and last.count("How many?") == 1
    assert record.stop_reason == StopReason.ANSWERED


@pytest.mark.parametrize("mode", ["disabled", "discard_all_tools", "discard_all"])
async def test_where_no_room_can_be_made_the_record_ends(
    talk: Talk, service: ScriptedService, database: RunDatabase, mode: str
) -> None:
    flags = [*ROOM, "700", "--new_context", mode]
    async with talk(big(900), flags=flags) as (sampler, _):  # no second turn could follow
        record = await sampler.run()
    await check_tokens(database, record, service)
    assert (record.stop_reason, record.n_turns) == (StopReason.MAX_PROMPT_TOKENS, 1)


async def test_a_result_that_is_too_long_beside_the_summary_ends_the_record(
    talk: Talk, service: ScriptedService, database: RunDatabase
) -> None:
    flags = [*ROOM, "700", "--new_context", "discard_all"]
    async with talk(big(50), big(900), f"Noted.{END}", flags=flags) as (sampler, _):
        record = await sampler.run()
    turns = await check_tokens(database, record, service)
    assert record.stop_reason == StopReason.MAX_PROMPT_TOKENS
    assert [turn.rewrite for turn in turns] == [None, None, "summary"]


@pytest.mark.parametrize(
    ("said", "status", "reason"),
    [
        (f"<think>hm</think>{END}", TurnStatus.FORMAT_ERROR, StopReason.MAX_PROMPT_TOKENS),
        (big(9), TurnStatus.FORMAT_ERROR, StopReason.MAX_PROMPT_TOKENS),
        (TALK, TurnStatus.TRUNCATED, StopReason.MAX_NEW_TOKENS),
    ],
    ids=["empty", "call", "cut off"],
)
async def test_without_a_summary_the_record_ends(
    talk: Talk, service: ScriptedService, database: RunDatabase, said: str,
    status: TurnStatus, reason: StopReason,
) -> None:  # fmt: skip
    flags = [*ROOM, "1200", "--new_context", "discard_all", "--max_new_tokens", "100"]
    async with talk(big(400), big(500), said, flags=flags) as (sampler, _):
        record = await sampler.run()
    turns = await check_tokens(database, record, service)
    assert (record.stop_reason, turns[-1].status) == (reason, status)


async def test_turns_for_rewriting_count_against_the_limit_of_turns(
    talk: Talk, service: ScriptedService, database: RunDatabase
) -> None:
    flags = [*ROOM, "1200", "--new_context", "discard_all", "--max_turns", "3"]
    async with talk(big(400), big(500), f"Noted.{END}", flags=flags) as (sampler, _):
        record = await sampler.run()
    await check_tokens(database, record, service)
    assert (record.stop_reason, record.n_turns) == (StopReason.MAX_TURNS, 3)


async def test_rewriting_over_and_over_ends_with_the_tokens_of_a_trajectory(
    talk: Talk, service: ScriptedService, database: RunDatabase
) -> None:
    flags = ["--max_tokens", "4000", "--max_prompt_tokens", "900", "--new_context",
             "discard_all_tools"]  # fmt: skip
    async with talk(*[big(400)] * 99, flags=flags) as (sampler, resources):
        record = await sampler.run()
        limit = resources.config.sampling.max_prompt_tokens
    await check_tokens(database, record, service)
    assert record.stop_reason in (StopReason.MAX_TOKENS, StopReason.MAX_PROMPT_TOKENS)
    assert record.n_segments > 2
    assert all(len(request["input_ids"]) <= limit for request in service.requests)


async def test_what_was_discarded_may_be_asked_again(
    talk: Talk, service: ScriptedService, database: RunDatabase
) -> None:
    flags = [*ROOM, "1000", "--new_context", "discard_all_tools"]
    said = (big(300), big(301), big(302), big(300), big(100), big(100), ANSWER)
    async with talk(*said, flags=flags) as (sampler, _):
        record = await sampler.run()
    turns = await check_tokens(database, record, service)
    assert turns[3].rewrite == "discard_all_tools"
    assert [turn.status for turn in turns].index("repeaterror") == 5


async def test_turns_that_repeat_others_are_marked_and_end_the_record(
    talk: Talk, service: ScriptedService, database: RunDatabase
) -> None:
    same, other = ask("echo", '{"text": "a"}'), ask("echo", '{"text": "b"}')
    changing = ask("tally")  # the same call, another result
    script = (same, changing, changing, other, f"Again: {same}", same + "never said")
    async with talk(*script, flags=["--repeated_turns_limit", "2"]) as (sampler, _):
        service.script[-1] = same
        record = await sampler.run()
    turns = await check_tokens(database, record, service)
    assert (record.stop_reason, record.final_answer) == (StopReason.REPETITION, None)
    assert [turn.status for turn in turns] == ["completed"] * 4 + ["repeaterror"] * 2
    assert record.turn_statuses == {"completed": 4, "repeaterror": 2}


async def test_a_text_that_was_said_so_many_times_ends_the_record_whatever_its_calls_give(
    talk: Talk, service: ScriptedService, database: RunDatabase
) -> None:
    changing, other = ask("tally"), ask("echo", '{"text": "b"}')  # the same call, another result
    script = (changing, other, changing, f"Again: {other}", changing, ANSWER)
    async with talk(*script, flags=["--repetition_early_stop_times", "3"]) as (sampler, _):
        record = await sampler.run()
    turns = await check_tokens(database, record, service)
    assert (record.stop_reason, len(turns)) == (StopReason.REPETITION, 5)


async def test_a_record_that_says_the_same_again_goes_on_in_a_new_context(
    talk: Talk, service: ScriptedService, database: RunDatabase
) -> None:
    flags = [
        "--repetition_early_stop_times", "2", "--enable_repetition_compress", "true",
        "--new_context", "discard_all_tools", *ROOM, "5000",
    ]  # fmt: skip
    big_results = (big(300), big(300), big(300), big(300), ANSWER)
    async with talk(*big_results, flags=flags) as (sampler, _):
        record = await sampler.run()
    turns = await check_tokens(database, record, service)
    # The second of a pair begins a new context, in which the text counts anew.
    assert [turn.rewrite for turn in turns] == [
        None, None, "discard_all_tools", None, "discard_all_tools",
    ]  # fmt: skip
    assert record.stop_reason == StopReason.ANSWERED


async def test_a_repeated_turn_is_taken_out_and_the_model_told(
    talk: Talk, service: ScriptedService, database: RunDatabase
) -> None:
    same, other = ask("echo", '{"text": "a"}'), ask("echo", '{"text": "b"}')
    script = (same, other, f"Once more: {same}", f"And again: {same}", ANSWER)
    async with talk(*script, flags=["--remove_repeated_turns", "true"]) as (sampler, _):
        record = await sampler.run()
    turns = await check_tokens(database, record, service)
    assert [turn.segment for turn in turns] == [0, 0, 0, 1, 2]
    assert [turn.rewrite for turn in turns] == [None] * 3 + ["repetition"] * 2
    assert [turn.status for turn in turns] == [
        "completed", "completed", "repeaterror", "repeaterror", "completed",
    ]  # fmt: skip
    last = texts(service)[-1]
    assert "Once more" not in last and "And again" not in last
    assert last.count(TAKEN_OUT) == 2  # so that no prompt is asked twice
    assert turns[3].shared_len > turns[2].prompt_len - 40
    assert (record.stop_reason, record.n_segments) == (StopReason.ANSWERED, 3)


@pytest.mark.parametrize(
    ("said", "statuses"),
    [
        ([ask("fail", '{"reason": "no"}'), ANSWER], ["toolfailed", "completed"]),
        ([tool_call("echo", "{") + END, ANSWER], ["formaterror", "completed"]),
        ([ask("no_such_tool"), ANSWER], ["formaterror", "completed"]),
        ([tool_call("echo", "{") + ask("fail", '{"reason": "no"}')], ["formaterror"]),
        ([ask("hang", '{"seconds": 9}'), ANSWER], ["toolfailed", "completed"]),
        ([TALK], ["truncated"]),
        (["round and " * 100 + END], ["repeaterror"]),
        (["round and " * 19 + END], ["repeaterror"]),
    ],
    ids=["tool fails", "unreadable", "no such tool", "worst counts", "time-out", "cut off",
         "cut off in a loop", "loop"],
)  # fmt: skip
async def test_what_became_of_each_turn_is_its_status(
    talk: Talk, database: RunDatabase, said: Sequence[str], statuses: list[str]
) -> None:
    flags = ["--max_new_tokens", "200", "--max_turns", str(len(said))]
    async with talk(*said, flags=flags) as (sampler, _):
        record = await sampler.run()
    turns = await stored_turns(database, record)
    assert [turn.status for turn in turns] == statuses
    assert record.turn_statuses == {status: statuses.count(status) for status in set(statuses)}


@pytest.fixture
async def browse_endpoint(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ChatEndpoint]:
    monkeypatch.setattr(llm_client, "_RETRY_PAUSE_S", 0.01)
    async with chat_endpoint() as endpoint:
        yield endpoint


async def test_a_long_result_is_read_by_the_browse_agent_and_kept_whole(
    talk: Talk, service: ScriptedService, database: RunDatabase, browse_endpoint: ChatEndpoint,
    tmp_path: Any,
) -> None:  # fmt: skip
    (tmp_path / "agents.yml").write_text(
        f"browse_agent: [{{model: a, base_url: '{browse_endpoint.url}', retries: 0}}, "
        f"{{model: b, base_url: '{browse_endpoint.url}', retries: 0}}]"
    )
    browse_endpoint.replies = {"a": [500, 400, "One x."], "b": ["Many x.", 400]}
    flags = ["--agent_config_path", str(tmp_path / "agents.yml"), "--browse_min_chars", "300",
             "--max_tool_result_chars", "350", "--max_tokens", "4000"]  # fmt: skip
    # summarised by the second model, too short, by nobody, summarised again
    script = (big(400), big(300), big(360), big(400), ANSWER)
    async with talk(*script, flags=flags) as (sampler, _):
        record = await sampler.run()
    turns = await check_tokens(database, record, service)
    calls = [turn.tool_calls[0] for turn in turns[:4]]
    assert [call.summarised_by for call in calls] == ["b", None, None, "a"]
    assert [call.result for call in calls[:2]] == ["Many x.", "x" * 300]
    assert calls[2].result is not None and calls[2].result.startswith("x" * 300)
    assert turns[1].messages == [{"role": "tool", "content": "Many x."}]
    assert "How many?" in browse_endpoint.requests[1]["messages"][-1]["content"]
    assert browse_endpoint.requests[1]["messages"][-1]["content"].endswith("x" * 400)
    kept = await database.tool_results.find_one({"_id": calls[0].kept})
    assert kept is not None and kept["text"] == "x" * 400
    assert calls[1].kept is None
    # The same result in other words is the same result.
    assert [turn.status for turn in turns] == ["completed"] * 3 + ["repeaterror", "completed"]


def test_a_rewriting_that_could_never_happen_is_refused() -> None:
    for flags in ([], ["--max_prompt_tokens", "900", "--max_tokens", "900"]):
        with pytest.raises(ConfigError, match="--new_context discard_all: needs"):
            parse_config(["--new_context", "discard_all", *flags])
