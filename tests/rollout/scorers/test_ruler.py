"""A model ranks the attempts of a group, behind a real OpenAI-compatible HTTP server."""

import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from chat_endpoint import ChatEndpoint
from scoring import make_record, make_task, make_turn

from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import GroupScore, Record
from agentrl.databases.records import RecordLedger
from agentrl.rollout.llm.client import ModelsUnreachable
from agentrl.rollout.llm.models import AgentModel, AgentModels
from agentrl.rollout.scorers import Score, Scorers
from agentrl.rollout.scorers.ruler import SHOWN_CHARACTERS, RulerError, material, scores_reader


async def attempts(database: RunDatabase, *outputs: str) -> list[Record]:
    """Records that each said one of these."""
    records = [make_record(rollout=rollout) for rollout in range(len(outputs))]
    for record, output in zip(records, outputs, strict=True):
        turn = make_turn(record, 0, "Which bin?", output)
        await database.turns.insert_one(turn.to_mongo())
    return records


Rank = Callable[..., Awaitable[list[GroupScore]]]


@pytest.fixture
def rank(endpoint: ChatEndpoint, records: RecordLedger) -> Rank:
    """What models of these names make of a group."""

    async def ask(group: Sequence[Record], *names: str) -> list[GroupScore]:
        models = tuple(
            AgentModel(model=name, base_url=endpoint.url, api_key="key", retries=1)
            for name in names or ("a",)
        )
        async with Scorers(AgentModels(ruler_agent=models), records) as scorers:
            return await scorers.score_group(make_task("ruler", answer=None), group)

    return ask


def reply(*scores: float, first: str = "Some thoughts {about} it. ") -> str:
    entries = [
        {"id": str(number), "explanation": f"attempt {number}", "score": score}
        for number, score in enumerate(scores, start=1)
    ]
    return first + json.dumps({"scores": entries})


async def test_scores_are_matched_by_id_and_explanations_kept(
    endpoint: ChatEndpoint, database: RunDatabase, rank: Rank
) -> None:
    records = await attempts(database, "B7", "It is in B7", "no idea")
    endpoint.replies = {"a": [reply(0.9, 0.5, 0.1)]}
    said = {of.record: of for of in await rank(records)}
    (request,) = endpoint.requests
    shown = json.loads(request["messages"][-1]["content"])
    assert shown["all attempts begin with"] == [{"role": "user", "content": "Which bin?"}]
    contents = [attempt["goes on with"][0]["content"] for attempt in shown["attempts"]]
    assert sorted(contents) == ["B7", "It is in B7", "no idea"]
    for record, output in zip(records, ["B7", "It is in B7", "no idea"], strict=True):
        place = contents.index(output)
        assert said[record.id].score == [0.9, 0.5, 0.1][place]
        assert said[record.id].explanation == f"attempt {place + 1}"


async def test_attempts_that_are_the_same_are_shown_once_and_score_the_same(
    endpoint: ChatEndpoint, database: RunDatabase, rank: Rank
) -> None:
    records = await attempts(database, "B7", "C1", "B7")
    endpoint.replies = {"a": [reply(0.8, 0.2)]}
    first, other, second = await rank(records)
    assert first.score == second.score != other.score


async def test_a_reply_that_misses_an_attempt_is_asked_for_again_and_then_the_next_model(
    endpoint: ChatEndpoint, database: RunDatabase, rank: Rank
) -> None:
    records = await attempts(database, "B7", "C1")
    endpoint.replies = {"a": [reply(0.5), "no JSON"], "b": [reply(1, 0)]}
    said = await rank(records, "a", "b")
    assert sorted(of.score for of in said if of.score is not None) == [0.0, 1.0]
    assert [request["model"] for request in endpoint.requests] == ["a", "a", "b"]


async def test_a_group_that_no_model_ranks_is_an_error_that_says_what_each_did(
    endpoint: ChatEndpoint, database: RunDatabase, rank: Rank, scorers: Scorers
) -> None:
    records = await attempts(database, "B7", "C1")
    endpoint.replies = {"a": [400]}
    with pytest.raises(RulerError, match="no model ranked the group: a at http"):
        await rank(records)
    endpoint.replies = {"a": [401]}
    with pytest.raises(ModelsUnreachable, match="the ranking model is out of reach: a at http"):
        await rank(records)
    with pytest.raises(RulerError, match="list some under ruler_agent or scorer_agent"):
        await scorers.score_group(make_task("ruler"), records)


async def test_an_attempt_alone_has_nothing_to_be_compared_with(
    endpoint: ChatEndpoint, database: RunDatabase, rank: Rank
) -> None:
    (said,) = await rank(await attempts(database, "B7"))
    assert (said.score, said.explanation) == (None, "nothing to compare with")
    assert endpoint.requests == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '{"scores": 3}',
        '{"scores": [3]}',
        reply(0.5),
        reply(0.5, 0.5, 0.5),
        reply(0.5, 1.5),
        reply(0.5, float("nan")),
        '{"scores": [{"id": "1", "score": 1}, {"id": "1", "score": 0}]}',
        '{"scores": [{"id": "1", "score": 1}, {"id": "2", "score": "good"}]}',
        '{"scores": [{"id": "1", "score": 1}, {"id": "2", "score": true}]}',
    ],
)
def test_only_a_score_from_0_to_1_for_each_attempt_will_do(text: str) -> None:
    assert scores_reader(["1", "2"])(text) is None


def test_the_last_scores_of_a_reply_count_and_ids_may_be_numbers() -> None:
    text = reply(0, 0) + ' or rather {"scores": [{"id": 2, "score": 1}, {"id": 1, "score": 0.5}]}.'
    assert scores_reader(["1", "2"])(text) == {"1": Score(0.5, ""), "2": Score(1.0, "")}


def test_long_messages_are_shown_in_part_and_say_so() -> None:
    long: dict[str, Any] = {"role": "tool", "content": "x" * (SHOWN_CHARACTERS + 5)}
    end = {"role": "assistant", "content": "done"}
    shown = json.loads(material({"1": [long, end], "2": [long]}))
    assert "[... 5 characters left out ...]" in shown["all attempts begin with"][0]["content"]
    assert shown["attempts"][0]["goes on with"] == [end]
    assert shown["attempts"][1]["goes on with"] == []
