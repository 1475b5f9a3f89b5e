"""Checks the trackers of `--report_to` before a launch: their packages, and MLflow's server.

What the others lack, such as a key, they say themselves when the trainer starts them.
"""

import os
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
    try:
        # Only whether somebody answers. MLflow's client has settings of its own for certificates.
        httpx2.get(address, timeout=_PATIENCE_S, verify=False)
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        said = str(error) or f"no answer within {_PATIENCE_S:g} s"
        raise ConfigError(
            f"--report_to {config.run.report_to}: mlflow: nobody answers at {_MLFLOW} "
            f"{without_passwords(address)}: {said}; start the server, or leave the flag out"
        ) from None
