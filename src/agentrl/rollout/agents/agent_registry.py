"""Which agents there are, by the name that a task's `agent_name` or `--agent_name` gives.

Every agent is an `AsyncSampler`: a function or an agent loop is wrapped in one when it is
registered. Names come from three places, in order of precedence:

    built in        mcp, tool_agent, single_turn, single_turn_agent, math, program, outside
    registered      `register_agent`, called by the file of `--agent_module`, and the sampler
                    classes in it, by their names
    installed       entry points of the group `agentrl.agents`

An agent is imported when its name is first used.
"""

import inspect
from collections.abc import Awaitable, Callable
from contextlib import suppress
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any

from agentrl.configs import Config, ConfigError
from agentrl.configs.user_module import load_user_module
from agentrl.foreign_text import text_of
from agentrl.rollout.agents.base import AsyncSampler

GROUP = "agentrl.agents"

Agent = type[AsyncSampler] | Callable[..., Awaitable[str | None]] | type[Any]
"""A sampler class, `async fn(task, llm, tools) -> answer` (`function.py`), or a class with
`run(sampling_params, **fields)` (`loop.py`)."""

NEED_TOOLS = frozenset({"mcp", "tool_agent"})  # agents that are of little use without tools

OUTSIDE = "outside"  # the agent whose attempts are made on other machines

_MCP = "agentrl.rollout.agents.mcp:MCPSampler"
_SINGLE_TURN = "agentrl.rollout.agents.single_turn:SingleTurnSampler"
_BUILT_IN = {
    name: EntryPoint(name, place, GROUP)
    for name, place in {
        "mcp": _MCP,
        "tool_agent": _MCP,
        "single_turn": _SINGLE_TURN,
        "single_turn_agent": _SINGLE_TURN,  # its name in data sets for verl
        "math": "agentrl.rollout.agents.math:MathSampler",
        "program": "agentrl.gateway.program:ProgramSampler",
        OUTSIDE: "agentrl.gateway.outside:OutsideSampler",
    }.items()
}
_registered: dict[str, Agent] = {}
_samplers: dict[str, type[AsyncSampler]] = {}  # agents that were used or registered


def register_agent(name: str, agent: Agent) -> None:
    """Register `agent` under `name`.

    `agent`: an `AsyncSampler` subclass, an async function `agent(task, llm, tools) -> answer`, or
    a class with `async run(sampling_params, **fields)`. Raises ValueError if it is none of these or
    the name is taken.
    """
    if name in _BUILT_IN:
        raise ValueError(f"agent {name!r} is built in; register yours under another name")
    if _registered.setdefault(name, agent) is not agent:
        raise ValueError(f"there are two agents {name!r}; register one under another name")
    try:
        _samplers[name] = _as_sampler(name, agent)
    except ValueError:
        del _registered[name]
        raise


def known_agents() -> frozenset[str]:
    """The names that a task's `agent_name` may have."""
    installed = {entry.name for entry in entry_points(group=GROUP)}
    return frozenset(_BUILT_IN.keys() | _registered.keys() | installed)


def named_agents() -> dict[str, type[AsyncSampler]]:
    """The usable sampler classes by name: built in, registered, and the installed ones in use."""
    found: dict[str, type[AsyncSampler]] = {}
    for name in (*_BUILT_IN, *_registered, *_samplers):
        with suppress(ConfigError):
            found[name] = find_agent(name)
    return found


def load_agents(config: Config) -> None:
    """Load `--agent_module` and check `--agent_name`. Raises `ConfigError`.

    Samplers that the file defines and does not register are agents by the names of their classes.
    """
    if config.agent.agent_module is not None:
        module = load_user_module(config.agent.agent_module, "agent_module")
        for name, defined in vars(module).items():
            if _is_sampler_of(module, defined) and defined not in _registered.values():
                register_agent(name, defined)
    find_agent(config.agent.agent_name).check_flags(config)


def _is_sampler_of(module: ModuleType, defined: object) -> bool:
    """Whether it is a sampler class that `module` itself defines, and that can run."""
    return (
        isinstance(defined, type)
        and issubclass(defined, AsyncSampler)
        and defined.__module__ == module.__name__
        and not inspect.isabstract(defined)
    )


def find_agent(name: str) -> type[AsyncSampler]:
    """The sampler class of an agent. Raises `ConfigError` if it is unknown or unusable."""
    if name not in _samplers:
        entry = _BUILT_IN.get(name) or next(iter(entry_points(group=GROUP, name=name)), None)
        if entry is None:
            raise ConfigError(
                f"there is no agent {name!r}; known: {', '.join(sorted(known_agents()))} "
                "(--agent_module FILE registers more)"
            )
        try:
            _samplers[name] = _as_sampler(name, entry.load())
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"agent {name!r} of entry point {entry.value} cannot be used: {text_of(error)}"
            ) from error
    return _samplers[name]


def may_score_itself(agent: type[AsyncSampler]) -> bool:
    """Whether an agent overrides `evaluate_record`."""
    return agent.evaluate_record is not AsyncSampler.evaluate_record


def _as_sampler(name: str, agent: object) -> type[AsyncSampler]:
    """The sampler class that runs `agent`. Raises ValueError if `agent` is not an agent."""
    if isinstance(agent, type) and issubclass(agent, AsyncSampler):
        if inspect.isabstract(agent):
            raise ValueError(f"agent {name!r}: {agent.__name__} does not implement run()")
        return agent
    if inspect.iscoroutinefunction(agent):
        from agentrl.rollout.agents.function import FunctionSampler

        _check_call(f"agent {name!r} must take (task, llm, tools)", agent, None, None, None)
        return FunctionSampler.of(agent)
    run = getattr(agent, "run", None)
    if isinstance(agent, type) and inspect.iscoroutinefunction(run):
        from agentrl.rollout.agents.loop import LoopSampler

        rule = f"agent {name!r}: {agent.__name__}.run must take (sampling_params, **fields)"
        _check_call(rule, run, None, {}, partial=True)
        return LoopSampler.of(agent)
    raise ValueError(
        f"agent {name!r} is {agent!r}, and must be an AsyncSampler subclass, an async function "
        "(task, llm, tools), or a class with an async run(sampling_params, **fields)"
    )


def _check_call(
    rule: str, function: Callable[..., Any], *arguments: object, partial: bool = False
) -> None:
    signature = inspect.signature(function)
    try:
        (signature.bind_partial if partial else signature.bind)(*arguments)
    except TypeError as error:
        raise ValueError(f"{rule}: {error}") from None
