"""What `accelerate launch` and the scripts that call it say by environment variables.

    RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE   of a process, set by Accelerate
    NCCL_TIMEOUT                                     milliseconds that a collective may take
    FSDP_*                                           the `fsdp_config` of Accelerate's file

The NCCL_* variables that NCCL itself reads, and those of torch, need nothing here: every process
inherits them.
"""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Self

from agentrl.configs import ConfigError
from agentrl.configs.flags import Value
from agentrl.configs.parsing import Layer

_ON = ("1", "true", "yes")
# Of `fsdp_config`, as Accelerate hands it on: what is done here in any case.
_DONE = {
    "FSDP_VERSION": ("2",),
    "FSDP_RESHARD_AFTER_FORWARD": ("true", "full_shard"),
    "FSDP_SHARDING_STRATEGY": ("full_shard", "1"),
    "FSDP_USE_ORIG_PARAMS": ("true",),
    "FSDP_SYNC_MODULE_STATES": ("true",),
    "FSDP_FORWARD_PREFETCH": ("false",),
    "FSDP_CPU_RAM_EFFICIENT_LOADING": ("true", "false"),  # each process reads only its shard
    "FSDP_STATE_DICT_TYPE": ("sharded_state_dict",),
    "FSDP_AUTO_WRAP_POLICY": ("transformer_based_wrap",),
}
_AS_FLAGS = {
    "FSDP_OFFLOAD_PARAMS": "param_offload",
    "FSDP_ACTIVATION_CHECKPOINTING": "gradient_checkpointing",
}


@dataclass(frozen=True)
class Place:
    """Where Accelerate put this process."""

    rank: int
    local_rank: int
    processes: int  # on all machines
    processes_here: int

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Self:
        """The place of this process. Without variables it is the only one."""
        processes = int(environment.get("WORLD_SIZE", "1"))
        rank = int(environment.get("RANK", "0"))
        here = int(environment.get("LOCAL_WORLD_SIZE", processes))
        return cls(rank, int(environment.get("LOCAL_RANK", "0")), processes, here)

    @property
    def machines(self) -> int:
        """Number of machines. All have as many processes."""
        return self.processes // self.processes_here

    @property
    def machine(self) -> int:
        """Number of this machine among them."""
        return self.rank // self.processes_here

    def settle(self, environment: MutableMapping[str, str]) -> None:
        """Set the variables of a process group of one, which `accelerate launch` leaves out."""
        if "WORLD_SIZE" not in environment:
            environment.update(
                RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1",
                MASTER_ADDR="127.0.0.1", MASTER_PORT="0",
            )  # fmt: skip

    def variables(self, environment: Mapping[str, str], gpus: int) -> dict[str, str]:
        """The variables of a launch (`deployment.py`), with what Accelerate says of this machine.

        As there, each trainer process has a sampler process, and each machine services: on its
        `gpus` by a plan, without any one.
        """
        defaults = {"NUM_SAMPLERS": str(self.processes_here)}
        if not gpus and not environment.get("INFERENCE_URLS", "").strip():
            defaults["NUM_SERVICES"] = "1"
        given = {name: text for name, text in environment.items() if text.strip()}
        return {
            **defaults,
            **given,
            "NUM_PROCESSES": str(self.processes),
            "NUM_MACHINES": str(self.machines),
            "MACHINE_RANK": str(self.machine),
            "MASTER_ADDR": environment.get("MASTER_ADDR", "127.0.0.1"),
            "MASTER_PORT": _port(environment.get("MASTER_PORT", "")),
        }


def _port(text: str) -> str:
    return "" if text in ("", "0") else text


def environment_layers(environment: Mapping[str, str]) -> list[Layer]:
    """The flags that NCCL_TIMEOUT and `fsdp_config` stand for. Raises `ConfigError`."""
    layers: list[Layer] = []
    timeout = environment.get("NCCL_TIMEOUT", "").strip()
    if timeout:
        if not timeout.isdecimal() or int(timeout) == 0:
            raise ConfigError(f"NCCL_TIMEOUT={timeout}: must be a whole number of milliseconds")
        seconds = max(1, int(timeout) // 1000)
        layers.append(Layer("environment NCCL_TIMEOUT", {"ddp_timeout": seconds}))
    sharding: dict[str, Value] = {
        flag: True for name, flag in _AS_FLAGS.items() if environment.get(name, "").lower() in _ON
    }
    if sharding:
        layers.append(Layer("fsdp_config of Accelerate's file", sharding))
    return layers


def not_followed(environment: Mapping[str, str]) -> list[str]:
    """A line for what `fsdp_config` asks for and is not done."""
    asked = [
        f"{name.removeprefix('FSDP_').lower()}: {environment[name]}"
        for name, done in _DONE.items()
        if environment.get(name) and environment[name].lower() not in done
    ]
    if not asked:
        return []
    return [
        f"fsdp_config of Accelerate's file: {', '.join(sorted(asked))} is not followed: FSDP2 "
        "shards each layer over all processes, and checkpoints are sharded"
    ]


def forget_fsdp(environment: MutableMapping[str, str]) -> None:
    """Take `fsdp_config` out of the environment: the trainer shards the model itself."""
    for name in [*_DONE, *_AS_FLAGS, "ACCELERATE_USE_FSDP", "FSDP_TRANSFORMER_CLS_TO_WRAP"]:
        environment.pop(name, None)
