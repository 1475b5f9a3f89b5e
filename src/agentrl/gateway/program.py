"""The agent `program`: an attempt is driven by the user's own code, which asks the gateway.

    --agent_name program --agent_command "python my_agent.py"     a command (`command.py`)
    --agent_name program --agent_entry my_agent.py:run            a function (`function.py`)

Its answer is what the code gives, or else the model's last one. A reward that it reports is the
score; without one, the task's scorer decides.

An attempt that follows another one begins the code again, and what the code asks again is answered
from the turns that are stored (`rollout/agents/recorded.py`). Only what is new is sampled.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

from agentrl.configs import Config, ConfigError
from agentrl.databases.documents import Record, ToolResult
from agentrl.gateway.agents_of_program import ProgramAgents, agents_of, check_agents
from agentrl.gateway.command import Command, run_command
from agentrl.gateway.function import Entry, load_entry, run_function
from agentrl.gateway.outcome import Outcome
from agentrl.gateway.server import Gateway
from agentrl.gateway.session_keys import SessionKeys
from agentrl.gateway.session_sampler import SessionSampler
from agentrl.gateway.sessions import Session
from agentrl.rollout.agents.base import SamplerResources

OUTPUT = "program"  # the name under which its output is stored as a result
Drive = Callable[[Session, str, Gateway], Awaitable[Outcome]]


@dataclass(frozen=True)
class ProgramResources(SamplerResources):
    """Resources of programs. `drive`: runs the user's code for a session with its URL, which
    belongs to the gateway. `agents`: those of a program."""

    gateway: Gateway
    drive: Drive
    agents: ProgramAgents


class ProgramSampler(SessionSampler):
    """An attempt by a program."""

    resources: ProgramResources

    @classmethod
    def check_flags(cls, config: Config) -> None:
        """Raise `ConfigError` if the code is not given or cannot be used."""
        _drive(config)
        check_agents(config)

    @classmethod
    @asynccontextmanager
    async def extend_resources(cls, shared: SamplerResources) -> AsyncIterator[ProgramResources]:
        """Start the gateway, and open the models of other agents.

        Raises `ConfigError` if the code is not given or cannot be used.
        """
        config = shared.config
        drive = _drive(config)
        check_agents(config)
        async with (
            agents_of(config) as agents,
            Gateway(SessionKeys()).running() as gateway,
        ):
            yield ProgramResources(**vars(shared), gateway=gateway, drive=drive, agents=agents)

    async def run(self) -> Record:
        """Run the code until it ends, or says that it is done.

        Raises its error, and ValueError if it never asks the model.
        """
        gateway = self.resources.gateway
        key = gateway.keys.key_of(self.record.id)
        session = Session(self, self.resources.agents, key)
        async with gateway.session(session) as url:
            outcome = await self.resources.drive(session, url, gateway)
        if outcome.output:
            await self._keep_output(outcome.output)
        return self.conclude(session, outcome.answer, outcome.error)

    async def _keep_output(self, output: str) -> None:
        """Store what the program wrote, for a person to read."""
        result = ToolResult(
            id=f"{self.record.id}-{OUTPUT}", record_id=self.record.id, tool=OUTPUT, text=output,
            created_at=datetime.now(UTC),
        )  # fmt: skip
        await self.resources.records.add_tool_result(result)


def _drive(config: Config) -> Drive:
    """How the user's code is run. Raises `ConfigError`."""
    command, entry = config.agent.agent_command, config.agent.agent_entry
    if (command is None) == (entry is None):
        raise ConfigError(
            "--agent_name program: give --agent_command, a command that runs an attempt, or "
            "--agent_entry, a function that does"
        )
    if entry is not None:
        return partial(_run_entry, load_entry(entry))
    return partial(run_command, Command.of(config))


async def _run_entry(entry: Entry, session: Session, url: str, gateway: Gateway) -> Outcome:
    return await run_function(entry, session, url)
