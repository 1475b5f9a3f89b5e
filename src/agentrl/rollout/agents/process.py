"""The agents of a sampler process: one sampler per claim, of the agent that its task names.

The shared resources of a kind of samplers (tools, for most) are opened once, when the first sampler
is created; kinds that inherit them from the same class share them. They are closed at the end.
"""

import asyncio
from types import TracebackType
from typing import Any, NoReturn, Self

from agentrl.databases.documents import Record
from agentrl.databases.tasks import Claim
from agentrl.failures import InfrastructureFailure
from agentrl.foreign_text import error_line
from agentrl.rollout.agents.agent_registry import find_agent, known_agents, named_agents
from agentrl.rollout.agents.base import AsyncSampler, SamplerResources


class AgentUnavailable(Exception):
    """An agent cannot be started in this process. `__cause__` says why."""


class Agents:
    """Creates samplers.

    `shared`: resources of all kinds of samplers. `default`: the class for tasks without an agent;
    entering opens its resources.
    """

    def __init__(self, shared: SamplerResources, default: type[AsyncSampler]) -> None:
        self.shared = shared
        self._default = default
        self._opened: dict[type[AsyncSampler], asyncio.Future[SamplerResources]] = {}
        self._holders: dict[type[AsyncSampler], asyncio.Task[None]] = {}
        self._closing = asyncio.Event()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Self:
        try:
            await self._resources(self._default)
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._close()

    async def sampler(self, claim: Claim, record: Record) -> AsyncSampler:
        """The sampler of an attempt.

        Raises `AgentUnavailable` if the agent cannot be started; `failed` then raises the reason.
        Raises `InfrastructureFailure` if a dependency is unreachable; the next attempt tries again.
        """
        try:
            kind = self._kind(claim.task.agent_name)
            resources = await self._resources(kind)
        except InfrastructureFailure:
            raise
        except Exception as error:
            if not self._failure.done():
                self._failure.set_exception(error)
                self._failure.exception()  # mark as retrieved: `failed` may not be called
            raise AgentUnavailable(error_line(error)) from error
        return kind(claim, record, resources)

    def with_the_tools_of(self, name: str | None) -> frozenset[str | None]:
        """The agents that share this agent's resources (tools, for most). None: the default."""
        owner = _owner(self._kind(name))
        kinds = [(None, self._default), *named_agents().items()]
        return frozenset(other for other, kind in kinds if _owner(kind) is owner)

    async def failed(self) -> NoReturn:
        """Wait until an agent cannot be started; raises the reason."""
        await asyncio.shield(self._failure)
        raise AssertionError("an agent's failure is an exception")

    def _kind(self, name: str | None) -> type[AsyncSampler]:
        return self._default if name is None else find_agent(name)

    async def _resources(self, kind: type[AsyncSampler]) -> SamplerResources:
        owner = _owner(kind)
        if owner not in self._opened:
            self._opened[owner] = asyncio.get_running_loop().create_future()
            holder = self._hold(owner, self._opened[owner])
            self._holders[owner] = asyncio.create_task(holder, name=f"resources {owner.__name__}")
        # Shielded, because many attempts wait for one opening: cancelling one must not cancel it.
        return await asyncio.shield(self._opened[owner])

    async def _hold(
        self, owner: type[AsyncSampler], opened: "asyncio.Future[SamplerResources]"
    ) -> None:
        """Open and close resources in the same task, as anyio requires of MCP clients."""
        try:
            async with owner.extend_resources(self.shared) as resources:
                opened.set_result(resources)
                await self._closing.wait()
        except Exception as error:
            if opened.done():
                raise
            if isinstance(error, InfrastructureFailure):
                del self._opened[owner], self._holders[owner]
            opened.set_exception(error)

    async def _close(self) -> None:
        self._closing.set()
        for owner, holder in self._holders.items():
            if not self._opened[owner].done():
                holder.cancel()
        holders = self._holders.values()
        outcomes: list[Any] = await asyncio.gather(*holders, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome


class OneAgent(Agents):
    """The agents of a process in which one class makes all attempts, whatever tasks name."""

    def _kind(self, name: str | None) -> type[AsyncSampler]:
        return self._default

    def with_the_tools_of(self, name: str | None) -> frozenset[str | None]:
        """All agents: they have one set of tools."""
        return frozenset({None, *known_agents()})


def _owner(kind: type[AsyncSampler]) -> type[AsyncSampler]:
    """The class whose `extend_resources` a kind of samplers uses."""
    return next(base for base in kind.__mro__ if "extend_resources" in vars(base))
