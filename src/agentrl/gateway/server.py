"""The HTTP server of a sampler process: the APIs that programs speak, for all its sessions.

    /s/{session}/v1/chat/completions, /v1/responses, /v1/messages, /v1/models    the model
    /s/{session}/task, /reward, /finish                                          the attempt

`/sessions/{session}` is another name of `/s/{session}`; without either, the key tells the session.
Each request shows the session's key, as a bearer token or as `x-api-key`.
"""

import asyncio
import hashlib
import math
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import orjson
from aiohttp import ClientConnectionResetError, web

from agentrl.failures import InfrastructureFailure
from agentrl.foreign_text import text_of
from agentrl.gateway import anthropic_messages, openai_chat, openai_responses
from agentrl.gateway.agents_of_program import HEADER, NAME_RULE, NamingError, is_name
from agentrl.gateway.answering import Answering
from agentrl.gateway.exchange import (
    MODEL,
    BadRequest,
    ChatAnswer,
    ChatRequest,
    Event,
    Events,
    spoken_message,
)
from agentrl.gateway.sessions import Session, SessionOver
from agentrl.inference.protocol import InferenceError
from agentrl.rollout.agents.limits import LimitReached
from agentrl.rollout.agents.recorded import Diverged
from agentrl.rollout.chat.capabilities import TemplateRefusal
from agentrl.rollout.llm.endpoint import ContextFull, EndpointRefused

_LARGEST_BODY = 64 * 2**20
_ALIVE_S = 10.0  # between signs of life of a stream whose answer is not there yet
_Handler = Callable[[Session, web.Request], Awaitable[web.StreamResponse]]
_Refusal = Callable[[str, str, str | None], dict[str, Any]]
# Clients of both providers send it with each request: how often they have sent it before.
_RETRIES = "x-stainless-retry-count"


class Gateway:
    """The sessions of a process, by id and by key. `url`: of the server."""

    def __init__(self) -> None:
        self.url = ""
        self._sessions: dict[str, Session] = {}

    @asynccontextmanager
    async def running(self, host: str = "127.0.0.1") -> AsyncIterator["Gateway"]:
        """Serve on a free port."""
        runner = web.AppRunner(self._app(), access_log=None, handler_cancellation=True)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, 0).start()
            self.url = f"http://{host}:{runner.addresses[0][1]}"
            yield self
        finally:
            await runner.cleanup()

    @asynccontextmanager
    async def session(self, session: Session) -> AsyncIterator[str]:
        """Answer the session's requests; yields its URL."""
        self._sessions[session.id] = session
        try:
            yield f"{self.url}/s/{session.id}"
        finally:
            await session.close()
            del self._sessions[session.id]

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=_LARGEST_BODY)
        routes: list[tuple[str, str, _Handler, _Refusal]] = [
            ("POST", "/v1/chat/completions", self._chat, openai_chat.error),
            ("POST", "/v1/responses", self._responses, openai_chat.error),
            ("POST", "/v1/messages", self._messages, _anthropic_error),
            ("POST", "/v1/messages/count_tokens", self._count_tokens, _anthropic_error),
            ("GET", "/v1/models", self._models, openai_chat.error),
            ("GET", "/v1/models/{model:.+}", self._model, openai_chat.error),
            ("GET", "/task", self._task, openai_chat.error),
            ("POST", "/reward", self._reward, openai_chat.error),
            ("POST", "/reward_info", self._reward, openai_chat.error),  # its name in uni-agent
            ("POST", "/finish", self._finish, openai_chat.error),
        ]
        for prefix in ("/s/{session}", "/sessions/{session}", ""):
            for method, path, handler, refusal in routes:
                app.router.add_route(method, prefix + path, self._answering(handler, refusal))
        return app

    def _answering(
        self, handler: _Handler, refusal: _Refusal
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """The handler of a route, with errors in its provider's form."""

        async def answer(request: web.Request) -> web.StreamResponse:
            try:
                session = self._find(request)
                if session is None:
                    return _json(
                        refusal("no session has this key", "authentication_error", None), 401
                    )
                return await handler(session, request)
            except Exception as error:
                status, kind, code, message = _described(error)
                headers = {} if status != 400 else {"x-should-retry": "false"}
                return _json(refusal(message, kind, code), status, headers)

        return answer

    def _find(self, request: web.Request) -> Session | None:
        """The session of a request, if its key is right."""
        shown = request.headers.get("x-api-key", "")
        if not shown:
            shown = request.headers.get("Authorization", "").partition(" ")[2]
        name = request.match_info.get("session")
        if name is None:
            sessions = list(self._sessions.values())
        else:
            sessions = [self._sessions[name]] if name in self._sessions else []
        for session in sessions:
            if secrets.compare_digest(shown.strip().encode(), session.key.encode()):
                return session
        return None

    # -- the model

    async def _chat(self, session: Session, request: web.Request) -> web.StreamResponse:
        body = await _body(request)
        asked = openai_chat.parse(body)
        answering = _ask(session, asked, request, body)
        if not body.get("stream"):
            return _json(openai_chat.completion(asked, await _answers(answering)))
        options = body.get("stream_options") or {}
        events = openai_chat.Events(asked, with_usage=bool(options.get("include_usage")))
        return await _stream(request, answering, events, openai_chat.error)

    async def _responses(self, session: Session, request: web.Request) -> web.StreamResponse:
        body = await _body(request)
        previous = body.get("previous_response_id")
        if previous is not None and previous not in session.conversations:
            raise BadRequest(f"previous_response_id: no answer of this session is {previous!r}")
        earlier = () if previous is None else session.conversations[previous]
        parsed = openai_responses.parse(body, earlier)
        answering = _ask(session, parsed.request, request, body)
        name = openai_responses.new_id()

        def keep(answer: ChatAnswer) -> None:
            said = spoken_message(answer)
            session.conversations[name] = [*parsed.conversation, said]

        if not body.get("stream"):
            [answer] = await _answers(answering)
            keep(answer)
            return _json(openai_responses.response(body, answer, name))
        events = openai_responses.Events(body, name)
        return await _stream(request, answering, events, openai_chat.error, keep)

    async def _messages(self, session: Session, request: web.Request) -> web.StreamResponse:
        body = await _body(request)
        asked = anthropic_messages.parse(body)
        answering = _ask(session, asked, request, body)
        if not body.get("stream"):
            [answer] = await _answers(answering)
            return _json(anthropic_messages.message(asked, answer))
        events = anthropic_messages.Events(asked)
        return await _stream(request, answering, events, _anthropic_error)

    async def _count_tokens(self, session: Session, request: web.Request) -> web.StreamResponse:
        asked = anthropic_messages.parse(await _body(request))
        return _json({"input_tokens": session.count_tokens(asked)})

    async def _models(self, session: Session, request: web.Request) -> web.StreamResponse:
        return _json({"object": "list", "data": [_model_card(MODEL)]})

    async def _model(self, session: Session, request: web.Request) -> web.StreamResponse:
        return _json(_model_card(request.match_info["model"]))

    # -- the attempt

    async def _task(self, session: Session, request: web.Request) -> web.StreamResponse:
        return _json(session.task_fields)

    async def _reward(self, session: Session, request: web.Request) -> web.StreamResponse:
        body = await _body(request)
        told = body.get("reward_info", body)
        reward = told.get("reward") if isinstance(told, dict) else None
        if isinstance(reward, bool) or not isinstance(reward, int | float):
            raise BadRequest(f"reward must be a number, got {reward!r:.40}")
        if not math.isfinite(reward):
            raise BadRequest(f"reward must be finite, got {reward}")
        explanation, agent = told.get("explanation"), told.get("agent")
        if agent is not None and not (isinstance(agent, str) and is_name(agent)):
            raise BadRequest(f"agent: {NAME_RULE}, got {agent!r:.40}")
        explained = None if explanation is None else str(explanation)
        session.set_reward(float(reward), explained, agent)
        if told.get("finished"):
            session.finished.set()
        return _json({"session": session.id, "reward": reward})

    async def _finish(self, session: Session, request: web.Request) -> web.StreamResponse:
        body = await _body(request) if request.can_read_body else {}
        answer = body.get("answer")
        if answer is not None and not isinstance(answer, str):
            raise BadRequest(f"answer must be a text, got {answer!r:.40}")
        session.answer = answer
        session.finished.set()
        return _json({"session": session.id})


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = orjson.loads(await request.read())
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


def _ask(
    session: Session, asked: ChatRequest, request: web.Request, body: Mapping[str, Any]
) -> Answering:
    """Begin to answer a request, or find the answer that a repeated one got before."""
    agent = session.agent_of(asked, request.headers.get(HEADER))
    asked = replace(asked, agent=agent, streamed=bool(body.get("stream")))
    place = [request.path.rpartition("/v1/")[2], asked.agent]
    sent = orjson.dumps([*place, body], option=orjson.OPT_SORT_KEYS)
    repeated = request.headers.get(_RETRIES, "0") not in ("", "0")
    digest = hashlib.sha256(sent).hexdigest()
    return session.ask(asked, digest, repeated=repeated)


async def _answers(answering: Answering) -> list[ChatAnswer]:
    return await asyncio.shield(answering.made)


async def _stream(
    request: web.Request,
    answering: Answering,
    events: Events,
    refusal: _Refusal,
    keep: Callable[[ChatAnswer], None] = lambda answer: None,
) -> web.StreamResponse:
    """Server-sent events. What is said leaves as it is sampled; the end, when the turn is stored.

    `keep`: is given the answer before the end leaves.
    """
    if not answering.begun:
        await answering.news(_ALIVE_S)
    if answering.made.done():
        answering.made.result()  # an error gets its status while no header has left
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    )
    await response.prepare(request)
    try:
        while not answering.made.done():
            sent = _lines(events.so_far(answering.said, answering.prompt_tokens))
            await response.write(sent or b": the answer is not there yet\n\n")
            await answering.news(_ALIVE_S)
        try:
            answers = answering.made.result()
            keep(answers[0])
            last = _lines(events.end(answers))
        except Exception as error:
            _, kind, code, message = _described(error)
            last = _lines([("error", orjson.dumps(refusal(message, kind, code)).decode())])
        await response.write(last)
        await response.write_eof()
    except ClientConnectionResetError:
        pass  # the client hung up; it may ask again
    return response


def _lines(events: Iterable[Event]) -> bytes:
    return "".join(
        f"event: {name}\ndata: {data}\n\n" if name else f"data: {data}\n\n" for name, data in events
    ).encode()


def _described(error: Exception) -> tuple[int, str, str | None, str]:
    """Status, kind, code and message for an error.

    Clients repeat a request that got 500 or more, as they should where a service is away.
    """
    match error:
        case LimitReached():
            code = "context_length_exceeded"
            return 400, "invalid_request_error", code, f"{error} (--{error.stop_reason.value})"
        case Diverged():
            return 400, "invalid_request_error", "diverged", str(error)
        case SessionOver():
            return 410, "invalid_request_error", "session_over", str(error)
        case web.HTTPRequestEntityTooLarge():
            limit = _LARGEST_BODY // 2**20
            return 413, "invalid_request_error", None, f"the body is larger than {limit} MiB"
        case ContextFull():
            return 400, "invalid_request_error", "context_length_exceeded", str(error)
        case BadRequest() | TemplateRefusal() | EndpointRefused() | NamingError():
            return 400, "invalid_request_error", None, str(error)
        case InferenceError() | InfrastructureFailure():
            return 503, "api_error", None, text_of(error)
        case _:
            return 500, "api_error", None, text_of(error)


def _anthropic_error(message: str, kind: str, code: str | None) -> dict[str, Any]:
    return anthropic_messages.error(message, kind)


def _model_card(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "agentrl"}


def _json(
    body: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    return web.Response(
        body=orjson.dumps(body),
        status=status,
        content_type="application/json",
        headers=headers,
    )
