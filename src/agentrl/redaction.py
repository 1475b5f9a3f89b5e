"""Text with URLs in it, as logs, errors and terminals may show it."""

import re

# Up to the last @ before the next URL of a list, because people paste passwords with / # ? and @ in
# them, and even with ://.
_CREDENTIALS = re.compile(r"//(?:(?!,\s*(?:[\w.-]+=)?[\w+]+://)\S)*@")
_SECRET_OPTIONS = re.compile(
    r"([?&;][^=&\s]*(?:pass|token|secret|key|credential)[^=&\s]*=)[^&\s,]*", re.IGNORECASE
)
_SESSION_TOKEN = re.compile(r"(AWS_SESSION_TOKEN:)[^&,\s]*", re.IGNORECASE)


def without_passwords(text: str) -> str:
    """The text without users, passwords and tokens of its URLs."""
    text = _CREDENTIALS.sub("//***@", text)
    return _SESSION_TOKEN.sub(r"\1***", _SECRET_OPTIONS.sub(r"\1***", text))
