"""The GPUs of a machine: as nvidia-smi lists them, or as a text describes them for planning."""

import itertools
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from agentrl.configs import ConfigError
from agentrl.launcher.deployment import count_gpus, usable_memory

GIB = 2**30
_MIB = 2**20
_QUERY = "index,uuid,name,memory.total,memory.free,mig.mode.current"
_QUERY_S = 60.0  # the first call after a boot starts the driver
_UNEVEN = 1.1  # of free memory: what is more than so many times another's
_TENTHS = 10 * GIB  # below it, sizes are said to a tenth of a GiB
_DESCRIBED = re.compile(r"(?:(\d+)x)?(\d+)x(\d+(?:\.\d+)?)")


@dataclass(frozen=True)
class Gpu:
    """One GPU. `device` is what CUDA_VISIBLE_DEVICES calls it; memory is in bytes.

    `fault`: why nothing can be placed on it, and what to do.
    """

    device: str
    name: str
    total: int
    free: int
    fault: str | None = None


@dataclass(frozen=True)
class Inventory:
    """The GPUs that a launch may use on each of `machines` equal machines, in CUDA's order.

    `host_bytes`: memory that a launch may use of one machine; None if it is not known.
    `shortage`: that of all machines together, see `shortage_of`; None if only this one is known.
    """

    gpus: tuple[Gpu, ...] = ()
    machines: int = 1
    host_bytes: int | None = None
    shortage: str | None = None

    @property
    def free(self) -> int:
        """Bytes that are free on each GPU; the least counts, as all get equal shares."""
        return min(gpu.free for gpu in self.gpus)

    @property
    def line(self) -> str:
        """The GPUs in words."""
        names = ", ".join(sorted({gpu.name for gpu in self.gpus if gpu.name}))
        each = f"{len(self.gpus)} GPU{'s' * (len(self.gpus) > 1)} with {gib(self.free)} GiB"
        where = f" free on each of {self.machines} machines" if self.machines > 1 else " free"
        return each + where + (f" ({names})" if names else "") + self._shortage

    @property
    def even(self) -> bool:
        """Whether about as much is free on all GPUs."""
        return not self._shortage

    @property
    def _shortage(self) -> str:
        if self.shortage is not None:
            return self.shortage
        return shortage_of({f"GPU {gpu.device}": gpu.free for gpu in self.gpus})

    def freer(self) -> Iterator["Inventory"]:
        """Yield the inventory without those GPUs that have clearly less free memory than others."""
        ranked = sorted(self.gpus, key=lambda gpu: gpu.free)
        for less, more in itertools.pairwise(ranked):
            if more.free > _UNEVEN * less.free:
                rest = tuple(gpu for gpu in self.gpus if gpu.free >= more.free)
                yield replace(self, gpus=rest)

    def choosing(self, rest: "Inventory") -> str:
        """The words for a launch that uses `rest`, one of `freer`."""
        out = [gpu.device for gpu in self.gpus if gpu not in rest.gpus]
        others = " and as many on each of the other machines" if self.machines > 1 else ""
        return (
            f"CUDA_VISIBLE_DEVICES={','.join(gpu.device for gpu in rest.gpus)} would, which leaves "
            f"out GPU{'s' * (len(out) > 1)} {', '.join(out)}{others}"
        )


def shortage_of(free: Mapping[str, int]) -> str:
    """Which GPU has clearly less free memory than others, in words; empty if none has.

    `free`: bytes, by what the GPU is called.
    """
    least, most = min(free, key=lambda gpu: free[gpu]), max(free.values())
    if most <= _UNEVEN * free[least]:
        return ""
    return (
        f", because {least} has no more and all get equal shares (others have up to "
        f"{gib(most)} GiB)"
    )


def gib(size: int) -> str:
    """The size in GiB, to a tenth if it is small."""
    return f"{size / GIB:.{1 if size < _TENTHS else 0}f}"


def read_inventory(environment: Mapping[str, str], machines: int = 1) -> Inventory:
    """The GPUs that this process may use; none are asked for where no device is.

    Raises `ConfigError` if nvidia-smi does not list them.
    """
    if not count_gpus(environment):
        return Inventory(machines=machines)
    named = environment.get("CUDA_VISIBLE_DEVICES")
    gpus = listed_gpus(_ask())
    found = visible(gpus, named)
    if not found:
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES={named}: names none of the GPUs of this machine, which are "
            f"{', '.join(gpu.device for gpu in gpus.values())}; leave it empty to use none"
        )
    return Inventory(found, machines, usable_memory())


def _ask() -> str:
    """nvidia-smi's table, a line for each GPU."""
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=_QUERY_S)
        if asked.returncode == 0 and asked.stdout.strip():
            return asked.stdout
        # It says on either what is wrong.
        wrong = f"status {asked.returncode}: {' '.join((asked.stdout + asked.stderr).split())}"
    except (OSError, subprocess.TimeoutExpired) as error:
        wrong = str(error)
    raise ConfigError(
        f"this machine has GPUs, and `{' '.join(command)}` does not list them ({wrong}): "
        "install the driver's tools, or hide the GPUs with CUDA_VISIBLE_DEVICES="
    )


def listed_gpus(text: str) -> dict[str, Gpu]:
    """Parse nvidia-smi's table into the GPUs by UUID, in the order of their indices.

    Raises `ConfigError` for a line that is not of a GPU, as nvidia-smi writes of one that is lost.
    Its warnings, which stand beside the table, are skipped.
    """
    gpus = {}
    for line in text.splitlines():
        if not line.strip() or line.lstrip().lower().startswith("warning:"):
            continue
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(_QUERY.split(",")):
            raise ConfigError(f"nvidia-smi lists no GPU, but says: {line.strip()}")
        index, uuid, name, total, free, mig = cells
        unknown = [size for size in (total, free) if not size.isdecimal()]
        fault = None
        if mig == "Enabled":  # or Disabled, or [N/A] of a GPU that cannot be divided
            fault = (
                "is divided by MIG, and whole GPUs are needed: leave it out with "
                f"CUDA_VISIBLE_DEVICES, or end MIG mode (as root: nvidia-smi -i {index} -mig 0)"
            )
        elif unknown:
            fault = (
                f"has memory that nvidia-smi does not know ({unknown[0]}): leave it out with "
                "CUDA_VISIBLE_DEVICES"
            )
        memory = (0, 0) if unknown else (int(total) * _MIB, int(free) * _MIB)
        gpus[uuid] = Gpu(index, name, *memory, fault)
    return gpus


def visible(gpus: Mapping[str, Gpu], named: str | None) -> tuple[Gpu, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES names by index or UUID, in its order; all if it is unset.

    As in CUDA, the first name that is none ends the list. Raises `ConfigError` for a part of a GPU
    (MIG), whose memory is not listed, for a GPU that is named twice, and for one with a fault.
    """
    found = tuple(gpus.values()) if named is None else tuple(_named(gpus, named))
    for number, gpu in enumerate(found):
        if gpu in found[:number]:
            raise ConfigError(
                f"CUDA_VISIBLE_DEVICES={named}: names GPU {gpu.device} twice, and CUDA then uses "
                "none; name each once"
            )
        if gpu.fault is not None:
            raise ConfigError(f"GPU {gpu.device} ({gpu.name}) {gpu.fault}")
    return found


def _named(gpus: Mapping[str, Gpu], named: str) -> Iterator[Gpu]:
    """Yield the GPUs that CUDA_VISIBLE_DEVICES names."""
    by_index = {gpu.device: gpu for gpu in gpus.values()}
    for name in (part.strip() for part in named.split(",")):
        if name.startswith("MIG-"):
            raise ConfigError(
                f"CUDA_VISIBLE_DEVICES={named}: names a part of a GPU, whose memory is not known; "
                "give whole GPUs"
            )
        full = [gpu for uuid, gpu in gpus.items() if name.startswith("GPU-") and name in uuid]
        gpu = by_index.get(name) or (full[0] if len(full) == 1 else None)
        if gpu is None:
            return
        yield gpu


def described(text: str) -> Inventory:
    """The inventory that `[MACHINESx]GPUSxGIB` describes: 8x80 or 2x8x141. Raises `ConfigError`."""
    parts = _DESCRIBED.fullmatch(text)
    machines, count, size = (
        (int(parts[1] or 1), int(parts[2]), int(float(parts[3]) * GIB)) if parts else (0, 0, 0)
    )
    if not (machines and count and size):
        raise ConfigError(
            f"--gpus {text}: give the number of GPUs and the GiB of each, such as 8x80, or 2x8x80 "
            "for two machines"
        )
    gpus = tuple(Gpu(str(number), "", size, size) for number in range(count))
    return Inventory(gpus, machines)
