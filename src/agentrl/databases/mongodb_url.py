"""Checks a MongoDB URL; errors do not contain its password.

PyMongo's own errors quote the invalid part, which may be a part of the password. A password with
`#` or `?` may even make it a URL of another host.
"""

import re

from pymongo.errors import ConfigurationError, InvalidURI
from pymongo.uri_parser import parse_uri

from agentrl.redaction import without_passwords

URL_ERRORS = (InvalidURI, ConfigurationError, ValueError)
"""What PyMongo raises for an invalid URL."""

_CREDENTIALS = re.compile(r"(?<=//).*@", re.DOTALL)
_BLANK = re.compile(r"<YOUR_\w*>")  # as in the scripts of the original AgentRL
_BLANK_OF_ALL = re.compile(r"<[^<>]*>")  # of any name, but in a password
# RFC 3986, 3.2.1: the characters allowed unescaped before the @.
_USER_AND_PASSWORD = re.compile(r"(?:[\w.~!$&'()*+,;=:-]|%[0-9A-Fa-f]{2})*@", re.ASCII)


def why_no_url(url: str) -> str | None:
    """Why PyMongo would reject or misread the URL, in one sentence; None if it is valid."""
    shown = f"--db_connection_string {without_passwords(url)} is not a MongoDB URL"
    blank = _BLANK.search(url) or _BLANK_OF_ALL.search(_CREDENTIALS.sub("", url))
    if blank is not None:
        return f"{shown}: {blank[0]} is to be filled in"
    given = _CREDENTIALS.search(url)
    if given is not None and not _USER_AND_PASSWORD.fullmatch(given[0]):
        return (
            f"{shown}: write what is not a letter or digit in its user and password as %XX (python"
            " -c 'from urllib.parse import quote; print(quote(input(), safe=\"\"))' does)"
        )
    if url.startswith("mongodb+srv://"):
        return None  # parsing needs DNS, which the client asks
    try:
        parse_uri(_CREDENTIALS.sub("", url))
    except URL_ERRORS as error:
        return f"{shown}: {error}"
    return None
