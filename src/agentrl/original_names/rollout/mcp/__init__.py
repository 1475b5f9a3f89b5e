"""`from rollout.mcp import MCPSampler`: the agent with tools, and its scorers."""

from agentrl.rollout.agents.mcp import MCPSampler

__all__ = ["MCPSampler"]
