"""Who may use a server of ours: its key, a bearer token, and which servers must have one.

The sandbox's server (deploy/sandbox) does the same by itself: its image has no AgentRL.
"""

import ipaddress
import secrets
import socket

NEW_KEY = "python -c 'import secrets; print(secrets.token_hex(32))'"


class KeyNeeded(ValueError):
    """A server would be open to other machines. The message is one sentence for the user."""


def require_key(host: str, key: str | None, how: str) -> None:
    """Raises `KeyNeeded` for a server that binds to `host` and has no key, if other machines reach
    it there. `how`: what to do, as in "set TOOLS_TOKEN to one"."""
    if not key and not is_loopback(host):
        raise KeyNeeded(
            f"--host {host}: other machines reach the server there, so it needs a key: {how}"
            f" ({NEW_KEY} makes one)"
        )


def is_loopback(host: str) -> bool:
    """Whether a server that binds to `host` is reached from its own machine only.

    A name is as its addresses are. One without addresses is taken for open.
    """
    try:
        found = socket.getaddrinfo(host or None, None, flags=socket.AI_PASSIVE)
    except OSError:
        return False
    addresses = {str(address[0]).partition("%")[0] for *_, address in found}
    return all(ipaddress.ip_address(address).is_loopback for address in addresses)


def admits(authorization: str | None, key: str) -> bool:
    """Whether an `Authorization` header shows the key. Takes as long for a wrong one as for the
    right one."""
    scheme, _, shown = (authorization or "").partition(" ")
    return secrets.compare_digest(shown.encode(), key.encode()) and scheme.lower() == "bearer"
