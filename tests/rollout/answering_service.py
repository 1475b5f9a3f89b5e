"""An inference service over real HTTP that answers each prompt by a function of its text."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

from agentrl.rollout.chat import ChatRenderer

VERSION = 2
Answer = Callable[[str], Awaitable[str]]  # the prompt's text -> the turn's, with its end


@dataclass
class AnsweringService:
    """Answers `/generate`, cut at `max_new_tokens`. The logprob of a token is -id / 1000.

    `prompts` and `outputs` are in the order of the answers.
    """

    renderer: ChatRenderer
    answer: Answer
    prompts: list[list[int]] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)
    url: str = ""
    _runner: web.AppRunner | None = field(default=None, init=False)

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        ids = self.renderer.encode(await self.answer(self.renderer.codec.decode(body["input_ids"])))
        limit = body["sampling_params"]["max_new_tokens"]
        reason: dict[str, object] = {"type": "stop", "matched": ids[-1]}
        if len(ids) > limit:
            ids, reason = ids[:limit], {"type": "length", "length": limit}
        self.prompts.append(body["input_ids"])
        self.outputs.append(ids)
        meta = {
            "id": body["rid"],
            "finish_reason": reason,
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "weight_version": str(VERSION),
            "weight_versions": [{"version": str(VERSION), "start": 0, "end": len(ids)}],
            "output_token_logprobs": [[-token / 1000, token, None] for token in ids],
            "input_token_logprobs": [],
            "e2e_latency": 0.0,
        }
        chunk = json.dumps({"text": "", "output_ids": ids, "meta_info": meta})
        return web.Response(text=f"data: {chunk}\n\ndata: [DONE]\n\n")

    @asynccontextmanager
    async def running(self) -> AsyncIterator["AnsweringService"]:
        """The service, on a free port."""
        await self.start()
        yield self
        await self.stop()

    async def start(self) -> None:
        """Begin to listen, on the same port as before if there was one."""
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/ready", self._ready)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        port = int(self.url.rpartition(":")[2]) if self.url else 0
        await web.TCPSite(self._runner, "127.0.0.1", port, reuse_address=True).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        """Listen no more."""
        assert self._runner is not None, "it was started"
        await self._runner.cleanup()

    async def _ready(self, request: web.Request) -> web.Response:
        return web.Response()
