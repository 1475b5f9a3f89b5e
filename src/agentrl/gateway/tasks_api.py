"""The routes by which programs on other machines come to sessions: ours, and AReaL's names of them.

    POST /tasks/claim                {"timeout": 30, "task_id": ...} -> a task and its session
    POST /rl/start_session           {"task_id": ..., "group_size": 1} -> keys of sessions
    POST /rl/set_reward              {"reward": 1.0, "interaction_id": ...}, with a session's key
    POST /rl/end_session             with a session's key

A claim is answered as soon as an attempt at a task is due: 200 with the task, 204 if none was in
time, 410 with the code `run_finished` when there will be none.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import quote

from aiohttp import web

from agentrl.access import admits
from agentrl.gateway import openai_chat
from agentrl.gateway.desk import Desk, Offer
from agentrl.gateway.exchange import BadRequest, finite, positive
from agentrl.gateway.http_json import json_response, parsing, read_body
from agentrl.gateway.server import Gateway, Refused, answering
from agentrl.gateway.sessions import Session

_PATIENCE_S = 30.0
_MOST_PATIENCE_S = 600.0
_GROUP_S = 60.0  # for all sessions of a group
_LARGEST_GROUP = 1024


class TasksApi:
    """The routes of one gateway. `key`: of the run, which clients show; None: they need none."""

    def __init__(self, gateway: Gateway, desk: Desk, key: str | None) -> None:
        self._gateway = gateway
        self._desk = desk
        self._key = key

    def add_to(self, app: web.Application) -> None:
        """Add the routes."""
        error = openai_chat.error
        for path, handler in (
            ("/tasks/claim", self._claim),
            ("/rl/start_session", self._start_sessions),
        ):
            app.router.add_post(path, answering(self._for_the_run(handler), error))
        for path, of_session in (
            ("/rl/set_reward", self._set_reward),
            ("/rl/end_session", self._end_session),
        ):
            app.router.add_post(path, self._gateway.of_session(of_session, error))

    def _for_the_run(
        self, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def answer(request: web.Request) -> web.StreamResponse:
            if self._key and not admits(request.headers.get("Authorization"), self._key):
                raise Refused(401, "authentication_error", None, "this is not the run's key")
            return await handler(request)

        return answer

    async def _claim(self, request: web.Request) -> web.StreamResponse:
        body = await read_body(request) if request.can_read_body else {}
        patience_s = finite(body.get("timeout", _PATIENCE_S), "timeout")
        if not 0 <= patience_s <= _MOST_PATIENCE_S:
            raise BadRequest(f"timeout must be from 0 to {_MOST_PATIENCE_S:g} s, got {patience_s}")
        offer = await self._desk.ask(_line(body), patience_s)
        if offer is None:
            return web.Response(status=204)
        return await _hand_over(request, [offer], self._shown(request, offer.session), 200)

    def _shown(self, request: web.Request, session: Session) -> dict[str, Any]:
        path = f"/s/{quote(session.id, safe='')}"
        url = f"{request.scheme}://{request.host}{path}"
        return {
            "session": session.id,
            "key": session.key,
            "path": path,
            "url": url,
            "base_url": f"{url}/v1",
            "split": session.split,
            "task": session.task_fields,
        }

    # -- AReaL's

    async def _start_sessions(self, request: web.Request) -> web.StreamResponse:
        body = await read_body(request)
        line = _line(body)
        if line is None:
            raise BadRequest("task_id is missing: the id of a line of the run's tasks")
        size = positive(body.get("group_size"), "group_size") or 1
        if size > _LARGEST_GROUP:
            raise BadRequest(f"group_size is {size}, and may be {_LARGEST_GROUP} at most")
        asked = [asyncio.ensure_future(self._desk.ask(line, _GROUP_S)) for _ in range(size)]
        offers: list[Offer] = []
        try:
            for found in asyncio.as_completed(asked):
                if (offer := await found) is not None:
                    offers.append(offer)
            if len(offers) < size:
                raise Refused(
                    429, "capacity", None, f"no {size} attempts at task {line!r} are due; ask later"
                )
        finally:
            for asking in asked:
                asking.cancel()
            if len(offers) < size:
                for offer in offers:
                    offer.answer(False)
        sessions = [offer.session for offer in offers]
        credentials = [
            {"session_id": session.id, "session_api_key": session.key} for session in sessions
        ]
        first = {"session_id": sessions[0].id, "api_key": sessions[0].key}  # of one session
        shown = {"group_id": body.get("group_id") or line, "sessions": credentials, **first}
        return await _hand_over(request, offers, shown, 201)

    async def _set_reward(self, session: Session, request: web.Request) -> web.StreamResponse:
        body = await read_body(request)
        last = session.last
        if last is None:
            raise BadRequest("No interactions in session: the model was asked nothing")
        given_rewards, one = body.get("rewards") or {}, body.get("interaction_id") or ""
        if not isinstance(given_rewards, dict):
            raise BadRequest(f"rewards must be an object, got {given_rewards!r:.40}")
        if not isinstance(one, str):
            raise BadRequest(f"interaction_id must be a text, got {one!r:.40}")
        rewards: dict[str, Any] = dict(given_rewards)
        if not rewards or "reward" in body:
            rewards[one] = body.get("reward")
        of_turns: dict[str, float] = {}
        whole: float | None = None
        for interaction, given in rewards.items():
            reward = finite(given, "reward")
            turn: int | None = last.turn
            if interaction:
                with parsing():
                    asked = openai_chat.request_of(interaction, session.id)
                turn = None if asked is None else session.turn_of(asked)
            if turn is None:
                raise BadRequest(f"Interaction {interaction} not found in session {session.id}")
            of_turns[f"turn {turn}"] = reward
            if turn == last.turn:
                whole = reward  # the last one is the attempt's
        session.set_reward(whole, further=of_turns)
        await session.keep()
        return json_response({"message": "success"})

    async def _end_session(self, session: Session, request: web.Request) -> web.StreamResponse:
        await session.finish()
        n_turns = 0 if session.last is None else session.last.turn + 1
        return json_response({"message": "success", "interaction_count": n_turns})


async def _hand_over(
    request: web.Request, offers: Sequence[Offer], shown: dict[str, Any], status: int
) -> web.StreamResponse:
    """Send sessions to a client. If it has gone, the sessions are for others."""
    response, arrived = json_response(shown, status), False
    try:
        await response.prepare(request)
        await response.write_eof()
        arrived = request.transport is not None and not request.transport.is_closing()
    finally:
        for offer in offers:
            offer.answer(arrived)
    return response


def _line(body: dict[str, Any]) -> str | None:
    line = body.get("task_id")
    if line is not None and not isinstance(line, str):
        raise BadRequest(f"task_id must be a text, got {line!r:.40}")
    return line
