"""Errors that the user can act on: a process prints only their message, and ends with status 2.

All others are bugs and keep their traceback. The errors are listed by name, so that a verb imports
only the modules that it needs.
"""

import sys
from collections.abc import Callable, Sequence

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


def status_of(name: str, command: Callable[[Sequence[str]], int], argv: Sequence[str]) -> int:
    """The exit status of a command; 2, with the message on stderr, for an error of the user's."""
    try:
        return command(argv)
    except Exception as error:
        if not is_user_error(error):
            raise
        print(f"{name}: {error}", file=sys.stderr)
        return 2
