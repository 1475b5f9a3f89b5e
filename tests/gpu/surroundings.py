"""The machine, the versions and the revision that results belong to."""

import datetime
import os
import platform
import subprocess
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from agentrl.launcher.inventory import GIB, read_inventory

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "transformers", "accelerate", "safetensors")


@dataclass(frozen=True)
class Surroundings:
    """What results need to be read later."""

    date: str
    device: str  # cuda, or cpu where there is no GPU
    gpus: list[str]  # names
    gpu_gib: list[float]
    driver: str | None  # of the GPUs
    processor: str
    cores: int
    host_gib: float
    python: str
    packages: dict[str, str]
    revision: str | None  # of git; None outside a checkout
    changed: bool  # whether tracked files differ from the revision

    @property
    def line(self) -> str:
        """The machine on one line."""
        what = ", ".join(self.gpus) if self.gpus else "no GPU: CPU stand-ins"
        changed = ", changed" if self.changed else ""
        return f"{what}; torch {self.packages['torch']}; {self.revision}{changed}"


def surroundings() -> Surroundings:
    """Look at this machine, without CUDA: a check has the GPU for itself."""
    inventory = read_inventory(os.environ)
    changed = _output("git", "status", "--porcelain", "--untracked-files=no")
    return Surroundings(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        device="cuda" if inventory.gpus else "cpu",
        gpus=[gpu.name for gpu in inventory.gpus],
        gpu_gib=[round(gpu.total / GIB, 1) for gpu in inventory.gpus],
        driver=_driver() if inventory.gpus else None,
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)),
        host_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB, 1),
        python=platform.python_version(),
        packages={name: version(name) for name in PACKAGES},
        revision=_output("git", "rev-parse", "HEAD"),
        changed=bool(changed),
    )


def _driver() -> str | None:
    listed = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return listed.splitlines()[0] if listed else None


def _processor() -> str:
    info = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in info if line.startswith("model name"))
    return next(names, platform.machine())


def _output(*command: str) -> str | None:
    """What a command says, None if it fails or is not there."""
    try:
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return ended.stdout.strip()
