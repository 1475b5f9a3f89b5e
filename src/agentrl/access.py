"""Access to our servers: by a key, sent as a bearer token; which need one, and where they are.

The sandbox's server (deploy/sandbox) has its own copy, because its image does not have AgentRL.
"""

import ipaddress
import secrets
import socket

NEW_KEY = "python -c 'import secrets; print(secrets.token_hex(32))'"


class KeyNeeded(ValueError):
    """A server would be open to other machines. The message is one sentence for the user."""


def require_key(host: str, key: str | None, how: str) -> None:
    """Raise `KeyNeeded` for a server without a key if other machines reach `host`.

    `how`: how to give a key, for the message, for example "set TOOLS_TOKEN to one".
    """
    if not key and not is_loopback(host):
        raise KeyNeeded(
            f"--host {host}: other machines reach the server there, so it needs a key: {how}"
            f" ({NEW_KEY} makes one)"
        )


def is_loopback(host: str) -> bool:
    """Whether a server that binds to `host` is reachable from its own machine only.

    A name is loopback if all its addresses are; a name without addresses is not.
    """
    try:
        found = socket.getaddrinfo(host or None, None, flags=socket.AI_PASSIVE)
    except OSError:
        return False
    addresses = {str(address[0]).partition("%")[0] for *_, address in found}
    return all(ipaddress.ip_address(address).is_loopback for address in addresses)


def reached_at(host: str) -> str:
    """How a URL names a server that binds to `host`: by this machine's name if to all addresses."""
    try:
        everywhere = host == "" or ipaddress.ip_address(host).is_unspecified
    except ValueError:  # a name
        everywhere = False
    named = socket.gethostname() if everywhere else host
    return f"[{named}]" if ":" in named else named


def admits(authorization: str | None, key: str) -> bool:
    """Whether an `Authorization` header has the key. The comparison takes constant time."""
    scheme, _, shown = (authorization or "").partition(" ")
    return secrets.compare_digest(shown.encode(), key.encode()) and scheme.lower() == "bearer"
