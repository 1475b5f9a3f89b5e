"""The scorer `http`: a reward service of the user's own, asked about one Record at a time.

    POST url    {"task_id", "question", "ground_truth", "model_answer", "messages", "record_id",
                 "stop_reason", "n_turns", "fields"}
    200         {"score": number or null, "explanation": text (optional)}

`fields` is what else the task's line held. A service that cannot be reached, is too slow, or
answers 429 or 5xx is asked again, `retries` times; every other answer is final.
"""

import asyncio
import json
import logging
from types import TracebackType
from typing import Any, Self

import aiohttp

from agentrl.databases.documents import Record, Task
from agentrl.rollout.llm.models import RewardServiceConfig
from agentrl.rollout.scorers.functions import Messages
from agentrl.rollout.scorers.results import Score

log = logging.getLogger(__name__)

_RETRY_PAUSE_S = 0.5  # doubles with every retry
_SHOWN = 200  # characters of an answer that cannot be used


class RewardServiceError(RuntimeError):
    """The reward service gave no score. The message says what it did instead."""


class _Again(Exception):
    """What may be different the next time."""


class RewardService:
    """The service and its connections; an async context manager."""

    def __init__(self, config: RewardServiceConfig | None) -> None:
        self._config = config
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        if self._config is not None:
            headers = {}
            if self._config.key is not None:
                headers["Authorization"] = f"Bearer {self._config.key}"
            timeout = aiohttp.ClientTimeout(total=self._config.timeout)
            self._session = aiohttp.ClientSession(headers=headers, timeout=timeout)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def score(self, task: Task, record: Record, messages: Messages) -> Score:
        """What the service says of a Record. Raises `RewardServiceError`."""
        if self._config is None or self._session is None:
            raise RewardServiceError(
                "scorer http has no service: give its url under http_scorer in the file of "
                "--agent_config_path, or give the tasks another scorer"
            )
        body = {
            "task_id": task.task_id,
            "question": task.query,
            "ground_truth": task.answer,
            "model_answer": record.final_answer,
            "messages": messages,
            "record_id": record.id,
            "stop_reason": record.stop_reason,
            "n_turns": record.n_turns,
            "fields": task.fields,
        }
        for attempt in range(self._config.retries + 1):
            if attempt:
                await asyncio.sleep(_RETRY_PAUSE_S * 2 ** (attempt - 1))
            try:
                return await self._ask(self._session, self._config.url, body)
            except _Again as failure:
                reason = failure
                log.warning("reward service %s: %s", self._config.url, failure)
        raise RewardServiceError(
            f"reward service {self._config.url} gave no score in {attempt + 1} tries: {reason}"
        )

    async def _ask(self, session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Score:
        try:
            async with session.post(url, json=body) as response:
                text = await response.text()
        except TimeoutError:
            raise _Again("no answer within its timeout") from None
        except aiohttp.ClientError as error:
            raise _Again(f"{type(error).__name__}: {error}") from None
        if response.status == 429 or response.status >= 500:
            raise _Again(f"status {response.status}: {text[:_SHOWN]!r}")
        if response.status != 200:
            raise RewardServiceError(
                f"reward service {url} refused the request with status {response.status}: "
                f"{text[:_SHOWN]!r}"
            )
        return _read(url, text)


def _read(url: str, text: str) -> Score:
    """The score in an answer's body. Raises `RewardServiceError`."""
    try:
        answer = json.loads(text)
    except json.JSONDecodeError:
        answer = None
    if isinstance(answer, dict) and "score" in answer:
        score, explanation = answer["score"], answer.get("explanation")
        is_number = isinstance(score, int | float) and not isinstance(score, bool)
        if (score is None or is_number) and (explanation is None or isinstance(explanation, str)):
            return Score(score, explanation)
    raise RewardServiceError(
        f'reward service {url} answered {text[:_SHOWN]!r}, not {{"score": number or null}}'
    )
