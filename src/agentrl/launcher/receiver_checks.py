"""Whether `--report_to` and `--otlp_endpoint` can send, before a launch: a key, and somebody who
answers.

Of the trackers, MLflow's server is asked, and wandb and SwanLab for the key that they would use.
The rest they say themselves when the trainer starts them, minutes later.
"""

import os
from urllib.parse import urlsplit

import httpx2

from agentrl.configs import Config, ConfigError, trackers_of
from agentrl.configs.trackers import refused_by
from agentrl.launcher.console import Say
from agentrl.launcher.tracker_keys import KeysUnknown, refusals
from agentrl.redaction import without_passwords

_PATIENCE_S = 5.0
_MLFLOW = "MLFLOW_TRACKING_URI"


def check_trackers(config: Config, say: Say) -> None:
    """Raise `ConfigError` if a tracker is not installed, has no key or no server.

    `say` it if a tracker's package cannot be asked for its key. Any answer of a server will do:
    rights and versions are seen when a run is made there.
    """
    report_to = config.run.report_to
    trackers = trackers_of(report_to)
    try:
        found = refusals(trackers)
    except KeysUnknown as error:
        say(f"--report_to {report_to}: no package was asked for its key: {error}")
        found = {}
    for tracker, reason in found.items():
        raise refused_by(tracker, report_to, reason)
    if "mlflow" in trackers:
        _check_mlflow(report_to)


def _check_mlflow(report_to: str) -> None:
    address = os.environ.get(_MLFLOW, "")
    if urlsplit(address).scheme not in ("http", "https"):
        return
    silence = _silence(address)
    if silence is not None:
        raise ConfigError(
            f"--report_to {report_to}: mlflow: nobody answers at {_MLFLOW} "
            f"{without_passwords(address)}: {silence}; start the server, or leave the flag out"
        )


def check_trace_receiver(config: Config, say: Say) -> None:
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
