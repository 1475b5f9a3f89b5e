"""A chat model behind an OpenAI-compatible API: for an evaluation, or an agent of a program.

A request that is not answered, or is refused for now (429 and 5xx), is repeated with growing
pauses. The API renders and samples by itself, so that there are no tokens to store.
"""

import asyncio
import json
import logging
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

from agentrl.failures import Foreseen, InfrastructureFailure, Need
from agentrl.foreign_text import one_line
from agentrl.rollout.llm.client import open_client
from agentrl.rollout.llm.completion import EndpointTurn, NoTurn, read_turn
from agentrl.rollout.llm.models import AgentModel

if TYPE_CHECKING:
    from openai import APIStatusError, AsyncOpenAI

log = logging.getLogger(__name__)

Message = Mapping[str, Any]

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_FOR_NOW = frozenset({408, 409, 425, 429})  # and all from 500
_OF_CONTENT = frozenset({400, 413, 422})  # of the request itself
_OF_OPENAI = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
_CONTEXT_FULL = ("context_length", "context length", "maximum context", "too long", "max_model_len")
_SHOWN = 300
_OVERLOADED = frozenset({429, 503})
_MOST_FAILURES = 8  # of one request, in a minute, if others are answered
_ANOTHER, _OF_ANOTHER = ({"role": "user", "content": "Hello"},), 16  # a request, and its tokens


class EndpointUnreachable(InfrastructureFailure):
    """The API does not answer, refuses every request for now, or refuses us.

    `for_now`: whether it answers that it cannot serve now. `denied`: whether it refuses our key,
    our account or the model's name.
    """

    need = Need.SAMPLING
    for_now = False
    denied = False


class EndpointRefused(Foreseen, ValueError):
    """The API refuses the request itself, or never answers it with a chat completion (5xx, 429, a
    time-out, a body that is none) though it answers others. The message is one sentence."""


class ContextFull(EndpointRefused):
    """The conversation is longer than the model's context."""


class ChatEndpoint:
    """The connection to the API; an async context manager.

    `params`: sampling parameters that are sent, by their names in our flags. `patience_s`: how long
    a request is repeated.
    """

    def __init__(self, model: AgentModel, params: Mapping[str, float], patience_s: float) -> None:
        self.model = model
        self._patience_s = patience_s
        self._params = {name: value for name, value in params.items() if name in _OF_OPENAI}
        self._extra = {name: value for name, value in params.items() if name not in _OF_OPENAI}
        self._answered = 0.0  # the last time that a request was, by `time.monotonic`
        self._limit_name = "max_tokens"  # newer models of OpenAI refuse it and name another
        self._client: AsyncOpenAI | None = None

    async def __aenter__(self) -> Self:
        self._client = await open_client(self.model)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._client is not None
        await self._client.close()

    async def complete(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        max_tokens: int | None,
        *,
        model: str | None = None,
        stop: Sequence[str] = (),
        json_schema: str | None = None,
    ) -> EndpointTurn:
        """The model's next turn.

        `max_tokens`: None: as many as the API allows. `model`: another one behind the same API.
        `stop`: texts that end the answer. `json_schema`: of the answer, as JSON text. Raises
        `EndpointUnreachable` after `patience_s` seconds without an answer, or at once if our key,
        account or model's name is refused; `ContextFull`; `EndpointRefused`.
        """
        from openai import APIStatusError, OpenAIError

        name = model or self.model.model
        given: dict[str, Any] = {"model": name}
        if tools:
            given["tools"] = list(tools)
        if stop:
            given["stop"] = list(stop)
        if json_schema is not None:
            form = {"name": "answer", "schema": json.loads(json_schema)}
            given["response_format"] = {"type": "json_schema", "json_schema": form}
        began, pause_s = time.monotonic(), _FIRST_PAUSE_S
        failures = counted = 0
        while True:
            asked = time.monotonic()
            try:
                body = await self._ask(messages, max_tokens, given)
                turn = read_turn(body, time.monotonic() - asked)
                self._answered = time.monotonic()
                return turn
            except APIStatusError as error:
                if self._takes_other_limit(error):
                    continue
                if not await self._is_for_now(error, name):
                    raise self._refusal(error) from None
                failure: Exception = error
                pause_s = max(pause_s, _asked_pause(error))
            except (OpenAIError, NoTurn) as error:
                failure = error
            late = time.monotonic() - began + pause_s > self._patience_s
            failures += 1
            # An overloaded API answers others now and then: it gets the whole patience.
            counted += not _is_overload(failure)
            many = not _is_overload(failure) and counted % _MOST_FAILURES == 0
            if (late or many) and await self._answers_others(name, asked):
                raise EndpointRefused(
                    f"{self._name} answers others, but this request {failures} "
                    f"time{'s' * (failures > 1)} with {_one_line(failure)}"
                ) from None
            if late:
                raise self._unreachable(failure, name) from None
            log.info("%s: %s; asked again in %.1f s", self._name, _one_line(failure), pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def check(self, model: str | None = None) -> None:
        """Raise `EndpointUnreachable` unless the API answers a short request to the model.

        Its list of models would not tell: it is served without a valid key, or while the model is
        away. A refusal of this request alone is an answer.
        """
        from openai import APIStatusError

        name = model or self.model.model
        failure = await self._failure_of_another(name)
        refuses = isinstance(failure, APIStatusError) and failure.status_code in _OF_CONTENT
        if failure is not None and not refuses:
            raise self._unreachable(failure, name) from None

    @property
    def _name(self) -> str:
        return f"the endpoint {self.model.base_url}"

    async def _ask(
        self,
        messages: Sequence[Message],
        max_tokens: int | None,
        given: Mapping[str, Any],
    ) -> bytes:
        """The body of the answer, unread: the library reads one of any form without an error."""
        assert self._client is not None, "the endpoint is not open"
        body: dict[str, Any] = {**self._params, **given}
        if max_tokens is not None:
            body[self._limit_name] = max_tokens
        answer = await self._client.chat.completions.with_raw_response.create(
            messages=cast(Any, messages),
            extra_body=self._extra or None,
            **body,
        )
        return cast(bytes, answer.content)

    async def _answers_others(self, model: str, since: float) -> bool:
        """Whether another request is answered, or was since the time `since`."""
        return self._answered >= since or await self._failure_of_another(model) is None

    async def _failure_of_another(self, model: str) -> Exception | None:
        """Why another request, a short one, is not answered now; None if it is."""
        from openai import APIStatusError, OpenAIError

        while True:
            try:
                read_turn(await self._ask(_ANOTHER, _OF_ANOTHER, {"model": model}))
            except APIStatusError as error:
                if not self._takes_other_limit(error):
                    return error
            except (OpenAIError, NoTurn) as error:
                return error
            else:
                self._answered = time.monotonic()
                return None

    async def _is_for_now(self, error: "APIStatusError", model: str) -> bool:
        """Whether the request is repeated: the API cannot serve it now, or denies it and does not
        tell now whether it denies all. Raises `EndpointUnreachable` if it denies all."""
        from openai import APIStatusError

        if not _denies(error):
            return _says_for_now(error)
        # A moderated prompt may be denied too: what counts is whether others are.
        failure = await self._failure_of_another(model)
        if isinstance(failure, APIStatusError) and _denies(failure):
            raise self._unreachable(failure, model) from None
        return failure is not None

    def _takes_other_limit(self, error: "APIStatusError") -> bool:
        """Whether the request may be repeated with the other name of the limit."""
        if self._limit_name == "max_tokens" and "max_completion_tokens" in str(error):
            self._limit_name = "max_completion_tokens"
            return True
        return False

    def _refusal(self, error: "APIStatusError") -> EndpointRefused:
        told = _one_line(error)
        if any(words in told.lower() for words in _CONTEXT_FULL):
            return ContextFull(told)
        return EndpointRefused(f"{self._name} refuses the request: {told}")

    def _unreachable(self, error: Exception, model: str) -> EndpointUnreachable:
        from openai import APIStatusError

        unreachable = EndpointUnreachable(
            f"{self._name} gives no answer of model {model}: {_one_line(error)}",
            dependency=self._name,
            probe=partial(self.check, model),
        )
        if isinstance(error, APIStatusError):
            unreachable.for_now = _says_for_now(error)
            unreachable.denied = _denies(error)
        return unreachable


def _says_for_now(error: "APIStatusError") -> bool:
    return error.status_code in _FOR_NOW or error.status_code >= 500


def _denies(error: "APIStatusError") -> bool:
    """Whether it is of our key, our account or the model's name, as far as its status tells."""
    return not _says_for_now(error) and error.status_code not in _OF_CONTENT


def _is_overload(failure: Exception) -> bool:
    from openai import APIStatusError

    if isinstance(failure, APIStatusError):
        return failure.status_code in _OVERLOADED
    return isinstance(failure, NoTurn) and failure.status in _OVERLOADED


def _asked_pause(error: "APIStatusError") -> float:
    """The seconds that `Retry-After` asks for, a number or a date; 0 if it does not."""
    asked = error.response.headers.get("retry-after", "0")
    try:
        seconds = float(asked)
    except ValueError:
        try:
            seconds = (parsedate_to_datetime(asked) - datetime.now(UTC)).total_seconds()
        except (ValueError, TypeError):  # no date, or one without a zone
            return 0.0
    return min(seconds, _LONGEST_PAUSE_S) if seconds > 0 else 0.0


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__.lstrip('_')}: {one_line(str(error))[:_SHOWN]}"
