"""The trackers of `--report_to`: their names, whether they are installed, what they want."""

import importlib.util

from agentrl.configs.flag import ConfigError, comma_separated
from agentrl.foreign_text import one_line

TRACKERS = ("tensorboard", "wandb", "mlflow", "swanlab", "trackio")
# The whole of MLflow wants an older pyarrow.
_INSTALLED_AS = {"mlflow": "mlflow-skinny pandas"}
# Of each, for a sentence about its refusal.
WANTS = {
    "wandb": "wandb wants WANDB_API_KEY or `wandb login`, or WANDB_MODE=offline where it cannot be "
    "reached",
    "swanlab": "SwanLab wants SWANLAB_API_KEY or `swanlab login`, or SWANLAB_MODE=offline where it "
    "cannot be reached",
    "mlflow": "MLflow wants its server at MLFLOW_TRACKING_URI, which may be sqlite:///mlflow.db",
    "trackio": "Trackio keeps runs on this machine, unless TRACKIO_SPACE_ID or TRACKIO_SERVER_URL "
    "is set",
    "tensorboard": "TensorBoard's files are written into the run's folder",
}


def trackers_of(report_to: str) -> list[str]:
    """Return the trackers of `--report_to`. Raises `ConfigError` if one is not installed."""
    if report_to == "all":
        return [name for name in TRACKERS if _is_installed(name)]
    names = [name for name in comma_separated(report_to) if name != "none"]
    for name in names:
        if not _is_installed(name):
            raise ConfigError(
                f"--report_to {report_to}: the package {name} is not installed: "
                f"pip install {_INSTALLED_AS.get(name, name)}, or leave the flag out"
            )
    return names


def refused_by(tracker: str, report_to: str, reason: str) -> ConfigError:
    """The error of a tracker that refuses: its reason, and what it wants."""
    said = one_line(reason).rstrip(".")
    return ConfigError(
        f"--report_to {report_to}: {tracker}: {said}; {WANTS[tracker]}; or leave the flag out"
    )


def _is_installed(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    # A folder of that name, such as the one that wandb writes into, is a namespace and has no file.
    return spec is not None and spec.origin is not None
