"""Checks of the text of one flag. Each raises `ValueError` with the reason."""

import json
import math
import re
from typing import Any
from urllib.parse import urlsplit

# The smallest and the largest value of each, as SGLang accepts them.
SAMPLING_PARAMS = {
    "temperature": (0.0, math.inf),
    "top_p": (0.0, 1.0),
    "top_k": (-1.0, math.inf),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.0, 2.0),
}
_NEVER_ZERO = ("top_p", "top_k", "repetition_penalty")
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,37}")  # MongoDB: 63 bytes for a database's name
_SERVICE_URL = re.compile(r"([a-z0-9_]+\+)?https?://")
_VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def check_run_name(text: str) -> None:
    """Check the name of a run."""
    if not _RUN_NAME.fullmatch(text):
        raise ValueError(
            "must be 1 to 38 letters, digits, - or _, because it names a database and folders"
        )


def check_service_url(text: str) -> None:
    """Check the URL of an inference service, optionally with an engine: `NAME+http://...`.

    Passwords are refused, because the URL appears in logs and in the database.
    """
    if not _SERVICE_URL.match(text):
        raise ValueError(
            "must begin with http:// or https://, or with the name of an engine and a + before that"
        )
    _check_shown_url(text, "the services' key with --inference_api_key_env")


def check_otlp_endpoint(text: str) -> None:
    """Check the URL of a receiver of traces. Passwords are refused, as in a service's URL."""
    if not re.match(r"https?://", text):
        raise ValueError("must begin with http:// or https://")
    _check_shown_url(text, "headers in the environment variable OTEL_EXPORTER_OTLP_HEADERS")


def _check_shown_url(url: str, instead: str) -> None:
    """Check what logs show of a URL, and its host. `instead`: what to give in place of a secret."""
    if "@" in url or "?" in url:
        raise ValueError(f"must hold no password and no query: give {instead}")
    parts = urlsplit(url)  # raises ValueError for brackets that are no address
    if not parts.hostname:
        raise ValueError("must name a host")
    try:
        _ = parts.port
    except ValueError:
        raise ValueError("must have a port from 0 to 65535") from None


def check_variable_name(text: str) -> None:
    """Check the name of an environment variable."""
    if not _VARIABLE_NAME.fullmatch(text):
        raise ValueError("must be the name of an environment variable, not the key itself")


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object. Raises `ValueError` if the text is none."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def check_sampling_params(text: str) -> None:
    """Check a JSON object of sampling parameters by their names in the inference API."""
    params = json_object(text)
    for name, value in params.items():
        if name not in SAMPLING_PARAMS:
            raise ValueError(f"{name} is not known; known: {', '.join(SAMPLING_PARAMS)}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name} is not a number")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} is not a finite number")
    if params.get("temperature", 1.0) <= 0:
        raise ValueError("temperature must be above 0, because rollouts of one task must differ")
    for name, value in params.items():
        least, most = SAMPLING_PARAMS[name]
        if not least <= value <= most:
            raise ValueError(f"{name} {value:g} is not between {least:g} and {most:g}")
    for name in _NEVER_ZERO:
        if params.get(name) == 0:
            raise ValueError(f"{name} must not be 0")
