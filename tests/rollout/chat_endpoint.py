"""An OpenAI-compatible endpoint over real HTTP, with replies written beforehand."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from chat_completion import chat_completion


@dataclass
class ChatEndpoint:
    """Answers `/v1/chat/completions` with what `replies` holds for a model, in order.

    A number is the status of an error; content may be of any form.
    """

    url: str = ""
    replies: dict[str, list[Any]] = field(default_factory=dict)
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        self.keys.append(request.headers.get("Authorization", ""))
        reply = self.replies[body["model"]].pop(0)
        if isinstance(reply, int):
            return web.json_response({"error": {"message": "overloaded"}}, status=reply)
        return web.json_response(chat_completion(body["model"], reply))


@asynccontextmanager
async def chat_endpoint() -> AsyncIterator[ChatEndpoint]:
    endpoint = ChatEndpoint()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", endpoint.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    endpoint.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    yield endpoint
    await runner.cleanup()
