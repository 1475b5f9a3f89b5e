"""Asking the models that help an agent: in order, each with its retries, until a reply will do.

What is asked, and which reply will do, is the caller's: judges (`agentcpm`) want a verdict, the
browse agent a summary. The models are those of `--agent_config_path`. Nothing that they write is
ever trained.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Generic, Self, TypeVar

from agentrl.failures import InfrastructureFailure
from agentrl.limited_httpx import UNPACKED, limit_answer, tls_context
from agentrl.rollout.llm.completion import NoTurn, read_turn
from agentrl.rollout.llm.models import AgentModel

if TYPE_CHECKING:
    from openai import AsyncOpenAI

log = logging.getLogger(__name__)

T = TypeVar("T")

_RETRY_PAUSE_S = 0.5  # of a model without `retry_delay`; grows with every retry
_SHOWN = 120  # characters shown of an unusable reply
_REFUSED = frozenset({400, 413, 422})  # the content of the request is refused
_HOPELESS = frozenset({401, 403, 404}) | _REFUSED  # retrying would give the same answer


class NoModelAnswered(RuntimeError):
    """No model gave a usable reply. The message says what each of them did."""


class ModelsUnreachable(InfrastructureFailure):
    """No model replied at all. The message lists the errors."""

    probe_repeats = True


@dataclass(frozen=True, slots=True)
class LLMReply(Generic[T]):
    """The value read from the first usable reply, and the model that gave it."""

    value: T
    model: str


async def open_client(model: AgentModel) -> "AsyncOpenAI":
    """The connection to a model. Its caller retries and logs, so the library does not retry."""
    # Imported here: the import takes a second, and few runs need it.
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient

    return AsyncOpenAI(
        base_url=model.base_url,
        api_key=model.key,
        timeout=model.timeout,
        max_retries=0,
        default_headers=UNPACKED,
        http_client=DefaultAsyncHttpxClient(
            event_hooks={"response": [limit_answer]},
            verify=await asyncio.to_thread(tls_context),
        ),
    )


class LLMClient:
    """Models of the agent config and their connections; an async context manager.

    `dependency`: their name in messages, as in "the judge".
    """

    def __init__(self, models: Sequence[AgentModel], dependency: str) -> None:
        self._models = tuple(models)
        self._dependency = dependency
        self._clients: list[AsyncOpenAI] = []

    def __bool__(self) -> bool:
        return bool(self._models)

    async def __aenter__(self) -> Self:
        if not self._models:
            return self
        self._clients = [await open_client(model) for model in self._models]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for client in self._clients:
            await client.close()
        self._clients = []

    async def ask(
        self, instruction: str | None, material: str, read: Callable[[str], T | None], form: str
    ) -> LLMReply[T]:
        """The first usable reply.

        `instruction`: the system message; None: there is none. `material`: the user message.
        `read`: reads a reply; returns None if it is unusable. `form`: the expected form in words,
        for the error. A model is asked again after an unusable reply or an error, `retries` times,
        then the next model is asked; errors that would repeat are not retried. Raises
        `NoModelAnswered` after the last model, or `ModelsUnreachable` if no model replied or
        refused the request's content.
        """
        from openai import APIStatusError, OpenAIError

        failures: list[str] = []
        answered = not self._models
        for model, client in zip(self._models, self._clients, strict=True):
            for attempt in range(model.retries + 1):
                if attempt:
                    pause = _RETRY_PAUSE_S if model.retry_delay is None else model.retry_delay
                    await asyncio.sleep(pause * model.backoff_factor ** (attempt - 1))
                try:
                    text = await _complete(client, model, instruction, material)
                except (OpenAIError, NoTurn) as error:
                    failures.append(f"{model.model} at {model.base_url}: {_one_line(error)}")
                    status = error.status_code if isinstance(error, APIStatusError) else None
                    answered |= status in _REFUSED
                    if status in _HOPELESS:
                        break
                    continue
                answered = True
                value = read(text)
                if value is not None:
                    return LLMReply(value, model.model)
                failures.append(
                    f"{model.model} gave a reply that will not do: {text[:_SHOWN]!r}"
                    f"{' and so on' if len(text) > _SHOWN else ''}, which has not {form}"
                )
            log.warning("model %s failed: %s", model.model, failures[-1])
        # Most retries fail with the same message.
        told = "; ".join(dict.fromkeys(failures)) or "no models are listed"
        if answered:
            raise NoModelAnswered(told)
        raise ModelsUnreachable(
            f"{self._dependency} is out of reach: {told}",
            dependency=self._dependency,
            probe=partial(self._answer, instruction, material),
        )

    async def _answer(self, instruction: str | None, material: str) -> None:
        """Repeat a request; return if any model replies.

        Raises the last error if none does, and `ConnectionError` if none can be connected to.
        """
        from httpx2 import ConnectError
        from openai import OpenAIError

        failure: Exception = AssertionError("there are models")
        refused = True
        for model, client in zip(self._models, self._clients, strict=True):
            try:
                await _complete(client, model, instruction, material)
                return
            except (OpenAIError, NoTurn) as error:
                failure = error
                refused &= isinstance(error.__cause__, ConnectError)
        if refused:
            raise ConnectionError(_one_line(failure))
        raise failure


async def _complete(
    client: "AsyncOpenAI", model: AgentModel, instruction: str | None, material: str
) -> str:
    from openai import omit
    from openai.types.chat import ChatCompletionMessageParam

    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": material}]
    if instruction is not None:
        messages.insert(0, {"role": "system", "content": instruction})
    answer = await client.chat.completions.with_raw_response.create(
        model=model.model,
        messages=messages,
        temperature=model.temperature,
        max_tokens=omit if model.max_tokens is None else model.max_tokens,
        extra_body=model.extra_body,
    )
    # The library accepts any answer with status 200 as a completion.
    return read_turn(answer.content).content


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__.lstrip('_')}: {' '.join(str(error).split())[:300]}"
