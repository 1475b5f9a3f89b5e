"""Names of processes that hold leases, as the ledgers store them and people read them."""

import os
import socket
from uuid import uuid4


def process_name() -> str:
    """A unique name for this process: host, pid and a random suffix."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid4().hex[:6]}"
