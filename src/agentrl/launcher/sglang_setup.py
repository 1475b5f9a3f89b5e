"""Sets up SGLang's own environment with `scripts/setup.sh`, before a launch starts it."""

import subprocess

from agentrl.configs import ConfigError
from agentrl.launcher.deployment import REPOSITORY, SGLANG_OF_SETUP

_SETUP = REPOSITORY / "scripts" / "setup.sh"


def set_up_sglang(command: str | None) -> None:
    """Install SGLang into `.venv-sglang` if `command` starts it from there. Quick if it is there.

    Raises `ConfigError` if that fails; the script has said why.
    """
    if command != SGLANG_OF_SETUP:
        return
    made = subprocess.run(["bash", "-c", 'source "$0" sglang', str(_SETUP)])
    if made.returncode != 0:
        raise ConfigError(
            "SGLang could not be installed into .venv-sglang, see above: mend that, or set "
            "SGLANG_COMMAND to the command of another one, or INFERENCE_URLS to running services"
        )
