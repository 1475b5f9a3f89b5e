"""The keys of sessions: each tells its session, and follows from it and a secret.

So a gateway knows after a restart the keys that it gave before, and of a key without a session that
it is one of a session that has ended.
"""

import hashlib
import hmac
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode

_PREFIX = "sk-"  # some clients refuse keys that do not look like one of OpenAI's
_DIGITS = 32


class SessionKeys:
    """Makes and checks keys. `secret`: None for sessions that end with this process."""

    def __init__(self, secret: str | None = None) -> None:
        self._secret = (secret or secrets.token_hex(32)).encode()

    def key_of(self, session: str) -> str:
        """The key of a session."""
        name = urlsafe_b64encode(session.encode()).decode().rstrip("=")
        return f"{_PREFIX}{name}.{self._sign(session)}"

    def session_of(self, key: str) -> str | None:
        """The session of a key; None if the key is none of ours."""
        name, _, signature = key.removeprefix(_PREFIX).partition(".")
        try:
            session = urlsafe_b64decode(name + "=" * (-len(name) % 4)).decode()
        except ValueError:
            return None
        # Bytes: a key may have any characters.
        right = hmac.compare_digest(signature.encode(), self._sign(session).encode())
        return session if right else None

    def _sign(self, session: str) -> str:
        return hmac.new(self._secret, session.encode(), hashlib.sha256).hexdigest()[:_DIGITS]
