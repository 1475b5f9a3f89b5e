"""Whether trackers that send runs to a server have a key there, as their packages see it.

    python -m agentrl.launcher.tracker_keys wandb swanlab     a JSON object: why each would refuse

This is a process of its own: what the packages import and print goes with it. Nothing is sent. A
run that stays on this machine needs no key.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

# Packages of other versions may lack what is asked here.
_OTHER_VERSION = (ImportError, AttributeError, TypeError)
_NO_KEY = "it has no key, and would send the run to {}"
_PATIENCE_S = 60.0


class KeysUnknown(Exception):
    """A package was not to be asked. The message says why."""


def refusals(trackers: Sequence[str]) -> Mapping[str, str]:
    """Why a tracker would refuse for want of a key, of those that would. Raises `KeysUnknown`."""
    asked = [name for name in trackers if name in _CHECKS]
    if not asked:
        return {}
    command = [sys.executable, "-m", __name__, *asked]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PATIENCE_S, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise KeysUnknown(f"no answer within {_PATIENCE_S:g} s") from None
    if done.returncode:
        raise KeysUnknown((done.stderr.strip().splitlines() or ["it ended"])[-1])
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])  # packages may print too
    return found


def _wandb() -> str | None:
    from wandb.sdk import wandb_setup
    from wandb.sdk.lib import wbauth

    settings = wandb_setup.singleton().settings
    if settings._offline or settings._noop:
        return None
    host = settings.base_url
    known = wbauth.authenticate_session(
        host=host, source="agentrl", prompt=False, update_session=False
    )
    return None if known else _NO_KEY.format(host)


def _swanlab() -> str | None:
    import swanlab

    # It is AgentRL's to read: `training/run/trackers.py` says why.
    os.environ.pop("SWANLAB_PROJECT", None)
    settings = swanlab.Settings()
    if settings.mode != "online" or settings.api_key:
        return None
    return _NO_KEY.format(settings.api_host)


_CHECKS: dict[str, Callable[[], str | None]] = {"wandb": _wandb, "swanlab": _swanlab}


def main(trackers: Sequence[str]) -> int:
    """Print why each of the trackers would refuse, if it would."""
    found = {}
    for name in trackers:
        try:
            reason = _CHECKS[name]()
        except _OTHER_VERSION:
            raise
        except Exception as error:  # of a key or a setting, as the package sees it
            reason = str(error)
        if reason is not None:
            found[name] = reason
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
