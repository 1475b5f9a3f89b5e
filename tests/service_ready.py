"""Waits for an inference service that a test has started."""

import time
import urllib.request
from collections.abc import Callable
from typing import Protocol


class Started(Protocol):
    """A process."""

    def poll(self) -> int | None: ...


def wait_until_ready(
    url: str, process: Started, timeout_s: float, why_not: Callable[[], str]
) -> None:
    """Wait until the service answers `/ready`.

    Raises RuntimeError with `why_not()` if it ends, or does not answer in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5):
                return
        except OSError:
            pass
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the service did not start{why_not()}")
        time.sleep(0.2)
