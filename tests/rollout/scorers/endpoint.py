"""Real HTTP servers for the scorers to ask: any handler, and an OpenAI-compatible one with scripted
replies."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from agentrl.databases.records import RecordLedger
from agentrl.rollout.mcp.agent_config import AgentModel


@dataclass
class ChatEndpoint:
    """Answers `/v1/chat/completions` with what `replies` holds for a model, in order."""

    records: RecordLedger
    url: str = ""
    replies: dict[str, list[str | int]] = field(default_factory=dict)
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)

    def models(self, *names: str) -> tuple[AgentModel, ...]:
        """Models of this endpoint, each asked twice at the most."""
        return tuple(
            AgentModel(model=name, base_url=self.url, api_key="key", retries=1) for name in names
        )

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        self.keys.append(request.headers.get("Authorization", ""))
        reply = self.replies[body["model"]].pop(0)
        if isinstance(reply, int):
            return web.json_response({"error": {"message": "overloaded"}}, status=reply)
        message = {"role": "assistant", "content": reply}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        return web.json_response(
            {"id": "1", "object": "chat.completion", "created": 0, "model": body["model"],
             "choices": [choice]}
        )  # fmt: skip


@asynccontextmanager
async def serving(
    path: str, handler: Callable[[web.Request], Awaitable[web.Response]]
) -> AsyncIterator[str]:
    """The URL at which `handler` answers POST requests."""
    app = web.Application()
    app.router.add_post(path, handler)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}{path}"
    finally:
        await runner.cleanup()
