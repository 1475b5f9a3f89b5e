"""One inference service over SGLang's HTTP API: requests and answers, errors made ours.

The client does not know which server answers. It never sends a request that is known to kill one
(a token id outside the vocabulary) or to be refused (a prompt longer than the context). What to do
about a service that fails is the pool's business, not in here.
"""

import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import aiohttp
import orjson

from agentrl.inference.protocol import (
    GenerateRequest,
    Generation,
    InferenceError,
    RequestRejected,
    RequestTimedOut,
    ServiceLoad,
    ServiceUnreachable,
    VersionSpan,
    version_from_wire,
    version_to_wire,
)

PauseMode = Literal["abort", "retract", "in_place"]

_JSON_HEADERS = {"Content-Type": "application/json"}
_NOT_SERVING = frozenset({502, 503, 504})


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a service's model accepts; None where it is not known and so not checked."""

    vocab_size: int | None = None
    context_length: int | None = None


def open_session() -> aiohttp.ClientSession:
    """A session for any number of clients of one event loop.

    No connection limit: the samplers bound their own concurrency, and a request that waits for a
    connection would only hide in a queue. Idle connections are dropped before the 5 s after which
    uvicorn closes them, so that a request never goes out on a closing connection.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
    )


class SGLangClient:
    """An async client of one service at `url`, for instance `http://127.0.0.1:30000`.

    `limits` are what the caller knows of the model; without them `fetch_limits` asks the service.
    `session` is shared and stays open; without one the client opens and closes its own.

    Every method raises `ServiceUnreachable` when no complete answer came, `RequestTimedOut` past
    its time-out and `RequestRejected` when the service (or the client, before sending) refused.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        limits: ModelLimits = ModelLimits(),
        session: aiohttp.ClientSession | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self.limits = limits
        self._headers = dict(_JSON_HEADERS)
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._session = session
        self._owns_session = session is None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections that this client opened."""
        if self._owns_session and self._session is not None:
            await self._session.close()
            self._session = None

    async def generate(self, request: GenerateRequest, *, timeout_s: float = 600.0) -> Generation:
        """Generate from a token prompt; `latency_s` runs from sending to the parsed answer."""
        request = fit_request(request, self.limits)
        body = orjson.dumps(
            {
                "rid": request.rid,
                "input_ids": request.input_ids,
                "sampling_params": request.sampling_params.to_json(),
                "return_logprob": True,
            }
        )
        began = time.monotonic()
        answer = orjson.loads(await self._call("POST", "/generate", body, timeout_s))
        return parse_generation(answer, time.monotonic() - began, self.url)

    async def pause(self, mode: PauseMode, *, timeout_s: float = 120.0) -> None:
        """Stop generating.

        Running requests end ("abort"), wait with their keys and values ("in_place"), or wait and
        have those recomputed when they go on ("retract").
        """
        await self._post("/pause_generation", {"mode": mode}, timeout_s)

    async def continue_(self, *, timeout_s: float = 60.0) -> None:
        """Go on generating after `pause`."""
        await self._post("/continue_generation", {}, timeout_s)

    async def abort(self, rid: str | None = None, *, timeout_s: float = 60.0) -> None:
        """Abort the request `rid`, or all requests when it is None. An unknown rid is no error."""
        body: dict[str, object] = {"abort_all": True} if rid is None else {"rid": rid}
        await self._post("/abort_request", body, timeout_s)

    async def update_weights_from_disk(
        self, path: str | Path, version: int, *, timeout_s: float = 600.0
    ) -> None:
        """Load the weights of a model folder that the service can read, as policy `version`."""
        body: dict[str, object] = {
            "model_path": str(path),
            "weight_version": version_to_wire(version),
        }
        await self._post("/update_weights_from_disk", body, timeout_s)

    async def flush_cache(self, *, timeout_s: float = 60.0) -> None:
        """Empty the prefix cache. Refused while requests run or wait."""
        await self._call("POST", "/flush_cache", b"", timeout_s)

    async def model_info(self, *, timeout_s: float = 30.0) -> dict[str, object]:
        """The service's `/model_info`: `model_path`, `weight_version`, …"""
        return self._object(await self._call("GET", "/model_info", b"", timeout_s), "/model_info")

    async def server_info(self, *, timeout_s: float = 30.0) -> dict[str, object]:
        """The service's `/server_info`: its resolved arguments and state."""
        return self._object(await self._call("GET", "/server_info", b"", timeout_s), "/server_info")

    async def weight_version(self, *, timeout_s: float = 30.0) -> int:
        """The policy version that the service holds."""
        info = await self.model_info(timeout_s=timeout_s)
        return version_from_wire(str(info.get("weight_version")))

    async def loads(self, *, timeout_s: float = 30.0) -> ServiceLoad:
        """How busy the service is."""
        answer = self._object(await self._call("GET", "/v1/loads", b"", timeout_s), "/v1/loads")
        ranks = answer.get("loads")
        if not isinstance(ranks, list):
            raise InferenceError(f"{self.url}/v1/loads answered without `loads`: {answer!r:.200}")
        return ServiceLoad(
            running=sum(int(rank["num_running_reqs"]) for rank in ranks),
            waiting=sum(int(rank["num_waiting_reqs"]) for rank in ranks),
            used_tokens=sum(int(rank["num_used_tokens"]) for rank in ranks),
            total_tokens=sum(int(rank["max_total_num_tokens"]) for rank in ranks),
            retractions=sum(int(rank.get("queues", {}).get("retracted", 0)) for rank in ranks),
        )

    async def ready(self, *, timeout_s: float = 5.0) -> bool:
        """Whether the service takes requests; at once, False also when nobody answers."""
        return await self._answers_ok("/ready", timeout_s)

    async def health(self, *, timeout_s: float = 30.0) -> bool:
        """Whether the service can generate; it generates one token to find out."""
        return await self._answers_ok("/health", timeout_s)

    async def fetch_limits(self) -> ModelLimits:
        """Ask the service for its model's limits and check every later request against them.

        The context length is the server's own; the vocabulary (and the context length, when the
        server does not say) is in the model's config.json, readable where client and server share
        a file system.
        """
        server, model = await self.server_info(), await self.model_info()
        config = _read_model_config(str(model.get("model_path")))
        context = server.get("context_length")
        if not isinstance(context, int):
            context = config.context_length
        self.limits = ModelLimits(
            vocab_size=self.limits.vocab_size or config.vocab_size,
            context_length=self.limits.context_length or context,
        )
        return self.limits

    async def _answers_ok(self, path: str, timeout_s: float) -> bool:
        try:
            await self._call("GET", path, b"", timeout_s)
        except (ServiceUnreachable, RequestTimedOut, RequestRejected):
            return False
        return True

    async def _post(self, path: str, body: dict[str, object], timeout_s: float) -> None:
        answer = await self._call("POST", path, orjson.dumps(body), timeout_s)
        if answer and answer.startswith(b"{"):
            success = orjson.loads(answer).get("success", True)
            if not success:
                raise RequestRejected(f"{self.url}{path}: {_message(answer)}", status=200)

    async def _call(self, method: str, path: str, body: bytes, timeout_s: float) -> bytes:
        """Send one request and return the body of its 2xx answer."""
        async with self._exchange(method, path, body, timeout_s) as response:
            content = await response.read()
            if response.status in _NOT_SERVING:
                raise ServiceUnreachable(
                    f"{self.url}{path} answered {response.status}: {_message(content)}"
                )
            if response.status >= 400:
                raise RequestRejected(
                    f"{self.url}{path} answered {response.status}: {_message(content)}",
                    status=response.status,
                )
            return content

    @asynccontextmanager
    async def _exchange(
        self, method: str, path: str, body: bytes, timeout_s: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Map aiohttp's errors to ours, those of reading the answer included."""
        if self._session is None:
            self._session = open_session()
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(timeout_s, 10.0))
        try:
            async with self._session.request(
                method, self.url + path, data=body or None, headers=self._headers, timeout=timeout
            ) as response:
                yield response
        # A refused or unanswered connect is also a TimeoutError in aiohttp: ask for it first.
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise ServiceUnreachable(f"cannot connect to {self.url}{path}: {error}") from error
        except TimeoutError as error:
            raise RequestTimedOut(f"{self.url}{path} gave no answer in {timeout_s:g} s") from error
        except aiohttp.ClientError as error:
            raise ServiceUnreachable(
                f"{self.url}{path} broke off: {error or type(error).__name__}"
            ) from error

    def _object(self, content: bytes, path: str) -> dict[str, object]:
        answer = orjson.loads(content)
        if not isinstance(answer, dict):
            raise InferenceError(f"{self.url}{path} answered no JSON object: {content[:200]!r}")
        return answer


def fit_request(request: GenerateRequest, limits: ModelLimits) -> GenerateRequest:
    """The request, its `max_new_tokens` cut to what the context leaves; pure.

    Raises RequestRejected for an empty prompt, a token id outside the vocabulary (which kills an
    SGLang server) and a prompt that leaves no room for a token.
    """
    if not request.input_ids:
        raise RequestRejected(f"request {request.rid}: the prompt is empty")
    if min(request.input_ids) < 0 or (
        limits.vocab_size is not None and max(request.input_ids) >= limits.vocab_size
    ):
        raise RequestRejected(
            f"request {request.rid}: prompt ids run from {min(request.input_ids)} to"
            f" {max(request.input_ids)} but the model's vocabulary is {limits.vocab_size} ids"
            " from 0: was it tokenised with another model's tokenizer?"
        )
    if limits.context_length is None:
        return request
    # SGLang keeps one position of the context for itself.
    room = limits.context_length - 1 - len(request.input_ids)
    if room < 1:
        raise RequestRejected(
            f"request {request.rid}: the prompt of {len(request.input_ids)} tokens leaves no room"
            f" in the service's context of {limits.context_length}: shorten it, or start the"
            " service with a longer context"
        )
    if request.sampling_params.max_new_tokens <= room:
        return request
    return replace(request, sampling_params=replace(request.sampling_params, max_new_tokens=room))


def parse_generation(answer: object, latency_s: float, source: str) -> Generation:
    """A `/generate` answer (with `return_logprob`) as a `Generation`; pure.

    Raises InferenceError when logprobs, ids and version spans do not cover each other exactly: a
    token without its logprob or version must never reach a trainer.
    """
    try:
        meta = answer["meta_info"]  # type: ignore[index]
        output_ids = tuple(answer["output_ids"])  # type: ignore[index]
        triples: Sequence[Sequence[float]] = meta["output_token_logprobs"]
        finish = meta["finish_reason"]
        generation = Generation(
            output_ids=output_ids,
            output_logprobs=tuple([triple[0] for triple in triples]),
            text=answer["text"],  # type: ignore[index]
            finish_reason=finish["type"],
            matched=finish.get("matched"),
            versions=tuple(
                VersionSpan(version_from_wire(span["version"]), span["start"], span["end"])
                for span in meta["weight_versions"]
                if span["end"] > span["start"]
            ),
            prompt_tokens=meta["prompt_tokens"],
            cached_tokens=meta["cached_tokens"],
            latency_s=latency_s,
        )
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise InferenceError(
            f"{source}/generate gave an answer that is not SGLang's ({error!r}): {answer!r:.300}"
        ) from error
    if tuple([triple[1] for triple in triples]) != output_ids:
        raise InferenceError(f"{source}/generate: logprobs and output_ids name different tokens")
    end = 0
    for span in generation.versions:
        if span.start != end:
            break
        end = span.end
    if end != len(output_ids):
        raise InferenceError(
            f"{source}/generate: version spans {generation.versions} do not cover its"
            f" {len(output_ids)} output tokens"
        )
    return generation


def _message(content: bytes) -> str:
    """The message of an error body: SGLang has four forms, plain text among them."""
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError:
        return content.decode(errors="replace").strip() or "(empty answer)"
    if isinstance(body, dict):
        error = body.get("error", body.get("message", body))
        if isinstance(error, dict):
            error = error.get("message", error)
        return str(error)
    return str(body)


def _read_model_config(model_path: str) -> ModelLimits:
    """The limits in a model folder's config.json; empty where there is no such file here."""
    file = Path(model_path) / "config.json"
    if not file.is_file():
        return ModelLimits()
    config = json.loads(file.read_text())
    text = config.get("text_config", config)
    return ModelLimits(text.get("vocab_size"), text.get("max_position_embeddings"))
