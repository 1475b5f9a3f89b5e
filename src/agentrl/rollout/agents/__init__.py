"""Agents: what a model does with a task, by name.

agent_registry      names, and what may be registered under them
process             one sampler for each claim of a process
base                `AsyncSampler`, which all agents are
mcp                 the agent with tools: tool_sampler, context_strategies
single_turn, math   agents without tools
function            agents that are a function of task, llm and tools
llm, tools          what such a function is given
turn, stored_turns  a generated turn, and how it is read back from the ledger
loop                agents with `run(sampling_params, **fields)`, which return tokens
limits, repetition, turn_status, answers   when a record ends, and what its turns were
"""

from agentrl.rollout.agents.agent_registry import (
    NEED_TOOLS,
    OUTSIDE,
    find_agent,
    known_agents,
    load_agents,
    may_score_itself,
    register_agent,
)

__all__ = [
    "NEED_TOOLS",
    "OUTSIDE",
    "find_agent",
    "known_agents",
    "load_agents",
    "may_score_itself",
    "register_agent",
]
