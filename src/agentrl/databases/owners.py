"""Names of processes that hold leases, as the ledgers store them and people read them."""

import os
import re
import socket
from uuid import uuid4


def process_name(place: str | None = None) -> str:
    """A unique name for this process: host, pid and a random suffix.

    `place`: of the process on this machine, where only one can be at a time.
    """
    name = f"{socket.gethostname()}-{os.getpid()}-{uuid4().hex[:6]}"
    return name if place is None else f"{name}-{place}"


def owners_at(place: str) -> str:
    """A regular expression for the names of all processes that were at this place here."""
    return rf"^{re.escape(socket.gethostname())}-\d+-[0-9a-f]+-{re.escape(place)}$"
