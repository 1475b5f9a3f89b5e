"""Agents: what a model does with a task, by name.

    registry    names, and what may be registered under them
    process     one sampler for each claim of a process
    function    agents that are a function of task, llm and tools
    llm, tools  what such a function is given
    loop        agents with `run(sampling_params, **fields)`, which return tokens

The built-in ones are elsewhere: `mcp/`, `math/`, `single_turn.py`.
"""

from agentrl.rollout.agents.registry import (
    NEED_TOOLS,
    find_agent,
    known_agents,
    load_agents,
    may_score_itself,
    register_agent,
)

__all__ = [
    "NEED_TOOLS",
    "find_agent",
    "known_agents",
    "load_agents",
    "may_score_itself",
    "register_agent",
]
