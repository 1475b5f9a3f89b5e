"""Errors that the user can act on: a process prints only their message, and ends with status 2.

All others are bugs and keep their traceback. The errors are listed by name, so that a verb imports
only the modules that it needs.
"""

import sys

USER_ERRORS = (
    ("agentrl.access", "KeyNeeded"),
    ("agentrl.configs", "ConfigError"),
    ("agentrl.databases.mongod", "MongodError"),
    ("agentrl.databases.runs", "RunHopeless"),
    ("agentrl.databases.runs", "TrainerAlive"),
    ("agentrl.databases.task_file", "TaskFileError"),
    ("agentrl.inference.engines", "UnknownEngine"),
    ("agentrl.failures", "InfrastructureFailure"),
    ("agentrl.rollout.llm.models", "AgentModelsError"),
    ("agentrl.training.checkpoint.layout", "CheckpointError"),
)


def is_user_error(error: BaseException) -> bool:
    """Whether it is one of them."""
    # Of a module that is not loaded no error can have been raised.
    loaded = [(sys.modules.get(module), name) for module, name in USER_ERRORS]
    return any(isinstance(error, getattr(module, name)) for module, name in loaded if module)
