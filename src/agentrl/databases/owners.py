"""Names of processes that hold leases, as the ledgers store them and people read them."""

import os
import socket
from uuid import uuid4


def process_name() -> str:
    """A name for this process that says where it runs, unlike those before it on the machine."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid4().hex[:6]}"
