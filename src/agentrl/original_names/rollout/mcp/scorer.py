"""`from rollout.mcp.scorer import MCPScorerFactory`."""

from agentrl.rollout.scorers.mcp_factory import MCPScorerFactory

__all__ = ["MCPScorerFactory"]
