"""Removes credentials in URLs from text for logs, errors and terminals."""

import re

# Matches up to the last @ before the next URL of a list, because passwords may contain / # ? @ and
# even ://.
_CREDENTIALS = re.compile(r"//(?:(?!,\s*(?:[\w.-]+=)?[\w+]+://)\S)*@")
_SECRET_OPTIONS = re.compile(
    r"([?&;][^=&\s]*(?:pass|token|secret|key|credential)[^=&\s]*=)[^&\s,]*", re.IGNORECASE
)
_SESSION_TOKEN = re.compile(r"(AWS_SESSION_TOKEN:)[^&,\s]*", re.IGNORECASE)


def without_passwords(text: str) -> str:
    """Replace users, passwords and tokens in the URLs of the text by ***."""
    text = _CREDENTIALS.sub("//***@", text)
    return _SESSION_TOKEN.sub(r"\1***", _SECRET_OPTIONS.sub(r"\1***", text))
