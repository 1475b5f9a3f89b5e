"""The client of one inference service over SGLang's HTTP API, one method for each route.

The server may be SGLang, its router or the local engine. The client never sends a request that
crashes a server (a token id outside the vocabulary) or is refused (a prompt longer than the
context). The pool handles services that fail.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing, suppress
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

# A chunk has at least _LEAST_INTERVAL tokens, and an answer at most _CHUNKS chunks: without
# incremental streaming each chunk repeats the output so far.
_LEAST_INTERVAL = 32
_CHUNKS = 32
_WATCHED_CHUNKS = 512  # of an answer whose tokens somebody waits for; they may be single tokens
_READY_S = 5.0
# The largest chunk is _CHUNK_BYTES and _TOKEN_BYTES per token, which takes about 40 bytes.
_CHUNK_BYTES, _TOKEN_BYTES = 2**20, 1024
_CAPABILITIES = Capabilities(
    weight_ways=frozenset({"disk", "distributed", "tensor"}),
    pauses=frozenset({"abort", "retract", "in_place"}),
    memory=True,
)


class SGLangClient(Engine):
    """The engine for SGLang's API: SGLang, its router, or the local engine.

    `Engine` describes the methods. `model_info` and `server_info` are specific to SGLang.
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
        """The service's URL, without a slash at the end."""
        return self._transport.url

    @property
    def capabilities(self) -> Capabilities:
        """All capabilities of the protocol."""
        return _CAPABILITIES

    def at(self, url: str) -> "SGLangClient":
        """Return a client of another service over the same session."""
        session = self._transport.session
        return SGLangClient(url, self._api_key, session=session, silence_s=self._silence_s)

    async def close(self) -> None:
        """Close the connections that this client opened."""
        await self._transport.close()

    async def extend(self, building: GenerationBuilder, *, timeout_s: float = 600.0) -> None:
        """Generate the missing rest of an answer.

        The answer is streamed: received tokens stay in `building` if the service fails. If the
        service refuses a request as too long and reports its context, the request is fitted to it
        and sent again.
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
        """Receive one answer. A service that is silent for `silence_s` is asked if it is alive."""
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
        interval = max(_LEAST_INTERVAL, longest // _CHUNKS)
        if building.on_tokens is not None:
            interval = max(1, longest // _WATCHED_CHUNKS)
        params["stream_interval"] = interval
        body = orjson.dumps(
            {
                "rid": request.rid,
                "input_ids": request.input_ids,
                "sampling_params": params,
                "return_logprob": True,
                "stream": True,
            },
            option=orjson.OPT_SERIALIZE_NUMPY,
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

    async def weight_checksums(self, *, timeout_s: float = 600.0) -> dict[str, str]:
        """Checksums of the tensors that the service holds; SGLang fuses some and renames them."""
        path = "/weights_checker"
        body = orjson.dumps({"action": "checksum", "selector": "target"})
        answer = self._object(await self._transport.call("POST", path, body, timeout_s), path)
        try:
            return {
                f"{name} of rank {rank}": str(checksum)
                for rank, held in enumerate(answer["ranks"])
                for name, checksum in held["checksums"].items()
            }
        except (KeyError, TypeError, AttributeError) as error:
            raise InferenceError(f"{self.url}{path}: no checksums in {answer}") from error

    async def begin_weight_update(self, *, timeout_s: float = 60.0) -> None:
        """Open a session for updates from tensors or a group. A session left open is closed."""
        try:
            await self._post("/begin_weight_update", {}, timeout_s)
        except RequestRejected:
            with suppress(RequestRejected):  # it is incomplete, and closed nevertheless
                await self.end_weight_update(timeout_s=timeout_s)
            await self._post("/begin_weight_update", {}, timeout_s)

    async def end_weight_update(self, *, timeout_s: float = 60.0) -> None:
        """Close the session: the weights are complete."""
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

        Returns once all ranks have joined.
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
        """Release GPU memory. Crashes a service where requests run, see `inference.memory`."""
        await self._post("/release_memory_occupation", {}, timeout_s)

    async def resume_memory_occupation(self, *, timeout_s: float = 120.0) -> None:
        """Resume GPU memory. Crashes a service that did not release it, see `inference.memory`."""
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
        """The folder of the served model and the version of its weights, for display."""
        info = await self.model_info(timeout_s=timeout_s)
        return f"{info.get('model_path')}, weights {info.get('weight_version')}"

    async def weight_ranks(self) -> int:
        """Number of tensor-parallel ranks that hold the service's weights.

        Raises InferenceError for a service with data parallelism, which has several sets of ranks.
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
        """The load of the service."""
        return parse_loads(await self._get("/v1/loads", timeout_s), self.url)

    async def workers(self, *, timeout_s: float = 30.0) -> list[str]:
        """The URLs of the services behind a router; empty for a service."""
        try:
            answer = await self._get("/workers", timeout_s)
        except RequestRejected as error:
            if error.status == 404:
                return []
            raise
        return [worker["url"].rstrip("/") for worker in answer["workers"]]

    async def alive(self, *, timeout_s: float = _READY_S) -> bool:
        """Whether the service answers at once, also while generation is paused."""
        try:
            await self._transport.call("GET", "/model_info", b"", timeout_s)
        except RequestRejected:
            return True  # a router, which has no model
        except (ServiceUnreachable, RequestTimedOut):
            return False
        return True

    async def ready(self, *, timeout_s: float = _READY_S) -> bool:
        """Whether the service accepts our requests and generates.

        False while generation is paused, without an answer, and if our key is refused.
        """
        try:
            await self._transport.call("GET", "/ready", b"", timeout_s)
        except RequestRejected as error:
            # A router has no /ready; its /health costs nothing.
            return error.status == 404 and await self.health(timeout_s=timeout_s)
        except (ServiceUnreachable, RequestTimedOut):
            return False
        return await self.alive(timeout_s=timeout_s)  # /ready does not check the key

    async def health(self, *, timeout_s: float = 30.0) -> bool:
        """Whether the service can generate. It generates one token to find out."""
        try:
            await self._transport.call("GET", "/health", b"", timeout_s)
        except (ServiceUnreachable, RequestTimedOut, RequestRejected):
            return False
        return True

    async def fetch_limits(self) -> ModelLimits:
        """Ask the service for its model's limits, which later requests are checked against.

        The context length is the server's, which may be shorter than the model's. The vocabulary,
        and the context length if the server does not report it, come from the model's config.json
        if this machine can read it. For a router the limits are those of its first service.
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
