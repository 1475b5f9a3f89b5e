"""The HTTP server of the pages: routes, who may look, and what is said when something is missing.

Who has the secret may look: it is in the address that is printed, and a browser then keeps it in a
cookie. Browsers share the cookies of a host among its ports, so the cookie's name is the secret's,
and requests that write have to come from these pages.
"""

import hashlib
import hmac
import logging
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any, Literal, Self
from urllib.parse import quote

import orjson
from aiohttp import web
from jinja2 import Environment, PackageLoader, StrictUndefined
from pymongo.errors import OperationFailure, PyMongoError

from agentrl import __version__
from agentrl.configs import ConfigError
from agentrl.databases.connection import DatabaseUnreachable, reason_of
from agentrl.databases.documents import Note, Record
from agentrl.databases.notes import NoteMoved, write_note
from agentrl.launcher.run_state import State
from agentrl.launcher.trajectory import read_turns, trajectory_json
from agentrl.launcher.trajectory_tokens import read_tokens
from agentrl.viewer.address import AddressError, time_in
from agentrl.viewer.compare_page import Choice, Side, chosen, compare, oldest, read_side, sides
from agentrl.viewer.failures_page import read_failures_page
from agentrl.viewer.group_page import read_group_page, read_tasks
from agentrl.viewer.places import ANSWER_S, Place, Places
from agentrl.viewer.records_page import RecordsPage, read_records_page
from agentrl.viewer.run_page import read_charts, read_run_page
from agentrl.viewer.shown import FILTERS, clock
from agentrl.viewer.step_page import read_step_page
from agentrl.viewer.trajectory_page import read_trajectory_page
from agentrl.viewer.turn_request import curl_command

log = logging.getLogger(__name__)

_SAFE = {
    # Pages load only what this server has, and no other site shows them in a frame.
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; "
    "style-src 'self' 'unsafe-inline'; frame-ancestors 'none'; form-action 'self'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",  # with none, forms would not say where they come from
}
_OWN_PAGE = re.compile(r"/(?![/\\])[!-~]*")  # an address that leads to no other server
_LARGEST_BODY = 256 * 1024
_Page = Callable[[web.Request, Place], Awaitable[web.Response]]


class Viewer:
    """The pages about the runs of `places`. `secret`: what a visitor must show, a token of the
    printed address or a password. `gpu_hour_price`: with it costs are shown."""

    def __init__(
        self,
        places: Places,
        secret: str,
        kind: Literal["token", "password"] = "token",
        gpu_hour_price: float | None = None,
    ) -> None:
        self._places = places
        self._secret = secret
        self._kind = kind
        self._cookie = hmac.new(secret.encode(), b"agentrl view", hashlib.sha256).hexdigest()
        name = hmac.new(secret.encode(), b"name of the cookie", hashlib.sha256).hexdigest()
        self._cookie_name = f"agentrl-view-{name[:12]}"
        self._pages = Environment(
            loader=PackageLoader("agentrl.viewer"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._pages.filters.update(FILTERS)
        self._pages.globals.update(version=__version__, href=_href, gpu_hour_price=gpu_hour_price)

    @asynccontextmanager
    async def running(self, host: str, port: int) -> AsyncIterator[int]:
        """Serve; yields the port. Raises OSError if the port is taken."""
        async with self._runner() as runner:
            await web.TCPSite(runner, host, port).start()
            yield runner.addresses[0][1]

    @asynccontextmanager
    async def running_on(self, listening: socket.socket) -> AsyncIterator[None]:
        """Serve on a socket that listens already."""
        async with self._runner() as runner:
            await web.SockSite(runner, listening).start()
            yield

    @asynccontextmanager
    async def _runner(self) -> AsyncIterator[web.AppRunner]:
        runner = web.AppRunner(self._app(), access_log=None)
        await runner.setup()
        try:
            yield runner
        finally:
            await runner.cleanup()

    def _app(self) -> web.Application:
        app = web.Application(middlewares=[self._told, self._admit], client_max_size=_LARGEST_BODY)
        app.router.add_static("/static", str(files("agentrl.viewer") / "static"))
        app.router.add_get("/", self._runs)
        app.router.add_post("/login", self._login)
        run = "/run/{run}"
        for path, page in (
            ("", self._run),
            ("/charts", self._charts),
            ("/steps/{step:\\d{1,9}}", self._step),
            ("/tasks", self._tasks),
            ("/groups/{group}", self._group),
            ("/records", self._records),
            ("/records/{record}", self._record),
            ("/records/{record}/json", self._whole),
            ("/records/{record}/tokens", self._tokens),
            ("/records/{record}/turns/{turn:\\d{1,9}}/curl", self._curl),
            ("/compare", self._compare),
            ("/failures", self._failures),
        ):
            app.router.add_get(run + path, self._of_run(page))
        app.router.add_post(run + "/records/{record}/note", self._note)
        return app

    @web.middleware
    async def _told(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Say in a sentence what is not there, and as a last resort what failed."""
        try:
            return await handler(request)
        except web.HTTPNotFound:
            return self._html("failed.html", 404, reason=f"there is no page {request.path}")
        except web.HTTPException:
            raise
        except Exception as error:  # of what is stored, or of ours: the log has all of it
            log.exception("%s cannot be shown", request.path)
            first = next(iter(str(error).splitlines()), "")
            what = f"{request.path} cannot be shown: {type(error).__name__}: {first[:500]}"
            return self._html("failed.html", 500, reason=f"{what} (the viewer's log has more).")

    @web.middleware
    async def _admit(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        response: web.StreamResponse
        if request.method == "POST" and _foreign(request):
            reason = "this was sent by a page of another address: send it from here"
            return self._html("failed.html", 403, reason=reason)
        shown = request.query.get("token", "")
        if shown and hmac.compare_digest(shown.encode(), self._secret.encode()):
            clean = request.rel_url.without_query_params("token")
            response = web.HTTPSeeOther(clean)
            self._remember(response)
            raise response
        kept = request.cookies.get(self._cookie_name, "")
        known = hmac.compare_digest(kept.encode(), self._cookie.encode())
        open_to_all = request.path == "/login" or request.path.startswith("/static/")
        if not known and request.method == "POST" and "record" in request.match_info:
            return await self._note_refused(request, 401, "this browser is not logged in any more")
        if not known and not open_to_all:
            asked = str(request.rel_url.without_query_params("token"))
            return self._ask_who(asked if request.method == "GET" else "/", wrong=bool(shown))
        response = await handler(request)
        response.headers.update(_SAFE)
        return response

    async def _login(self, request: web.Request) -> web.Response:
        form = await request.post()
        given, there = str(form.get("secret", "")), str(form.get("there", ""))
        if not _OWN_PAGE.fullmatch(there):
            there = "/"
        if not hmac.compare_digest(given.encode(), self._secret.encode()):
            return self._ask_who(there, wrong=True)
        response = web.Response(status=303, headers={"Location": there})
        self._remember(response)
        return response

    def _ask_who(self, there: str, *, wrong: bool) -> web.Response:
        """Instead of a page: the form for the secret, which leads to that page."""
        return self._html("login.html", 401, kind=self._kind, there=there, wrong=wrong)

    def _remember(self, response: web.StreamResponse) -> None:
        response.set_cookie(self._cookie_name, self._cookie, httponly=True, samesite="Strict")

    def _of_run(self, page: _Page) -> Callable[[web.Request], Awaitable[web.Response]]:
        """The handler of a page about a run, which says in one sentence what it lacks."""

        async def answer(request: web.Request) -> web.Response:
            try:
                async with self._places.run(request.match_info["run"]) as place:
                    return await page(request, place)
            except ConfigError as error:
                return self._html("missing.html", 404, reason=str(error), again=False)
            except AddressError as error:
                return self._html("failed.html", 400, reason=str(error))
            except (DatabaseUnreachable, PyMongoError) as error:
                log.warning("%s: %s", request.path, error)
                reason = _why_no_answer(error, "read")
                return self._html("missing.html", 503, reason=reason, again=True)

        return answer

    # -- pages

    async def _runs(self, request: web.Request) -> web.Response:
        try:
            runs = await self._places.runs()
        except DatabaseUnreachable as error:
            return self._html("missing.html", 503, reason=str(error), again=True)
        return self._html("runs.html", runs=runs)

    async def _run(self, request: web.Request, place: Place) -> web.Response:
        page = await read_run_page(place)
        others, missing = await self._opened(" ".join(request.query.getall("with", [])).split())
        return await self._shown(
            "run.html", place, page=page, others=others, missing=missing,
            names=await self._places.names(),
        )  # fmt: skip

    async def _opened(self, names: Sequence[str]) -> tuple[list[str], list[str]]:
        """Those of the runs that can be looked at, and a sentence for each other one."""
        there, missing = [], []
        for name in names:
            try:
                async with self._places.run(name):
                    there.append(name)
            except (ConfigError, DatabaseUnreachable) as error:
                missing.append(str(error))
        return there, missing

    async def _charts(self, request: web.Request, place: Place) -> web.Response:
        """The curves of a run, which the page of another lays over its own."""
        return _json(await read_charts(place, await place.progress.read()))

    async def _step(self, request: web.Request, place: Place) -> web.Response:
        page = await read_step_page(place, int(request.match_info["step"]))
        return await self._shown("step.html", place, page=page)

    async def _tasks(self, request: web.Request, place: Place) -> web.Response:
        lines = await read_tasks(place, request.query)
        return await self._shown("tasks.html", place, lines=lines, asked=request.query)

    async def _group(self, request: web.Request, place: Place) -> web.Response:
        page = await read_group_page(place, request.match_info["group"])
        if page is None:
            return self._none(place, "group", request.match_info["group"])
        return await self._shown("group.html", place, page=page)

    async def _records(self, request: web.Request, place: Place) -> web.Response:
        try:
            page = await read_records_page(place, request.query)
        except (ConfigError, AddressError) as error:
            refused = str(error).removeprefix("--where").lstrip(": ")
            page = RecordsPage(request.query, [], [], error=refused)
            # The database is not asked again: its time for this page may be over.
            return self._html("records.html", 400, place=place, row=None, live=False, page=page)
        return await self._shown("records.html", place, page=page)

    async def _record(self, request: web.Request, place: Place) -> web.Response:
        page = await read_trajectory_page(place, request.match_info["record"])
        if page is None:
            return self._none(place, "record", request.match_info["record"])
        return await self._shown("trajectory.html", place, page=page)

    async def _tokens(self, request: web.Request, place: Place) -> web.Response:
        found = await place.database.records.find_one({"_id": request.match_info["record"]})
        if found is None:
            return _json(None)
        tokens = await read_tokens(place.database, Record.from_mongo(found))
        return _json(tokens)

    async def _curl(self, request: web.Request, place: Place) -> web.Response:
        """The command that asks a service for a turn again, to be copied."""
        turns = await read_turns(place.database, request.match_info["record"])
        command = curl_command(turns, int(request.match_info["turn"]))
        if command is None:
            return self._none(place, "turn with tokens", request.match_info["turn"])
        return web.Response(text=command, headers=_SAFE)

    async def _whole(self, request: web.Request, place: Place) -> web.Response:
        """A Record with its turns and tokens, to be copied."""
        page = await read_trajectory_page(place, request.match_info["record"])
        if page is None:
            return self._none(place, "record", request.match_info["record"])
        answer = None if page.task is None else page.task.answer
        return _json(trajectory_json(page.record, page.turns, answer))

    async def _failures(self, request: web.Request, place: Place) -> web.Response:
        page = await read_failures_page(place)
        return await self._shown("failures.html", place, page=page)

    async def _compare(self, request: web.Request, place: Place) -> web.Response:
        other = request.query.get("run", "").strip() or place.name
        choices = await sides(place)
        async with self._places.run(other) as second_place:
            others = await sides(second_place)
            first, missing = await _side(
                place, choices, request.query.get("first"), oldest(choices)
            )
            second, also = await _side(second_place, others, request.query.get("second"), 0)
        outcome = compare(first, second) if first and second else None
        return await self._shown(
            "compare.html", place, choices=choices, others=others, other=other,
            first=first, second=second, outcome=outcome, names=await self._places.names(),
            missing=[each for each in dict.fromkeys((missing, also)) if each],
        )  # fmt: skip

    async def _note(self, request: web.Request) -> web.Response:
        run, record = request.match_info["run"], request.match_info["record"]
        form = _NoteForm.of(await request.post())
        try:
            seen = time_in({"changed_at": form.changed_at}, "changed_at")
            async with self._places.run(run) as place:
                await write_note(place.database, record, form.text.strip(), form.each_label(), seen)
        except NoteMoved as error:
            return await self._note_refused(request, 409, str(error), error.found)
        except ConfigError as error:
            return await self._note_refused(request, 404, str(error))
        except ValueError as error:
            return await self._note_refused(request, 400, str(error))
        except (DatabaseUnreachable, PyMongoError) as error:
            log.warning("%s: %s", request.path, error)
            return await self._note_refused(request, 503, _why_no_answer(error, "write"))
        return web.Response(status=303, headers={"Location": _href("run", run, "records", record)})

    async def _note_refused(
        self, request: web.Request, status: int, reason: str, there: Note | None = None
    ) -> web.Response:
        """Why a note is not kept, with its text. `there`: what somebody else wrote meanwhile."""
        form = _NoteForm.of(await request.post())
        if status == 409:  # who sends it again has seen what is there
            form = replace(form, changed_at=clock(there.changed_at if there else None))
        return self._html(
            "note.html", status, reason=reason, form=form, there=there,
            run=request.match_info["run"], record=request.match_info["record"],
        )  # fmt: skip

    def _none(self, place: Place, kind: str, name: str) -> web.Response:
        reason = f"run {place.name} has no {kind} {name!r}"
        return self._html("missing.html", 404, reason=reason, again=False)

    async def _shown(self, template: str, place: Place, **shown: Any) -> web.Response:
        """A page about a run. That of a live one keeps itself fresh."""
        row = await place.row()
        live = row is not None and row.state is State.LIVE
        return self._html(template, place=place, row=row, live=live, **shown)

    def _html(self, template: str, status: int = 200, **shown: Any) -> web.Response:
        text = self._pages.get_template(template).render(**shown)
        return web.Response(text=text, status=status, content_type="text/html", headers=_SAFE)


@dataclass(frozen=True)
class _NoteForm:
    """What a visitor has typed. `changed_at`: of the note that was there then, else empty."""

    text: str
    labels: str
    changed_at: str

    @classmethod
    def of(cls, form: Mapping[str, Any]) -> Self:
        return cls(*(str(form.get(name, "")) for name in ("text", "labels", "changed_at")))

    def each_label(self) -> list[str]:
        return [label.strip() for label in self.labels.split(",") if label.strip()]


def _why_no_answer(error: Exception, what: str) -> str:
    """One sentence. `what`: what was to be done, read or write."""
    match error:
        case PyMongoError(timeout=True):
            return f"The run's database has not answered within {ANSWER_S:g} s: is it at work?"
        case OperationFailure(code=13):  # Unauthorized; the reply has the whole command in it
            return f"The user of DB_URL may not {what} in the run's database"
        case OperationFailure():
            return f"The run's database refuses: {(error.details or {}).get('errmsg', error)}"
    return reason_of(error)


def _foreign(request: web.Request) -> bool:
    """Whether a browser sends it from a page of another origin.

    `Sec-Fetch-Site` holds behind a proxy too, which may change `Host`; browsers send it over TLS
    and to this machine. A program sends neither.
    """
    if (site := request.headers.get("Sec-Fetch-Site")) is not None:
        return site not in ("same-origin", "none")
    origin = request.headers.get("Origin")
    return origin is not None and origin.partition("://")[2] != request.host


async def _side(
    place: Place, choices: Sequence[Choice], asked: str | None, default: int
) -> tuple[Side | None, str]:
    """What a form chose to compare, else the choice of this number, and what is not there."""
    if not choices:
        return None, f"{place.name} has no tasks that could be compared"
    choice, missing = chosen(choices, asked, place.name) if asked else (None, "")
    return await read_side(place, *(choice or choices[default])), missing


def _href(*parts: str) -> str:
    """The path of a page, of names that may hold anything."""
    return "/" + "/".join(quote(str(part), safe="") for part in parts)


def _json(value: Any) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type="application/json", headers=_SAFE)
