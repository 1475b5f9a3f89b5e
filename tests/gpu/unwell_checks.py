"""Checks that end in every way that a check may end, for the tests of the runner."""

import os
import signal
import subprocess
import time

from machine import Figures, Machine, NotHere, require


def passes(machine: Machine, figures: Figures) -> None:
    """The one that is well."""
    figures.add(answer=42, device=machine.kind)


def is_wrong(machine: Machine, figures: Figures) -> None:
    """It has a figure, and it is not what it should be."""
    figures.add(found=3)
    require(False, "three is not four")


def is_elsewhere(machine: Machine, figures: Figures) -> None:
    """It needs what this machine does not have."""
    raise NotHere("needs 9 GiB")


def crashes(machine: Machine, figures: Figures) -> None:
    """As a process that the kernel kills for its memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(machine: Machine, figures: Figures) -> None:
    """With a child of its own, in a session of its own, as servers are."""
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    figures.add(child=child.pid)
    time.sleep(600)


def ends_early(machine: Machine, figures: Figures) -> None:
    """With a status that says success, and nothing checked."""
    os._exit(0)
