"""The scorer `http`: a reward service of the user's own, asked about one Record at a time.

    POST url    {"task_id", "question", "ground_truth", "model_answer", "messages", "record_id",
                 "stop_reason", "n_turns", "fields"}
    200         {"score": number or null, "explanation": text (optional)}

`fields` is what else the task's line held. A service that cannot be reached, is too slow, or
answers 429 or 5xx is asked again, `retries` times; every other answer is final. What it sends is
read in `reward_reply.py`.

At most `concurrency` requests are with the service at once. Others wait here: neither that nor
opening a connection counts as the service's time.
"""

import asyncio
import json
import logging
import math
from contextlib import suppress
from functools import partial
from types import SimpleNamespace, TracebackType
from typing import Any, Self

import aiohttp

from agentrl.databases.documents import Record, Task
from agentrl.failures import InfrastructureFailure
from agentrl.redaction import without_passwords
from agentrl.rollout.llm.models import RewardServiceConfig
from agentrl.rollout.scorers.functions import Messages
from agentrl.rollout.scorers.results import Score
from agentrl.rollout.scorers.reward_reply import BadReply, beginning, read_body, read_score

log = logging.getLogger(__name__)

_RETRY_PAUSE_S = 0.5  # doubles with every retry
_SHOWN = 200  # characters shown of an error below HTTP


class RewardServiceError(RuntimeError):
    """The reward service gave no valid score. The message says what it did instead."""


class RewardServiceUnreachable(InfrastructureFailure):
    """The reward service did not answer, or answered 429 or 5xx. The message has the error."""

    probe_repeats = True

    def __init__(self, url: str, reason: str) -> None:
        service = f"the reward service {without_passwords(url)}"
        super().__init__(f"{service} gave no score {reason}", dependency=service)


class _Again(Exception):
    """A failure that is worth a retry."""


class _NotConnected(_Again, ConnectionError):
    """No connection: other requests would fail too."""


class RewardService:
    """The service and its connections; an async context manager."""

    def __init__(self, config: RewardServiceConfig | None) -> None:
        self._config = config
        self._session: aiohttp.ClientSession | None = None
        self._places = asyncio.Semaphore(0 if config is None else config.concurrency)

    async def __aenter__(self) -> Self:
        if self._config is not None:
            # `read_body` unpacks with a limit, so the library must not unpack.
            headers = {"Accept-Encoding": "identity"}
            if self._config.key is not None:
                headers["Authorization"] = f"Bearer {self._config.key}"
            tracing = aiohttp.TraceConfig()
            tracing.on_connection_create_end.append(_connected)
            tracing.on_connection_reuseconn.append(_connected)
            self._session = aiohttp.ClientSession(
                headers=headers,
                auto_decompress=False,
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._config.timeout),
                trace_configs=[tracing],
            )
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
        """The service's score of a Record.

        Raises `RewardServiceError` for an unusable answer, and `RewardServiceUnreachable` after all
        retries.
        """
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
        request = json.dumps(_as_json(body), default=str, allow_nan=False).encode()
        for attempt in range(self._config.retries + 1):
            if attempt:
                await asyncio.sleep(_RETRY_PAUSE_S * 2 ** (attempt - 1))
            try:
                async with self._places:
                    return await self._ask(self._session, self._config, request)
            except _Again as failure:
                reason = failure
                log.warning("reward service %s: %s", without_passwords(self._config.url), failure)
        outage = RewardServiceUnreachable(self._config.url, f"in {attempt + 1} tries: {reason}")
        outage.probe = partial(self._check, self._session, self._config, request)
        raise outage

    async def _check(
        self, session: aiohttp.ClientSession, config: RewardServiceConfig, request: bytes
    ) -> None:
        """Repeat a request; returns if the service answers it, else raises the error."""
        with suppress(RewardServiceError):  # an unusable answer is an answer
            await self._ask(session, config, request)

    async def _ask(
        self, session: aiohttp.ClientSession, config: RewardServiceConfig, request: bytes
    ) -> Score:
        url = without_passwords(config.url)
        try:
            async with (
                asyncio.timeout(None) as answering,
                session.post(
                    config.url,
                    data=request,
                    headers={"Content-Type": "application/json"},
                    allow_redirects=False,  # a POST would become a GET, with the token
                    trace_request_ctx=_Deadline(answering, config.timeout),
                ) as response,
            ):
                body = await read_body(response)
        except TimeoutError:
            raise _Again(f"no answer within its timeout of {config.timeout:g} s") from None
        except aiohttp.ClientResponseError as error:
            raise RewardServiceError(
                f"reward service {url} answered what is no HTTP: {_one_line(error.message)}"
            ) from None
        except aiohttp.ClientConnectorError as error:
            raise _NotConnected(f"{type(error).__name__}: {_one_line(str(error))}") from None
        except aiohttp.ClientError as error:
            raise _Again(f"{type(error).__name__}: {_one_line(str(error))}") from None
        except BadReply as fault:
            raise RewardServiceError(f"reward service {url} {fault}") from None
        if response.status == 429 or response.status >= 500:
            raise _Again(f"status {response.status}: {beginning(body)}")
        if 300 <= response.status < 400:
            raise RewardServiceError(
                f"reward service {url} redirects to {response.headers.get('Location', 'nowhere')}: "
                "give that address as the url of http_scorer"
            )
        if response.status != 200:
            raise RewardServiceError(
                f"reward service {url} refused the request with status {response.status}: "
                f"{beginning(body)}"
            )
        try:
            return read_score(body)
        except BadReply as fault:
            raise RewardServiceError(f"reward service {url} {fault}") from None


class _Deadline:
    """The deadline of an answer: its time begins when the connection is open."""

    def __init__(self, answering: asyncio.Timeout, timeout_s: float) -> None:
        self._answering = answering
        self._timeout_s = timeout_s

    def begin(self) -> None:
        self._answering.reschedule(asyncio.get_running_loop().time() + self._timeout_s)


def _one_line(message: str) -> str:
    return without_passwords(" ".join(message.split()))[:_SHOWN]


async def _connected(session: aiohttp.ClientSession, trace: SimpleNamespace, _: Any) -> None:
    trace.trace_request_ctx.begin()


def _as_json(value: Any) -> Any:
    """A value with keys as text, and null for NaN and infinities, which JSON lacks."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): _as_json(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(each) for each in value]
    return value
