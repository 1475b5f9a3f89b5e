"""All tools of a process, and the tools as one record uses them.

A failed call becomes an error text for the model. Exceptions are raised only if a record's own
session is refused, or a server is unreachable. With `--on_tool_outage text`, the model also gets a
text for an unreachable server during a call.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self

from agentrl.configs import AgentConfig, comma_separated
from agentrl.databases.documents import ResultFile, Task
from agentrl.databases.records import RecordLedger
from agentrl.failures import InfrastructureFailure
from agentrl.foreign_text import utf8_text
from agentrl.limited_httpx import tls_context
from agentrl.rollout.tools.aggregator import AggregatedServer, Aggregator
from agentrl.rollout.tools.calls import (
    CREATE_KWARGS_KEY,
    RECORD_ID_KEY,
    TASK_ID_KEY,
    Callee,
    CallFailed,
    ToolRequest,
    ToolServerUnreachable,
    why_unsendable,
)
from agentrl.rollout.tools.catalogue import Catalogue, Effect, catalogue, effect_of
from agentrl.rollout.tools.results import (
    Reading,
    ToolAnswer,
    kept_result,
    read_result,
    shorten,
)
from agentrl.rollout.tools.sandboxes import create_kwargs
from agentrl.rollout.tools.server import MCPServer
from agentrl.rollout.tools.server_list import (
    ServerSpec,
    ToolTransport,
    read_servers,
    refuse_twins,
    refuse_unknown_servers,
    wanted_servers,
)

log = logging.getLogger(__name__)

Server = MCPServer | AggregatedServer
OnOutage = Callable[[InfrastructureFailure], None]


def _nobody_told(failure: InfrastructureFailure) -> None:
    """An `OnOutage`: the error is raised from the call in any case."""


class ToolBox:
    """The tools of all servers of a run; may be empty.

    `max_result_chars`: characters of a result that the model reads. `records`: stores whole
    results; None stores nothing. `tell_model`: whether the model gets an error text for an outage
    (`--on_tool_outage text`).
    """

    def __init__(
        self,
        servers: Sequence[Server],
        tools: Catalogue,
        max_result_chars: int,
        records: RecordLedger | None,
        tell_model: bool,
    ) -> None:
        offered = {offer.server for offer in tools.tools.values()}
        self.servers = {server.name: server for server in servers if server.name in offered}
        self.catalogue = tools
        self.schemas = tools.schemas
        self.max_result_chars = max_result_chars
        self.records = records
        self.tell_model = tell_model
        self._named_in_vain: set[str] = set()

    def session(
        self, task: Task, record_id: str, on_outage: OnOutage = _nobody_told
    ) -> "ToolSession":
        """The tools for one record; an async context manager around its conversation.

        `on_outage`: called for every outage that the model does not get as a text.
        """
        return ToolSession(self, task, record_id, on_outage)

    def warn_of(self, names: Sequence[str], why: str) -> None:
        """Log once for each name in tasks' `tools_kwargs` why it has no effect."""
        for name in set(names) - self._named_in_vain:
            self._named_in_vain.add(name)
            log.warning("tools_kwargs of tasks name %r: %s", name, why)


class ToolSession:
    """The tools for one record. Leaving it closes the record's own sessions."""

    def __init__(self, box: ToolBox, task: Task, record_id: str, on_outage: OnOutage) -> None:
        self._box = box
        self._task = task
        self._record_id = record_id
        self._on_outage = on_outage
        self._callees: dict[str, Callee] = {}
        self._meta: dict[str, Mapping[str, Any]] = {}
        self._stack = AsyncExitStack()
        self._n_kept = 0

    async def __aenter__(self) -> Self:
        """Open the record's own sessions. Raises `ToolSessionFailed` or `ToolServerUnreachable`."""
        given, unknown = create_kwargs(self._task.fields, self._box.catalogue)
        self._box.warn_of(unknown, "there is no such tool or server")
        meta = {TASK_ID_KEY: self._task.task_id, RECORD_ID_KEY: self._record_id}
        async with AsyncExitStack() as stack:
            for name, server in self._box.servers.items():
                self._callees[name] = server
                self._meta[name] = meta
                if isinstance(server, AggregatedServer):
                    if name in given:
                        self._box.warn_of([name], "an aggregator takes no create_kwargs")
                    continue
                if server.per_record:
                    session = server.session_for(given.get(name, {}), meta)
                    self._callees[name] = await stack.enter_async_context(session)
                if name in given and not server.creates_sessions:
                    self._meta[name] = {**meta, CREATE_KWARGS_KEY: given[name]}
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self._stack.aclose()
        finally:
            # Usually the sampler's, which has this session: the record would wait for the garbage
            # collector.
            self._on_outage = _nobody_told

    def effect(self, name: str) -> Effect:
        """What a call of this tool leaves behind."""
        offer = self._box.catalogue.tools.get(name)
        if offer is None:
            return Effect.NONE
        server = self._box.servers[offer.server]
        return effect_of(offer, server.per_record, server.resettable)

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolAnswer:
        """Call a tool. Failures of the tool are error texts, not exceptions.

        Raises `ToolServerUnreachable` for an outage, unless the model gets a text for it.
        """
        started_at, began = datetime.now(UTC), time.monotonic()
        reading = await self._read(name, arguments)
        latency_s = time.monotonic() - began
        text = shorten(reading.text, self._box.max_result_chars)
        whole = reading.text if text is not reading.text else None
        kept = None
        if whole is not None or reading.files:
            kept = await self.keep(name, reading.text, reading.files)
        lasting = self.effect(name) is Effect.LASTING
        return ToolAnswer(text, reading.is_error, started_at, latency_s, whole, kept, lasting)

    async def keep(self, tool: str, text: str, files: Sequence[ResultFile] = ()) -> str | None:
        """Store a whole result; returns its `_id`, or None if results are not stored.

        `call` does this for results that it cuts.
        """
        if self._box.records is None:
            return None
        key = f"{self._record_id}-result-{self._n_kept}"
        self._n_kept += 1
        result = kept_result(key, self._record_id, tool, text, files)
        await self._box.records.add_tool_result(result)
        return key

    async def _read(self, name: str, arguments: dict[str, Any]) -> Reading:
        offer = self._box.catalogue.tools.get(name)
        if offer is None:
            known = ", ".join(sorted(self._box.catalogue.tools)) or "none"
            return Reading(f"There is no tool {name[:80]!r}. Tools: {known}.", is_error=True)
        if (reason := why_unsendable(arguments)) is not None:
            return Reading(f"The arguments of {name} cannot be sent: {reason}.", is_error=True)
        call = ToolRequest(offer.tool, arguments, self._meta[offer.server])
        try:
            return read_result(await self._callees[offer.server].call(call))
        except CallFailed as failure:
            return Reading(utf8_text(str(failure)), is_error=True)
        except ToolServerUnreachable as outage:
            if self._box.tell_model:
                return Reading(utf8_text(outage.text), is_error=True)
            self._on_outage(outage)
            await asyncio.sleep(0)  # `on_outage` may have cancelled the agent
            raise


@asynccontextmanager
async def open_tools(
    agent: AgentConfig, startup_timeout_s: float, records: RecordLedger | None
) -> AsyncIterator[ToolBox]:
    """Connect to the servers that the flags name. `records`: stores whole results.

    Raises `ConfigError` for an unusable flag or config file, and `ToolServerUnreachable` for a
    server that does not answer within `startup_timeout_s`.
    """
    specs = read_servers(agent)
    if specs:
        await asyncio.to_thread(tls_context)  # in the loop it would hold up all other records
    async with AsyncExitStack() as stack:
        opening = [asyncio.create_task(_open(spec, startup_timeout_s, stack)) for spec in specs]
        try:
            found = [server for servers in await asyncio.gather(*opening) for server in servers]
        finally:
            for task in opening:
                task.cancel()
            if opening:
                await asyncio.wait(opening)
        servers = _picked(found, specs, agent)
        refuse_twins([server.name for server in servers])
        tools = catalogue(
            [offer for server in servers for offer in server.offers],
            comma_separated(agent.mcp_allow_tools),
            comma_separated(agent.mcp_block_tools),
        )
        for server in servers:
            names = [name for name, offer in tools.tools.items() if offer.server == server.name]
            kind = "a session for each record" if server.per_record else "shared"
            log.info("tools of %s (%s): %s", server.name, kind, ", ".join(names) or "none")
        if tools.renamed:
            log.warning(
                "several servers have tools of the same name; the model knows them as %s",
                ", ".join(tools.renamed),
            )
        tell_model = agent.on_tool_outage == "text"
        yield ToolBox(servers, tools, agent.max_tool_result_chars, records, tell_model)


async def _open(
    spec: ServerSpec, startup_timeout_s: float, stack: AsyncExitStack
) -> Sequence[Server]:
    if spec.transport is ToolTransport.AGGREGATOR:
        aggregator = await stack.enter_async_context(Aggregator(spec, startup_timeout_s))
        return aggregator.servers
    return [await stack.enter_async_context(MCPServer(spec, startup_timeout_s))]


def _picked(
    found: Sequence[Server], specs: Sequence[ServerSpec], agent: AgentConfig
) -> list[Server]:
    """The servers that `--mcp_server_name` selects, those of aggregators included."""
    wanted = wanted_servers(agent)
    if wanted is None or all(spec.transport is not ToolTransport.AGGREGATOR for spec in specs):
        return list(found)
    refuse_unknown_servers(wanted, [server.name for server in found])
    return [server for server in found if server.name in wanted]
