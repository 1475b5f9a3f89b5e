"""Counts the samplers of a run that other machines or other launches have started."""

import os
import socket
from collections.abc import Collection
from pathlib import Path

from agentrl.subreaper import descendants


class OtherSamplers:
    """Tells samplers of others from ours and from ended ones, by their `process_name`."""

    def __init__(self) -> None:
        self._here = f"{socket.gethostname()}-"
        self._is_other: dict[str, bool] = {}

    def count(self, owners: Collection[str]) -> int:
        """Number of `owners` that run and are not descendants of this process."""
        unknown = [owner for owner in owners if owner not in self._is_other]
        if unknown:
            ours = {str(pid) for pid in descendants(os.getpid())}
            for owner in unknown:
                pid = owner.removeprefix(self._here).partition("-")[0]
                on_this_machine = owner.startswith(self._here)
                gone = on_this_machine and not Path(f"/proc/{pid}").exists()
                self._is_other[owner] = not gone and not (on_this_machine and pid in ours)
        return sum(self._is_other[owner] for owner in owners)
