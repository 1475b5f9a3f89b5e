"""Loopback ports for servers that tests start."""

from agentrl.held_port import HeldPort


def free_port() -> int:
    """One that nobody listens on now. Another program may take it: code of ours keeps a
    `HeldPort`."""
    with HeldPort() as port:
        return port.number
