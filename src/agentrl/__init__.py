"""AgentRL: reinforcement learning for language models that act through tools."""

__version__ = "0.2.0"
