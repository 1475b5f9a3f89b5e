"""The scorer `http` against a real HTTP server."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from scoring import make_record, make_task, make_turn
from serving import serving

from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import Record, StopReason
from agentrl.databases.records import RecordLedger
from agentrl.rollout.llm.models import AgentModels, RewardServiceConfig
from agentrl.rollout.scorers import Scorers, reward_service
from agentrl.rollout.scorers.reward_service import RewardServiceError, RewardServiceUnreachable


@dataclass
class Service:
    """A reward service that answers with `answers`, in order: a body, a status, or not at all."""

    url: str = ""
    answers: list[Any] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[str | None] = field(default_factory=list)
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    async def score(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        self.tokens.append(request.headers.get("Authorization"))
        answer = self.answers.pop(0)
        if answer is None:
            await self.gone.wait()
        if isinstance(answer, int):
            return web.Response(status=answer, text="no")
        return web.Response(text=answer)


@pytest.fixture
async def service(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Service]:
    monkeypatch.setattr(reward_service, "_RETRY_PAUSE_S", 0.01)
    service = Service()
    async with serving("/reward", service.score) as url:
        service.url = url
        yield service
        service.gone.set()


async def ask(
    service: Service, records: RecordLedger, record: Record | None = None, **config: Any
) -> Record:
    settings = RewardServiceConfig(url=service.url, **config)
    task = make_task("http", query="How many?", answer=None, fields={"level": 3})
    async with Scorers(AgentModels(http_scorer=settings), records) as scorers:
        return await scorers.score(task, record or make_record())


async def test_the_service_is_told_task_answer_and_conversation(
    service: Service, records: RecordLedger, database: RunDatabase
) -> None:
    service.answers = ['{"score": 0.25, "explanation": "nearly"}']
    record = make_record(None, n_turns=1, stop_reason=StopReason.MAX_TURNS)
    await database.turns.insert_one(make_turn(record, 0, "How many?", "Let me see").to_mongo())
    scored = await ask(service, records, record, token="secret")
    assert (scored.score, scored.scores) == (0.25, {"http": 0.25})
    assert scored.explanations == {"http": "nearly"}
    assert service.requests == [
        {
            "task_id": "a", "question": "How many?", "ground_truth": None, "model_answer": None,
            "messages": [
                {"role": "user", "content": "How many?"},
                {"role": "assistant", "content": "Let me see"},
            ],
            "record_id": record.id, "stop_reason": "max_turns", "n_turns": 1,
            "fields": {"level": 3},
        }
    ]  # fmt: skip
    assert service.tokens == ["Bearer secret"]


async def test_a_service_may_leave_a_record_without_a_score(
    service: Service, records: RecordLedger
) -> None:
    service.answers = ['{"score": null}']
    scored = await ask(service, records)
    assert (scored.score, scored.scores) == (None, {"http": None})


async def test_a_busy_or_slow_service_is_asked_again(
    service: Service, records: RecordLedger
) -> None:
    service.answers = [503, None, 429, '{"score": 1}']
    scored = await ask(service, records, retries=3, timeout=0.5)
    assert scored.score == 1.0
    assert len(service.requests) == 4


async def test_an_error_says_what_the_service_did(service: Service, records: RecordLedger) -> None:
    service.answers = [500, 500]
    with pytest.raises(RewardServiceUnreachable, match="no score in 2 tries: status 500: 'no'"):
        await ask(service, records, retries=1)
    service.answers = [401]
    with pytest.raises(RewardServiceError, match="refused the request with status 401"):
        await ask(service, records)
    service.url = "http://127.0.0.1:9/reward"
    with pytest.raises(RewardServiceUnreachable, match="in 1 tries: ClientConnectorError"):
        await ask(service, records, retries=0)


@pytest.mark.parametrize(
    "answer", ["1.0", "nonsense", '{"reward": 1}', '{"score": "1"}', '{"score": true}', "[]"]
)
async def test_an_answer_that_is_no_score_is_an_error(
    service: Service, records: RecordLedger, answer: str
) -> None:
    service.answers = [answer]
    with pytest.raises(RewardServiceError, match=r'not \{"score": number or null\}'):
        await ask(service, records)


async def test_without_a_service_the_error_says_where_to_name_one(scorers: Scorers) -> None:
    with pytest.raises(RewardServiceError, match="its url under http_scorer"):
        await scorers.score(make_task("http"), make_record())
