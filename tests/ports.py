"""Loopback ports for servers that tests start."""

from agentrl.held_port import HeldPort

_held: list[HeldPort] = []


def free_port() -> int:
    """A port that nobody listens on. Until this process ends only a server that is told the port
    can have it: else a connection of some other test might, also while the server restarts."""
    _held.append(HeldPort())
    return _held[-1].number
