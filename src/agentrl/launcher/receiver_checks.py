"""Whether somebody answers where `--report_to` and `--otlp_endpoint` send to, before a launch.

Of the trackers that is MLflow's server. What the others lack, such as a key, they say themselves
when the trainer starts them.
"""

import os
from collections.abc import Callable
from urllib.parse import urlsplit

import httpx2

from agentrl.configs import Config, ConfigError, trackers_of
from agentrl.redaction import without_passwords

_PATIENCE_S = 5.0
_MLFLOW = "MLFLOW_TRACKING_URI"


def check_tracker_server(config: Config) -> None:
    """Raise `ConfigError` if a tracker is not installed, or if MLflow's server is out of reach.

    Any answer of the server will do: rights and versions are seen when a run is made there.
    """
    address = os.environ.get(_MLFLOW, "")
    if "mlflow" not in trackers_of(config.run.report_to):
        return
    if urlsplit(address).scheme not in ("http", "https"):
        return
    silence = _silence(address)
    if silence is not None:
        raise ConfigError(
            f"--report_to {config.run.report_to}: mlflow: nobody answers at {_MLFLOW} "
            f"{without_passwords(address)}: {silence}; start the server, or leave the flag out"
        )


def check_trace_receiver(config: Config, say: Callable[[str], None]) -> None:
    """`say` it if nobody answers at `--otlp_endpoint`: the run goes on, and sends traces later."""
    address = config.run.otlp_endpoint
    if address is not None and (silence := _silence(address)) is not None:
        say(
            f"--otlp_endpoint {without_passwords(address)}: nobody answers there: {silence}; "
            "traces are dropped until somebody does"
        )


def _silence(address: str) -> str | None:
    """Why nobody answers at an address; None if somebody does."""
    try:
        # Nothing is told to whoever it is. Clients have settings of their own for certificates.
        httpx2.get(address, timeout=_PATIENCE_S, verify=False)
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        return str(error) or f"no answer within {_PATIENCE_S:g} s"
    return None
