"""One inference service over SGLang's HTTP API: what can be asked of it, one method each.

The client does not know which server answers. It never sends a request that is known to kill one
(a token id outside the vocabulary) or to be refused (a prompt longer than the context). What to do
about a service that fails is the pool's business, not in here.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from agentrl.inference.answers import (
    ChunkReader,
    error_message,
    parse_loads,
    read_events,
    stream_error,
)
from agentrl.inference.context import (
    BEYOND_PROMPT,
    fit_request,
    read_model_limits,
    told_context,
)
from agentrl.inference.engine_protocol import Capabilities, Engine, PauseMode
from agentrl.inference.generation_builder import GenerationBuilder
from agentrl.inference.protocol import (
    UNKNOWN_LIMITS,
    GenerateRequest,
    InferenceError,
    ModelLimits,
    RequestRejected,
    RequestTimedOut,
    ServiceLoad,
    ServiceUnreachable,
    version_from_wire,
    version_to_wire,
)
from agentrl.inference.transport import Transport

# A chunk at least every so many tokens, or every 32nd of the longest output: without incremental
# streaming each chunk repeats the output so far.
_LEAST_INTERVAL = 32
_CHUNKS = 32
_READY_S = 5.0
# How large a chunk may be: a token takes some 40 bytes, id, logprob and text.
_CHUNK_BYTES, _TOKEN_BYTES = 2**20, 1024
_CAPABILITIES = Capabilities(
    weight_ways=frozenset({"disk", "distributed", "tensor"}),
    pauses=frozenset({"abort", "retract", "in_place"}),
    memory=True,
)


class SGLangClient(Engine):
    """The engine behind SGLang's API: SGLang itself, its router, or the local engine.

    See `Engine` for what all engines have; `model_info` and `server_info` are SGLang's own.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        limits: ModelLimits = UNKNOWN_LIMITS,
        session: aiohttp.ClientSession | None = None,
        silence_s: float = 10.0,
    ) -> None:
        self._transport = Transport(url, api_key, session)
        self._api_key = api_key
        self.limits = limits
        self._silence_s = silence_s

    @property
    def url(self) -> str:
        """Where the service answers, without a slash at the end."""
        return self._transport.url

    @property
    def capabilities(self) -> Capabilities:
        """All that the protocol has."""
        return _CAPABILITIES

    def at(self, url: str) -> "SGLangClient":
        """A client of another service, over the same session."""
        session = self._transport.session
        return SGLangClient(url, self._api_key, session=session, silence_s=self._silence_s)

    async def close(self) -> None:
        """Close the connections that this client opened."""
        await self._transport.close()

    async def extend(self, building: GenerationBuilder, *, timeout_s: float = 600.0) -> None:
        """Generate what an answer still lacks, as a piece of it.

        It is streamed: the tokens that arrived stay in `building` when the service fails before the
        piece is whole. A service whose context was not known and is too short says so when it
        refuses: then it is known.
        """
        while True:
            request = fit_request(building.next_request(), self.limits)
            try:
                return await self._extend(request, building, timeout_s)
            except RequestRejected as refusal:
                context, known = told_context(str(refusal)), self.limits.context_length
                if context is None or (known is not None and known <= context):
                    raise
                self.limits = replace(self.limits, context_length=context)

    async def _extend(
        self, request: GenerateRequest, building: GenerationBuilder, timeout_s: float
    ) -> None:
        """Receive one answer for as long as tokens of it arrive.

        A service that says nothing for a while is asked whether it lives.
        """
        receiving = asyncio.create_task(self._receive(request, building))
        heard, heard_at = 0, time.monotonic()
        try:
            while not receiving.done():
                left_s = heard_at + timeout_s - time.monotonic()
                await asyncio.wait({receiving}, timeout=min(self._silence_s, max(0.0, left_s)))
                if building.n_piece != heard:
                    heard, heard_at = building.n_piece, time.monotonic()
                elif receiving.done():
                    break
                elif time.monotonic() - heard_at >= timeout_s:
                    raise RequestTimedOut(f"{self.url}/generate gave no token for {timeout_s:g} s")
                elif not await self.alive() and building.n_piece == heard and not receiving.done():
                    raise ServiceUnreachable(
                        f"{self.url} said nothing for {self._silence_s:g} s and is gone"
                    )
        finally:
            receiving.cancel()
            await asyncio.wait({receiving})
        receiving.result()

    async def _receive(self, request: GenerateRequest, building: GenerationBuilder) -> None:
        params = request.sampling_params.to_json()
        longest = request.sampling_params.max_new_tokens
        params["stream_interval"] = max(_LEAST_INTERVAL, longest // _CHUNKS)
        body = orjson.dumps(
            {
                "rid": request.rid,
                "input_ids": request.input_ids,
                "sampling_params": params,
                "return_logprob": True,
                "stream": True,
            }
        )
        reader = ChunkReader(building, self.url, longest)
        largest = _CHUNK_BYTES + _TOKEN_BYTES * longest
        buffer = b""
        async with aclosing(self._transport.stream("/generate", body)) as pieces:
            async for piece in pieces:
                events, buffer = read_events(buffer + piece)
                if len(buffer) > largest:
                    raise ServiceUnreachable(
                        f"{self.url}/generate gave a chunk of more than {largest} bytes for"
                        f" {longest} tokens, which was not read further"
                    )
                for event in events:
                    if event == b"[DONE]":
                        continue
                    chunk = self._object(event, "/generate")
                    error = stream_error(chunk, self.url)
                    if error is not None:
                        raise error
                    reader.add(chunk)
        if building.piece_ending is None:
            raise ServiceUnreachable(f"{self.url}/generate broke off before the end of the answer")

    async def pause(self, mode: PauseMode, *, timeout_s: float = 60.0) -> None:
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
        self, path: str | Path, version: int, *, flush_cache: bool = True, timeout_s: float = 600.0
    ) -> None:
        """Load the weights of a model folder that the service can read, as policy `version`."""
        body: dict[str, object] = {
            "model_path": str(path),
            "weight_version": version_to_wire(version),
            "flush_cache": flush_cache,
        }
        await self._post("/update_weights_from_disk", body, timeout_s)

    async def begin_weight_update(self, *, timeout_s: float = 60.0) -> None:
        """Open a session for updates from tensors or a group; one that was left open is closed."""
        try:
            await self._post("/begin_weight_update", {}, timeout_s)
        except RequestRejected:
            await self.end_weight_update(timeout_s=timeout_s)
            await self._post("/begin_weight_update", {}, timeout_s)

    async def end_weight_update(self, *, timeout_s: float = 60.0) -> None:
        """Close the session: the weights are whole."""
        await self._post("/end_weight_update", {}, timeout_s)

    async def update_weights_from_tensor(
        self,
        serialized: Sequence[str],
        *,
        version: int | None,
        flush_cache: bool,
        timeout_s: float = 600.0,
    ) -> None:
        """Load tensors in shared memory: one serialised list of names and tensors per TP rank.

        `version` is given with the last tensors of a version and None with those before.
        """
        body: dict[str, object] = {
            "serialized_named_tensors": list(serialized),
            "flush_cache": flush_cache,
            "weight_version": None if version is None else version_to_wire(version),
        }
        await self._post("/update_weights_from_tensor", body, timeout_s)

    async def init_weights_update_group(
        self,
        *,
        address: str,
        port: int,
        world_size: int,
        group: str,
        backend: str,
        timeout_s: float = 120.0,
    ) -> None:
        """Join a process group in which the caller is rank 0 and the service has all other ranks.

        Answers once everybody has joined.
        """
        body: dict[str, object] = {
            "master_address": address,
            "master_port": port,
            "rank_offset": 1,
            "world_size": world_size,
            "group_name": group,
            "backend": backend,
        }
        await self._post("/init_weights_update_group", body, timeout_s)

    async def destroy_weights_update_group(self, group: str, *, timeout_s: float = 60.0) -> None:
        """Leave a process group."""
        await self._post("/destroy_weights_update_group", {"group_name": group}, timeout_s)

    async def update_weights_from_distributed(
        self,
        tensors: Mapping[str, tuple[str, Sequence[int]]],
        *,
        group: str,
        version: int | None,
        flush_cache: bool,
        timeout_s: float = 600.0,
    ) -> None:
        """Receive `tensors` (name to dtype and shape) as rank 0 of the group broadcasts them.

        `version` as in `update_weights_from_tensor`.
        """
        body: dict[str, object] = {
            "names": list(tensors),
            "dtypes": [dtype for dtype, _ in tensors.values()],
            "shapes": [list(shape) for _, shape in tensors.values()],
            "group_name": group,
            "flush_cache": flush_cache,
            "weight_version": None if version is None else version_to_wire(version),
        }
        await self._post("/update_weights_from_distributed", body, timeout_s)

    async def release_memory_occupation(self, *, timeout_s: float = 120.0) -> None:
        """Give GPU memory back. Kills a service where requests run: see `inference.memory`."""
        await self._post("/release_memory_occupation", {}, timeout_s)

    async def resume_memory_occupation(self, *, timeout_s: float = 120.0) -> None:
        """Take it again. Kills a service that did not give it back: see `inference.memory`."""
        await self._post("/resume_memory_occupation", {}, timeout_s)

    async def flush_cache(self, *, timeout_s: float = 60.0) -> None:
        """Empty the prefix cache. Refused while requests run or wait."""
        await self._transport.call("POST", "/flush_cache", b"", timeout_s)

    async def model_info(self, *, timeout_s: float = 30.0) -> dict[str, Any]:
        """The service's `/model_info`: `model_path`, `weight_version`, …"""
        return await self._get("/model_info", timeout_s)

    async def server_info(self, *, timeout_s: float = 30.0) -> dict[str, Any]:
        """The service's `/server_info`: its resolved arguments and state."""
        return await self._get("/server_info", timeout_s)

    async def description(self, *, timeout_s: float = 30.0) -> str:
        """For people: the folder of the model that it serves, and the version of its weights."""
        info = await self.model_info(timeout_s=timeout_s)
        return f"{info.get('model_path')}, weights {info.get('weight_version')}"

    async def weight_ranks(self) -> int:
        """How many tensor-parallel ranks hold the service's weights.

        Raises InferenceError for one with data parallelism, which has no single set of them.
        """
        info = await self.server_info()
        if int(info.get("dp_size") or 1) > 1:
            raise InferenceError(
                f"{self.url} runs {info['dp_size']} data-parallel copies, which SGLang only updates"
                " from disk: use --weight_update disk, or one service per copy"
            )
        return int(info.get("tp_size") or 1)

    async def weight_version(self, *, timeout_s: float = 30.0) -> int:
        """The policy version that the service holds."""
        info = await self.model_info(timeout_s=timeout_s)
        try:
            return version_from_wire(str(info.get("weight_version")))
        except ValueError as error:
            raise InferenceError(f"{self.url}: {error}") from error

    async def loads(self, *, timeout_s: float = 30.0) -> ServiceLoad:
        """How busy the service is."""
        return parse_loads(await self._get("/v1/loads", timeout_s), self.url)

    async def workers(self, *, timeout_s: float = 30.0) -> list[str]:
        """The URLs of the services behind a router; none when this is a service itself."""
        try:
            answer = await self._get("/workers", timeout_s)
        except RequestRejected as error:
            if error.status == 404:
                return []
            raise
        return [worker["url"].rstrip("/") for worker in answer["workers"]]

    async def alive(self, *, timeout_s: float = _READY_S) -> bool:
        """Whether somebody answers us at once, also while generation is paused."""
        try:
            await self._transport.call("GET", "/model_info", b"", timeout_s)
        except RequestRejected:
            return True  # a router, which has no model
        except (ServiceUnreachable, RequestTimedOut):
            return False
        return True

    async def ready(self, *, timeout_s: float = _READY_S) -> bool:
        """Whether the service takes requests of ours and generates; at once.

        False while generation is paused, when nobody answers and when our key is another.
        """
        try:
            await self._transport.call("GET", "/ready", b"", timeout_s)
        except RequestRejected as error:
            # A router has no /ready; its /health costs nothing.
            return error.status == 404 and await self.health(timeout_s=timeout_s)
        except (ServiceUnreachable, RequestTimedOut):
            return False
        return await self.alive(timeout_s=timeout_s)  # who has no key is told only that it is ready

    async def health(self, *, timeout_s: float = 30.0) -> bool:
        """Whether the service can generate; it generates one token to find out."""
        try:
            await self._transport.call("GET", "/health", b"", timeout_s)
        except (ServiceUnreachable, RequestTimedOut, RequestRejected):
            return False
        return True

    async def fetch_limits(self) -> ModelLimits:
        """Ask the service for its model's limits and check every later request against them.

        The context length is the server's own, which its cache may make shorter than the model's;
        the vocabulary (and the context length, when the server does not say) is in the model's
        config.json, readable where client and server share a file system. A router has no limits
        of its own: those of a service behind it are taken.
        """
        workers = await self.workers()
        service = self.at(workers[0]) if workers else self
        try:
            server, model = await service.server_info(), await service.model_info()
        except (ServiceUnreachable, RequestTimedOut) as error:
            if workers:
                raise RequestRejected(
                    f"{self.url} routes to services out of reach: {error}"
                ) from None
            raise
        config = read_model_limits(str(model.get("model_path")))
        context, prompt = server.get("context_length"), server.get("max_req_input_len")
        if isinstance(prompt, int):
            context = prompt + BEYOND_PROMPT
        elif not isinstance(context, int):
            context = config.context_length
        self.limits = ModelLimits(
            vocab_size=self.limits.vocab_size or config.vocab_size,
            context_length=self.limits.context_length or context,
        )
        return self.limits

    async def _get(self, path: str, timeout_s: float) -> dict[str, Any]:
        return self._object(await self._transport.call("GET", path, b"", timeout_s), path)

    async def _post(self, path: str, body: dict[str, object], timeout_s: float) -> None:
        answer = await self._transport.call("POST", path, orjson.dumps(body), timeout_s)
        if answer and answer.startswith(b"{"):
            success = orjson.loads(answer).get("success", True)
            if not success:
                raise RequestRejected(f"{self.url}{path}: {error_message(answer)}", status=200)

    def _object(self, content: bytes, path: str) -> dict[str, Any]:
        try:
            answer = orjson.loads(content)
        except orjson.JSONDecodeError as error:
            raise InferenceError(
                f"{self.url}{path} answered no JSON ({error}): {content[:200]!r}"
            ) from error
        if not isinstance(answer, dict):
            raise InferenceError(f"{self.url}{path} answered no JSON object: {content[:200]!r}")
        return answer
