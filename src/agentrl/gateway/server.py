"""The HTTP server of a sampler process: the APIs that programs speak, for all its sessions.

    /s/{session}/v1/chat/completions, /v1/responses, /v1/messages, /v1/models    the model
    /s/{session}/task, /reward, /finish                                          the attempt

`/sessions/{session}` is another name of `/s/{session}`; without either, the key tells the session.
Each request shows the session's key, as a bearer token or as `x-api-key`.
"""

import hashlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

import orjson
from aiohttp import ClientConnectionResetError, web

from agentrl.databases.tasks import LeaseLost
from agentrl.failures import InfrastructureFailure
from agentrl.foreign_text import text_of
from agentrl.gateway import anthropic_messages, openai_chat, openai_responses
from agentrl.gateway.agents_of_program import HEADER, NamingError
from agentrl.gateway.answering import Answering, NotMade
from agentrl.gateway.exchange import (
    MODEL,
    BadRequest,
    ChatAnswer,
    ChatRequest,
    Event,
    Events,
    finite,
)
from agentrl.gateway.http_json import json_response, parsing, read_body
from agentrl.gateway.session_keys import SessionKeys
from agentrl.gateway.sessions import RunOver, Session, SessionOver
from agentrl.inference.protocol import InferenceError
from agentrl.rollout.agents.limits import LimitReached
from agentrl.rollout.agents.recorded import Diverged
from agentrl.rollout.chat.capabilities import TemplateRefusal
from agentrl.rollout.llm.endpoint import ContextFull, EndpointRefused

_LARGEST_BODY = 64 * 2**20
_SHUTDOWN_S = 1.0  # for requests that are being answered
_ALIVE_S = 10.0  # between signs of life of a stream whose answer is not there yet
_Handler = Callable[[Session, web.Request], Awaitable[web.StreamResponse]]
_Route = Callable[[web.Request], Awaitable[web.StreamResponse]]
_Refusal = Callable[[str, str, str | None], dict[str, Any]]
# Clients of both providers send it with each request: how often they have sent it before.
_RETRIES = "x-stainless-retry-count"


class Refused(Exception):
    """A request that is not answered. `kind`, `code`: as in OpenAI's errors."""

    def __init__(self, status: int, kind: str, code: str | None, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.code = code


class Gateway:
    """The sessions of a process. `url`, `port`: of the server.

    `keys`: of its sessions. `settle`: waits until a session, by its id, is there again that an
    earlier process has left. `run_is_over`: whether the run is finished.
    """

    def __init__(
        self,
        keys: SessionKeys,
        settle: Callable[[str], Awaitable[None]] | None = None,
        run_is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self.url = ""
        self.port = 0
        self.keys = keys
        self._runner: web.AppRunner | None = None
        self._settle = settle
        self._run_is_over = run_is_over
        self._sessions: dict[str, Session] = {}

    @asynccontextmanager
    async def running(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        also: Callable[[web.Application], None] = lambda app: None,
    ) -> AsyncIterator["Gateway"]:
        """Serve, on a free port if it is 0. `also`: adds further routes. Raises `OSError`."""
        app = self._app()
        also(app)
        runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_S
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
            self.port = runner.addresses[0][1]
            self.url = f"http://{host}:{self.port}"
            self._runner = runner
            yield self
        finally:
            self._runner = None
            await runner.cleanup()

    @asynccontextmanager
    async def listening_on(self, listener: socket.socket) -> AsyncIterator[None]:
        """Answer who connects to this socket, too, which is closed at the end."""
        assert self._runner is not None, "the gateway is running"
        site = web.SockSite(self._runner, listener)
        await site.start()
        try:
            yield
        finally:
            await site.stop()

    @asynccontextmanager
    async def session(self, session: Session) -> AsyncIterator[str]:
        """Answer the session's requests; yields its URL."""
        self._sessions[session.id] = session
        try:
            yield f"{self.url}/s/{quote(session.id, safe='')}"
        finally:
            await session.close()
            if self._sessions.get(session.id) is session:
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
            ("POST", "/fail", self._fail, openai_chat.error),
        ]
        for prefix in ("/s/{session}", "/sessions/{session}", ""):
            for method, path, handler, refusal in routes:
                app.router.add_route(method, prefix + path, self.of_session(handler, refusal))
        # Its name in AReaL, whose harnesses have the server itself as their base URL.
        app.router.add_post("/chat/completions", self.of_session(self._chat, openai_chat.error))
        return app

    def of_session(self, handler: _Handler, refusal: _Refusal) -> _Route:
        """The handler of a route of a session, which the request's key or path names."""

        async def answer(request: web.Request) -> web.StreamResponse:
            session = await self._find(request)
            with session.asking():
                return await handler(session, request)

        return answering(answer, refusal)

    async def _find(self, request: web.Request) -> Session:
        """The session of a request. Raises `Refused` and `SessionOver`."""
        shown = request.headers.get("x-api-key", "")
        if not shown:
            shown = request.headers.get("Authorization", "").partition(" ")[2]
        named = request.match_info.get("session")
        # A key in the path is for clients that show none.
        of_path = None if named is None else self.keys.session_of(named)
        found = of_path or self.keys.session_of(shown.strip())
        if found is None or (named is not None and of_path is None and named != found):
            raise Refused(401, "authentication_error", None, "no session has this key")
        if found not in self._sessions and self._settle is not None:
            try:
                await self._settle(found)
            except TimeoutError:
                raise Refused(503, "api_error", None, "the gateway is starting") from None
        if found not in self._sessions and self._run_is_over():
            raise SessionOver(
                f"the attempt {found} has ended: the run is finished and needs no more of it"
            )
        if found not in self._sessions:
            raise SessionOver(f"the attempt {found} has ended, or others have it by now")
        return self._sessions[found]

    # -- the model

    async def _chat(self, session: Session, request: web.Request) -> web.StreamResponse:
        body = await read_body(request)
        with parsing():
            asked = openai_chat.parse(body)
            with_usage = openai_chat.wants_usage(body)

        def form(number: int) -> _Form:
            name = openai_chat.name_of(number, session.id)
            return _Form(
                lambda answers: openai_chat.completion(asked, answers, name),
                openai_chat.Events(asked, name, with_usage=with_usage),
                openai_chat.error,
            )

        return await _answer(session, asked, request, body, form)

    async def _responses(self, session: Session, request: web.Request) -> web.StreamResponse:
        body = await read_body(request)
        previous, earlier = body.get("previous_response_id"), None
        if previous is not None:
            with parsing():
                number = openai_responses.request_of(str(previous), session.id)
            earlier = None if number is None else session.conversation(number)
            if earlier is None:
                raise BadRequest(f"previous_response_id: no answer of this session is {previous!r}")
            if openai_responses.was_instructed(str(previous)):
                earlier = earlier[1:]  # a continuation does not keep the instructions
        with parsing():
            asked = openai_responses.parse(body, earlier or ())

        def form(number: int) -> _Form:
            name = openai_responses.name_of(body, number, session.id)
            return _Form(
                lambda answers: openai_responses.response(body, answers[0], name),
                openai_responses.Events(body, name),
                openai_chat.error,
            )

        return await _answer(session, asked, request, body, form)

    async def _messages(self, session: Session, request: web.Request) -> web.StreamResponse:
        body = await read_body(request)
        with parsing():
            asked = anthropic_messages.parse(body)

        def form(number: int) -> _Form:
            name = anthropic_messages.name_of(number, session.id)
            return _Form(
                lambda answers: anthropic_messages.message(asked, answers[0], name),
                anthropic_messages.Events(asked, name),
                _anthropic_error,
            )

        return await _answer(session, asked, request, body, form)

    async def _count_tokens(self, session: Session, request: web.Request) -> web.StreamResponse:
        body = await read_body(request)
        with parsing():
            asked = anthropic_messages.parse(body)
        return json_response({"input_tokens": session.count_tokens(asked)})

    async def _models(self, session: Session, request: web.Request) -> web.StreamResponse:
        return json_response({"object": "list", "data": [_model_card(MODEL)]})

    async def _model(self, session: Session, request: web.Request) -> web.StreamResponse:
        return json_response(_model_card(request.match_info["model"]))

    # -- the attempt

    async def _task(self, session: Session, request: web.Request) -> web.StreamResponse:
        return json_response(session.task_fields)

    async def _reward(self, session: Session, request: web.Request) -> web.StreamResponse:
        body = await read_body(request)
        told = body.get("reward_info", body)
        if not isinstance(told, dict):
            raise BadRequest(f"reward_info must be an object, got {told!r:.40}")
        of_parts = told.get("rewards")
        if of_parts is not None and not isinstance(of_parts, dict):
            raise BadRequest(f"rewards must be an object, got {of_parts!r:.40}")
        reward = told.get("reward")
        if "reward" in told or not of_parts:
            reward = finite(reward, "reward")
        session.set_reward(reward, told.get("explanation"), told.get("agent"), of_parts or {})
        if told.get("finished"):
            await session.finish(session.answer)
        else:
            await session.keep()
        return json_response({"session": session.id, "reward": reward})

    async def _finish(self, session: Session, request: web.Request) -> web.StreamResponse:
        body = await read_body(request) if request.can_read_body else {}
        answer = body.get("answer")
        if answer is not None and not isinstance(answer, str):
            raise BadRequest(f"answer must be a text, got {answer!r:.40}")
        await session.finish(answer)
        return json_response({"session": session.id})

    async def _fail(self, session: Session, request: web.Request) -> web.StreamResponse:
        body = await read_body(request)
        session.fail(str(body.get("error") or "the program failed and did not say why"))
        return json_response({"session": session.id})


def answering(handler: _Route, refusal: _Refusal) -> _Route:
    """The handler of a route, with errors in its provider's form."""

    async def answer(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except ClientConnectionResetError:
            return web.Response()  # the client hung up; it may ask again
        except Exception as error:
            status, kind, code, message = _described(error)
            # Clients repeat other errors, some of them 409 and 429 too.
            headers = {"x-should-retry": "false"} if status in (400, 410) else {}
            return json_response(refusal(message, kind, code), status, headers)

    return answer


@dataclass(frozen=True, slots=True)
class _Form:
    """How an API writes an answer: as a whole, as events, and as an error."""

    whole: Callable[[list[ChatAnswer]], dict[str, Any]]
    events: Events
    refusal: _Refusal


async def _answer(
    session: Session,
    asked: ChatRequest,
    request: web.Request,
    body: Mapping[str, Any],
    form_of: Callable[[int], _Form],
) -> web.StreamResponse:
    """Answer a request, or give a repeated one the answer that it got before.

    `form_of`: the form of an answer, by the number of its request.
    """
    agent = session.agent_of(asked, request.headers.get(HEADER))
    streamed = bool(body.get("stream"))
    asked = replace(asked, agent=agent, streamed=streamed)
    place = [request.path.rpartition("/v1/")[2], agent]
    with parsing():
        sent = orjson.dumps([*place, body], option=orjson.OPT_SORT_KEYS)
    repeated = request.headers.get(_RETRIES, "0") not in ("", "0")
    digest = hashlib.blake2b(sent, digest_size=16).hexdigest()
    given = session.ask(asked, digest, repeated=repeated)
    answering, arrived = given.answering, False
    try:
        form = form_of(answering.number)
        response: web.StreamResponse
        if streamed:
            response = await _stream(request, answering, form)
        else:
            response = json_response(form.whole(await answering.answers()))
            await response.prepare(request)
            await response.write_eof()
        arrived = True
        return response
    finally:
        session.delivered(given, whole=arrived)


async def _stream(request: web.Request, answering: Answering, form: _Form) -> web.StreamResponse:
    """Server-sent events. What is said leaves as it is sampled; the end when the turn is stored."""
    if not answering.begun:
        await answering.news(_ALIVE_S)
    if answering.made.done():
        answering.result()  # an error gets its status while no header has left
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    )
    await response.prepare(request)
    while not answering.made.done():
        sent = _lines(form.events.so_far(answering.said, answering.prompt_tokens))
        await response.write(sent or b": the answer is not there yet\n\n")
        await answering.news(_ALIVE_S)
    try:
        last = _lines(form.events.end(answering.result()))
    except Exception as error:
        _, kind, code, message = _described(error)
        last = _lines([("error", orjson.dumps(form.refusal(message, kind, code)).decode())])
    await response.write(last)
    await response.write_eof()
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
        case Refused():
            return error.status, error.kind, error.code, str(error)
        case LimitReached():
            code = "context_length_exceeded"
            return 400, "invalid_request_error", code, f"{error} (--{error.stop_reason.value})"
        case Diverged():
            return 400, "invalid_request_error", "diverged", str(error)
        case RunOver():
            message = "the run is finished: there are no more tasks"
            return 410, "invalid_request_error", "run_finished", message
        case SessionOver() | LeaseLost():
            return 410, "invalid_request_error", "session_over", str(error)
        case web.HTTPRequestEntityTooLarge():
            limit = _LARGEST_BODY // 2**20
            return 413, "invalid_request_error", None, f"the body is larger than {limit} MiB"
        case ContextFull():
            return 400, "invalid_request_error", "context_length_exceeded", str(error)
        case BadRequest() | TemplateRefusal() | EndpointRefused() | NamingError():
            return 400, "invalid_request_error", None, str(error)
        case InferenceError() | InfrastructureFailure() | NotMade():
            return 503, "api_error", None, text_of(error)
        case _:
            return 500, "api_error", None, text_of(error)


def _anthropic_error(message: str, kind: str, code: str | None) -> dict[str, Any]:
    return anthropic_messages.error(message, kind)


def _model_card(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "agentrl"}
