"""`from configs import AgentTrainingConfig`: the flags of a run."""

from agentrl.configs import Config as AgentTrainingConfig

__all__ = ["AgentTrainingConfig"]
