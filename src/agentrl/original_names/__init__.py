"""The modules that files written for the original AgentRL import.

    from rollout.sampler import AsyncSampler
    from rollout.mcp.scorer import MCPScorerFactory
    from databases import Record, Task, register_new_model
    from configs import AgentTrainingConfig
    from log import logger

Each has the names of today under those of then. They are found only in processes that load a file
of the user's, and only where no other module has the name (`install`).
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

_FOLDER = str(Path(__file__).parent)
_NAMES = frozenset({"configs", "databases", "log", "rollout"})


class _Finder:
    """Finds the modules in this folder, under their names without this package's."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of one of the four; modules in them are found as in any package."""
        if path is not None or name not in _NAMES:
            return None
        found = PathFinder.find_spec(name)
        if found is not None and found.loader is not None:
            return None  # a module of the user's, not just a folder of that name
        return PathFinder.find_spec(name, [_FOLDER])


def install() -> None:
    """Let import statements find the modules."""
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)
