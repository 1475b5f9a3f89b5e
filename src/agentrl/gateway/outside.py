"""The agent `outside`: attempts are made by programs on other machines, which ask for tasks.

A gateway (`gateway_process.py`) hands an attempt's session to a client that asks. The attempt ends
when the client says so. A client that is silent for `--session_idle` has ended too: its session is
finished if it has its reward or one of an agent, and is lost otherwise.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import ClassVar, Self

from agentrl.configs import Config, ConfigError
from agentrl.databases.documents import Record
from agentrl.gateway.agents_of_program import ProgramAgents, agents_of, check_agents
from agentrl.gateway.desk import Desk
from agentrl.gateway.reported import REWARD
from agentrl.gateway.server import Gateway
from agentrl.gateway.session_sampler import SessionSampler
from agentrl.gateway.sessions import Session
from agentrl.rollout.agents import OUTSIDE
from agentrl.rollout.agents.base import SamplerResources
from agentrl.rollout.agents.recorded import RecordedAnswers
from agentrl.rollout.scheduling.attempt import HandedBack, WentSilent


@dataclass(frozen=True)
class OutsideResources(SamplerResources):
    """Resources of attempts from outside. `agents`: those of a program."""

    agents: ProgramAgents


class OutsideSampler(SessionSampler):
    """An attempt by a program on another machine."""

    resources: OutsideResources
    desk: ClassVar[Desk | None] = None
    gateway: ClassVar[Gateway | None] = None

    @classmethod
    def at(cls, desk: Desk, gateway: Gateway) -> type[Self]:
        """A sampler class whose attempts meet their clients at this desk."""
        # Its own, so that its resources are opened in its name, and not in this class's.
        own = vars(OutsideSampler)["extend_resources"]
        here = {"desk": desk, "gateway": gateway, "extend_resources": own}
        return type(cls.__name__, (cls,), here)

    @classmethod
    def check_flags(cls, config: Config) -> None:
        """Raise `ConfigError` if the flags of agents cannot be used."""
        check_agents(config)

    @classmethod
    @asynccontextmanager
    async def extend_resources(cls, shared: SamplerResources) -> AsyncIterator[OutsideResources]:
        """Open the models of other agents. Raises `ConfigError` in a process without a gateway."""
        if cls.desk is None:
            raise ConfigError(
                f"--agent_name {OUTSIDE}: the attempts of such a run are made by programs that ask "
                "`agentrl gateway` for tasks; start that, and no other sampler"
            )
        async with agents_of(shared.config) as agents:
            yield OutsideResources(**vars(shared), agents=agents)

    async def _find_recorded(self) -> RecordedAnswers | None:
        """As always where the attempt begins. Where it goes on, its client asks what follows."""
        if not self.claim.taken_over:
            return await super()._find_recorded()
        if self.claim.fork is not None:
            raise HandedBack("a fork begins anew when its gateway was killed")
        return None

    async def run(self) -> Record:
        """Hand the session to a client, and wait until it is done with it.

        Raises `HandedBack` if no client wants it, and `WentSilent`.
        """
        desk, gateway = self.desk, self.gateway
        assert desk is not None and gateway is not None, "checked when its resources were opened"
        key = gateway.keys.key_of(self.record.id)
        session = Session(self, self.resources.agents, key)
        if self.claim.taken_over:
            records = self.resources.records
            turns = (await records.turns([self.record.id]))[self.record.id]
            session.resume(turns, await records.tool_list(self.record))
        async with gateway.session(session):
            if self.claim.taken_over:
                desk.is_there(session.id)
            else:
                await desk.meet(session, self.claim.task.task_id)
                session.heard_at = time.monotonic()
            await self._until_over(session)
        return self.conclude(session, None, None)

    async def _until_over(self, session: Session) -> None:
        idle_s = self.resources.config.agent.session_idle
        while not session.finished.is_set():
            left = session.heard_at + idle_s - time.monotonic()
            if session.is_busy:
                left = idle_s
            if left <= 0:
                rewarded = REWARD in self.record.scores or self.record.agent_rewards
                if rewarded and session.last is not None:
                    return
                raise WentSilent(f"its client asked nothing for {idle_s:g} s (--session_idle)")
            try:
                await asyncio.wait_for(session.finished.wait(), left)
            except TimeoutError:
                continue
