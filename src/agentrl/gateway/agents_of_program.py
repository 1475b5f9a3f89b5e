"""Which agent of a program a request is of, and what becomes of its turns.

x-agentrl-agent: planner           the header of a request names its agent, or else
--agent_of_turn agents.py:name     a function of the user's, or else
agent-1f0c9a                       a name that follows from its system prompt and its tools

--train_agents planner,coder       agents whose turns are trained; left out, all
--agent_models critic=https://...  agents that another model answers, which is never trained
"""

import hashlib
import os
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import orjson

from agentrl.configs import AgentConfig, Config, ConfigError
from agentrl.configs.flag import comma_separated
from agentrl.configs.secret_variables import read_key
from agentrl.configs.user_module import load_user_function
from agentrl.foreign_text import error_line
from agentrl.gateway.exchange import BadRequest, ChatRequest
from agentrl.rollout.llm.endpoint import ChatEndpoint
from agentrl.rollout.llm.models import AgentModel
from agentrl.rollout.tool_calls import tool_names

HEADER = "x-agentrl-agent"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
NAME_RULE = "the name of an agent has 1 to 64 letters, digits, _ or -"
_DIGITS = 6  # of the fingerprint in a name
_KEY_VARIABLE = "OPENAI_API_KEY"

# From the messages and the tools of a request to its agent; None: no name of the user's.
Naming = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]], str | None]


def is_name(text: str) -> bool:
    """Whether an agent may have this name. It is a field's name in the database."""
    return _NAME.fullmatch(text) is not None


class NamingError(ValueError):
    """The function of `--agent_of_turn` fails: the attempt does, because a repetition fails too."""


@dataclass(frozen=True)
class ProgramAgents:
    """The agents of a run's programs.

    `trained`: names of those that are trained; None: all. `naming`: the user's function. `others`:
    the models that answer in place of the run's, by agent.
    """

    trained: frozenset[str] | None = None
    naming: Naming | None = None
    others: Mapping[str, ChatEndpoint] = field(default_factory=dict)

    @classmethod
    def of(cls, config: AgentConfig, others: Mapping[str, ChatEndpoint]) -> "ProgramAgents":
        """Those of the flags. Raises `ConfigError`."""
        trained = comma_separated(config.train_agents)
        for name in trained:
            if not is_name(name):
                raise ConfigError(f"--train_agents {name}: {NAME_RULE}")
        naming = None
        if config.agent_of_turn is not None:
            naming = load_user_function(config.agent_of_turn, "agent_of_turn")
        return cls(frozenset(trained) if trained else None, naming, others)

    def name(self, header: str | None, request: ChatRequest) -> str:
        """The agent of a request. Raises `BadRequest` for a wrong header, and `NamingError`."""
        if header is not None:
            if not is_name(header):
                raise BadRequest(f"{HEADER}: {NAME_RULE}, got {header[:80]!r}")
            return header
        return self._by_function(request) or fingerprint(request)

    def is_trained(self, agent: str) -> bool:
        """Whether the turns of an agent are trained, if the run's model makes them."""
        return self.trained is None or agent in self.trained

    def _by_function(self, request: ChatRequest) -> str | None:
        if self.naming is None:
            return None
        try:
            name = self.naming(deepcopy(request.messages), deepcopy(request.tools))
        except Exception as error:  # the user's code may raise anything
            raise NamingError(f"--agent_of_turn fails: {error_line(error)}") from error
        if name is not None and not (isinstance(name, str) and is_name(name)):
            raise NamingError(f"--agent_of_turn returned {name!r:.80}: {NAME_RULE}")
        return name


def fingerprint(request: ChatRequest) -> str:
    """A name that requests with the same system prompt and the same tools share."""
    system = [message["content"] for message in request.messages if message["role"] == "system"]
    seen = orjson.dumps([system, sorted(tool_names(request.tools))])
    return f"agent-{hashlib.blake2b(seen).hexdigest()[:_DIGITS]}"


def check_agents(config: Config) -> None:
    """Raise `ConfigError` if the flags of agents cannot be used."""
    ProgramAgents.of(config.agent, {})
    for name in models_of(config):
        if name in comma_separated(config.agent.train_agents):
            raise ConfigError(
                f"--train_agents {name}: --agent_models gives it to another model, which cannot be "
                "trained; leave it out of one of the two"
            )


@asynccontextmanager
async def agents_of(config: Config) -> AsyncIterator[ProgramAgents]:
    """The agents of the flags, with the models of others open. Raises `ConfigError`."""
    async with AsyncExitStack() as stack:
        patience_s = config.sampling.startup_timeout
        others = {
            name: await stack.enter_async_context(ChatEndpoint(model, {}, patience_s))
            for name, model in models_of(config).items()
        }
        yield ProgramAgents.of(config.agent, others)


def models_of(config: Config) -> dict[str, AgentModel]:
    """The models of `--agent_models`, by agent. A request names its model. Raises `ConfigError`."""
    variable = key_variable(config.agent)
    models: dict[str, AgentModel] = {}
    for entry in comma_separated(config.agent.agent_models):
        name, _, url = entry.partition("=")
        if not is_name(name) or not url.startswith(("http://", "https://")):
            raise ConfigError(
                f"--agent_models {entry}: must be NAME=URL, as in critic=https://api.host/v1; "
                f"{NAME_RULE}"
            )
        if name in models:
            raise ConfigError(f"--agent_models: {name} is given twice")
        models[name] = AgentModel(
            model="policy", base_url=url.rstrip("/"), api_key_env=variable,
            timeout=config.sampling.request_timeout,
        )  # fmt: skip
    return models


def key_variable(agent: AgentConfig) -> str | None:
    """The variable of the key of `--agent_models`; None without one. Raises `ConfigError`."""
    given = agent.agent_models_key_env
    read_key(given, "agent_models_key_env")
    return given or (_KEY_VARIABLE if os.environ.get(_KEY_VARIABLE) else None)
