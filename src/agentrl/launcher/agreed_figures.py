"""What all processes of a launch plan with, so that their plans are the same.

Free memory differs between machines, and on a machine with time: services that have started take
most of it. So the first process of each machine reads its own before it starts anything, and every
process plans with the least of all machines. They meet in a store of torch, at the address where
the trainers meet later.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Self

from agentrl.configs import ConfigError
from agentrl.launcher.deployment import Deployment
from agentrl.launcher.inventory import Inventory, shortage_of
from agentrl.launcher.script_environment import Place

PATIENCE_S = 600.0  # for the other machines to be started
_LOOK_S = 0.05


@dataclass(frozen=True)
class Figures:
    """What a machine has: bytes that are free on each GPU, by its name, and of host memory."""

    free: dict[str, int]
    host: int | None

    @classmethod
    def of(cls, inventory: Inventory) -> Self:
        """The figures of the machine with this inventory."""
        return cls({gpu.device: gpu.free for gpu in inventory.gpus}, inventory.host_bytes)


@dataclass(frozen=True)
class Meeting:
    """Where the processes of a launch meet.

    reads: whether this process is the first one of its machine
    processes: that meet, of all machines
    hosts: whether the store is this process's, which then waits until all have read
    name: of this meeting, in a store that lasts longer
    """

    machine: int
    machines: int
    reads: bool
    processes: int
    address: str
    port: int
    hosts: bool
    name: str = "plan"

    @classmethod
    def of_launches(cls, deployment: Deployment) -> Self:
        """The meeting of `agentrl launch` on several machines, one process on each."""
        rank, machines = deployment.machine_rank, deployment.num_machines
        assert deployment.meeting_port is not None, "several machines know it beforehand"
        return cls(
            rank, machines, True, machines, deployment.master_addr or "127.0.0.1",
            deployment.meeting_port, hosts=rank == 0,
        )  # fmt: skip

    @classmethod
    def of_processes(cls, place: Place, environment: Mapping[str, str]) -> Self:
        """The meeting of the processes that Accelerate has started, by its variables."""
        # torch's agent has a store there already, which stays until the launch ends.
        agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return cls(
            place.machine, place.machines, place.local_rank == 0, place.processes,
            environment["MASTER_ADDR"], int(environment["MASTER_PORT"]),
            hosts=place.rank == 0 and not agent,
            name=f"plan-{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}",
        )  # fmt: skip


def agreed(inventory: Inventory, meeting: Meeting, patience_s: float = PATIENCE_S) -> Inventory:
    """The inventory with the least figures of all machines.

    All processes call it. Raises `ConfigError` if machines have different numbers of GPUs, or if
    some do not come within `patience_s` seconds.
    """
    return least(inventory, _exchange(Figures.of(inventory), meeting, patience_s))


def least(inventory: Inventory, machines: Sequence[Figures]) -> Inventory:
    """The inventory with the least figures of `machines`. Raises `ConfigError`, see `agreed`.

    GPUs are compared by rank: that with the least free memory on each machine, the one with the
    next, and so on. So what is planned without the first ones fits every machine.
    """
    counts = [len(each.free) for each in machines]
    if len(set(counts)) > 1:
        raise ConfigError(
            f"the machines of this run have {', '.join(map(str, counts))} GPUs to use: give all of "
            "them the same number with CUDA_VISIBLE_DEVICES"
        )
    ranks = [
        min(of_rank) for of_rank in zip(*(sorted(m.free.values()) for m in machines), strict=True)
    ]
    ranked = sorted(inventory.gpus, key=lambda gpu: gpu.free)
    free = {gpu.device: least for gpu, least in zip(ranked, ranks, strict=True)}
    of_all = {
        f"GPU {device} of machine {machine}": size
        for machine, each in enumerate(machines)
        for device, size in each.free.items()
    }
    return replace(
        inventory,
        gpus=tuple(replace(gpu, free=free[gpu.device]) for gpu in inventory.gpus),
        host_bytes=min((each.host for each in machines if each.host is not None), default=None),
        shortage=shortage_of(of_all) if len(machines) > 1 else None,
    )


def _exchange(own: Figures, meeting: Meeting, patience_s: float) -> list[Figures]:
    """The figures of all machines, in order."""
    # Imported here: planning loads torch, and what is refused before does not.
    from torch.distributed import (  # type: ignore[attr-defined]  # re-exported without saying so
        PrefixStore,
        TCPStore,
    )

    try:
        store = TCPStore(
            meeting.address, meeting.port, is_master=meeting.hosts, wait_for_workers=False,
            timeout=timedelta(seconds=patience_s),
        )  # fmt: skip
        keys = PrefixStore(f"agentrl-{meeting.name}", store)
        if meeting.reads:
            keys.set(str(meeting.machine), json.dumps(asdict(own)))
        found = [Figures(**json.loads(keys.get(str(each)))) for each in range(meeting.machines)]
        keys.add("have read", 1)
        end = time.monotonic() + patience_s
        while meeting.hosts and keys.add("have read", 0) < meeting.processes:
            if time.monotonic() > end:
                raise RuntimeError("not all of them have read")
            time.sleep(_LOOK_S)
    except RuntimeError as error:
        raise ConfigError(
            f"the {meeting.machines} machine(s) of this run did not meet at {meeting.address}:"
            f"{meeting.port} within {patience_s:g} s ({str(error).splitlines()[0]}): start the "
            "same command on each of them, with MASTER_ADDR and MASTER_PORT of the first one"
        ) from error
    return found
