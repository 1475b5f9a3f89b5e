"""A session of an attempt without a program: the test is the client."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from stage import Stage

from agentrl.gateway.program import ProgramSampler
from agentrl.gateway.sessions import Session


@dataclass(frozen=True)
class Open:
    """An open session: where clients find it, and its sampler."""

    url: str
    session: Session
    sampler: ProgramSampler


@asynccontextmanager
async def opened(stage: Stage, **task: Any) -> AsyncIterator[Open]:
    """A session that ends with the context."""
    async with stage.sampler("program", **task) as sampler:
        assert isinstance(sampler, ProgramSampler)
        gateway = sampler.resources.gateway
        session = Session(sampler, sampler.resources.agents, gateway.keys.key_of(sampler.record.id))
        async with gateway.session(session) as url:
            yield Open(url, session, sampler)
