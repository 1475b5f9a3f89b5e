"""`from rollout.sampler import AsyncSampler`."""

from agentrl.rollout.agents.base import AsyncSampler

__all__ = ["AsyncSampler"]
