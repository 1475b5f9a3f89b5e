"""A model whose tokens come one by one, as a test lets them."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from answering_service import VERSION, AnsweringService


@dataclass
class SlowService(AnsweringService):
    """Answers `/generate` in chunks of `stream_interval` tokens, as far as `allowed`.

    `allowed`: tokens of an answer that may leave. `dies_after`: number of tokens after which the
    connection breaks, once. `intervals`: what was asked for.
    """

    allowed: float = float("inf")
    dies_after: int | None = None
    intervals: list[int] = field(default_factory=list)
    _more: asyncio.Event = field(default_factory=asyncio.Event)

    def allow(self, tokens: float) -> None:
        self.allowed = tokens
        self._more.set()
        self._more = asyncio.Event()

    async def _generate(self, request: web.Request) -> web.StreamResponse:  # type: ignore[override]
        body = await request.json()
        ids = self.renderer.encode(await self.answer(self.renderer.codec.decode(body["input_ids"])))
        interval = body["sampling_params"]["stream_interval"]
        self.intervals.append(interval)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for end in [*range(1, len(ids), interval), len(ids)]:
            while end > self.allowed:
                await self._more.wait()
            if self.dies_after is not None and end > self.dies_after:
                self.dies_after = None
                assert request.transport is not None
                request.transport.abort()
                return response
            chunk = self._chunk(body, ids[:end], whole=end == len(ids))
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.prompts.append(body["input_ids"])
        self.outputs.append(ids)
        await response.write(b"data: [DONE]\n\n")
        return response

    def _chunk(self, body: dict[str, Any], ids: list[int], whole: bool) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": body["rid"],
            "finish_reason": {"type": "stop", "matched": ids[-1]} if whole else None,
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "weight_version": str(VERSION),
            "output_token_logprobs": [[-token / 1000, token, None] for token in ids],
        }
        if whole:
            span = {"version": str(VERSION), "start": 0, "end": len(ids)}
            meta["weight_versions"] = [span]
        return {"text": "", "output_ids": ids, "meta_info": meta}
