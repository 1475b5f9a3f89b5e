"""Which samplers at work on a run were started elsewhere: by other machines and other launches."""

import os
import socket
from collections.abc import Collection
from pathlib import Path

from agentrl.launcher.subreaper import descendants


class OtherSamplers:
    """Tells them from ours, and from those of launches that are over, by the names that
    `process_name` gave them."""

    def __init__(self) -> None:
        self._here = f"{socket.gethostname()}-"
        self._is_other: dict[str, bool] = {}

    def count(self, owners: Collection[str]) -> int:
        """How many of these run, but not below this process."""
        unknown = [owner for owner in owners if owner not in self._is_other]
        if unknown:
            ours = {str(pid) for pid in descendants(os.getpid())}
            for owner in unknown:
                pid = owner.removeprefix(self._here).partition("-")[0]
                on_this_machine = owner.startswith(self._here)
                gone = on_this_machine and not Path(f"/proc/{pid}").exists()
                self._is_other[owner] = not gone and not (on_this_machine and pid in ours)
        return sum(self._is_other[owner] for owner in owners)
