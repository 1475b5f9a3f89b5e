"""The environment variables of a launch: where the processes of a run are.

A flag of the command line takes precedence over the variable of the same meaning (`MODEL` and
`--model_name_or_path`).
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path, PurePosixPath
from typing import Any

from agentrl.configs import ConfigError
from agentrl.configs.flags import FLAGS, flags_named
from agentrl.configs.parsing import Layer, as_words
from agentrl.redaction import without_passwords

REPOSITORY = Path(__file__).resolve().parents[3]
SGLANG_PYTHON = REPOSITORY / ".venv-sglang" / "bin" / "python"  # made by scripts/setup.sh
SGLANG_OF_SETUP = f"{SGLANG_PYTHON} -m sglang.launch_server"
_ENGINES = ("sglang", "local")
_LAST_PORT = 65535
_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUP = Path("/proc/self/cgroup")
_MOST_SAMPLERS = 8  # each makes hundreds of turns in a second: more than services answer
_SEVERAL_MACHINES_PORT = 29500  # torch's own default: all machines must know it beforehand


def _variable(default: Any, help: str, flag: str | None = None) -> Any:
    """A field that is an environment variable; `flag` is the run flag that it stands for."""
    if flag is not None:
        flags_named(flag)
    return field(default=default, metadata={"help": help, "flag": flag})


@dataclass(frozen=True)
class Deployment:
    """The environment variables of the scripts, by their names in lower case."""

    num_processes: int | None = _variable(
        None, "number of trainer processes on all machines together (default: one per GPU, else 1)"
    )
    machine_rank: int = _variable(0, "number of this machine among NUM_MACHINES, counted from 0")
    num_machines: int = _variable(
        1, "number of machines that train together, each of which calls the script"
    )
    master_addr: str | None = _variable(None, "address of machine 0 (default: this machine)")
    master_port: int | None = _variable(
        None, "port on machine 0 where trainers meet (default: a free one; 29500 on several)"
    )
    model: str | None = _variable(
        None,
        "folder of the model to train, or its name on the Hugging Face hub (default: the demo's)",
        "model_name_or_path",
    )
    train_file: str | None = _variable(
        None,
        "file of the training tasks: JSONL, JSON or Parquet (default: the demo's, with its model)",
        "train_file",
    )
    eval_file: str | None = _variable(
        None,
        "file of the held-out tasks: JSONL, JSON or Parquet (default: the demo's, with its model)",
        "eval_file",
    )
    db_url: str | None = _variable(
        None,
        "mongodb:// URL of the run's MongoDB (default: one is started here)",
        "db_connection_string",
    )
    mcp_url: str | None = _variable(
        None,
        "URL of an MCP server (default: the demo's tools are in its samplers)",
        "mcp_manager_url",
    )
    mcp_auth_token: str | None = _variable(
        None,
        "bearer token for tool servers that are given by URL (default: none)",
        "mcp_auth_token",
    )
    inference_urls: str | None = _variable(
        None,
        "URLs of inference services, separated by commas (default: started here)",
        "inference_urls",
    )
    num_samplers: int | None = _variable(
        None,
        "number of sampler processes on this machine (default: --sampler_processes, on further "
        "machines 0)",
    )
    num_services: int | None = _variable(
        None,
        "number of inference services to start on this machine (default: 1, on GPUs as many as fit "
        "them; none if INFERENCE_URLS is set)",
    )
    sglang_command: str | None = _variable(
        None,
        "command that starts SGLang's server: the services are SGLang (default: that of "
        ".venv-sglang on GPUs, else our own engine)",
    )
    inference_engine: str | None = _variable(
        None, "engine of the services, sglang or local (default: sglang on GPUs, else local)"
    )
    node_address: str | None = _variable(
        None,
        "name or address of this machine for services that other machines ask (default: its host "
        "name)",
    )
    samplers_only: bool = _variable(
        False, "1: add samplers to a run that lives elsewhere (needs DB_URL)"
    )
    accelerate_config: str | None = _variable(
        None, "Accelerate's file (default: assets/fsdp2_dst.yml with GPUs, else fsdp2_cpu.yml)"
    )

    @property
    def layers(self) -> list[Layer]:
        """The flags that the variables stand for, each from its variable."""
        return [
            Layer(f"environment {variable.name.upper()}", {variable.metadata["flag"]: value})
            for variable in fields(self)
            if variable.metadata["flag"] and (value := getattr(self, variable.name)) is not None
        ]

    @property
    def run_flags(self) -> list[str]:
        """`layers` as a command line has them."""
        return as_words(self.layers)

    def samplers(self, wanted: int) -> int:
        """Number of sampler processes to start here. `wanted`: the default."""
        if self.num_samplers is not None:
            return self.num_samplers
        return wanted if self.samplers_only or self.machine_rank == 0 else 0

    @property
    def services(self) -> int:
        """Inference services to start here if none are given."""
        return 1 if self.num_services is None else self.num_services

    def service_command(self, gpus: int) -> str | None:
        """The command of SGLang's server for the services of a launch; None: our own engine."""
        engine = self.inference_engine or ("sglang" if self.sglang_command or gpus else "local")
        if engine == "local":
            return None
        return self.sglang_command or SGLANG_OF_SETUP

    def trainer_processes(self, gpus: int) -> int:
        """Trainer processes on all machines together, if each machine has `gpus` GPUs to use."""
        return self.num_processes or max(1, gpus) * self.num_machines

    @property
    def meeting_port(self) -> int | None:
        """Port where trainers meet; None on one machine, where torch chooses a free one."""
        if self.master_port is not None:
            return self.master_port
        return None if self.num_machines == 1 else _SEVERAL_MACHINES_PORT


def read_deployment(environment: Mapping[str, str]) -> Deployment:
    """The deployment that the variables give. Empty ones count as not set.

    Raises `ConfigError` for a value of the wrong type or out of its range.
    """
    values: dict[str, object] = {}
    for variable in fields(Deployment):
        name = variable.name.upper()
        text = environment.get(name, "").strip()
        if not text:
            continue
        if variable.type in (int, int | None):
            values[variable.name] = _whole_number(name, text)
        elif variable.type is bool:
            values[variable.name] = _truth(name, text)
        else:
            values[variable.name] = text
    deployment = Deployment(**values)  # type: ignore[arg-type]
    _validate(deployment)
    return deployment


def _whole_number(name: str, text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"{name}={text}: must be a whole number, 0 or more")
    return int(text)


def _truth(name: str, text: str) -> bool:
    known = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if text.lower() not in known:
        raise ConfigError(f"{name}={text}: must be 1 or 0")
    return known[text.lower()]


def _validate(deployment: Deployment) -> None:
    if deployment.num_machines < 1 or deployment.num_processes == 0:
        raise ConfigError("NUM_MACHINES and NUM_PROCESSES must be at least 1")
    if deployment.machine_rank >= deployment.num_machines:
        raise ConfigError(
            f"MACHINE_RANK={deployment.machine_rank}: must be below NUM_MACHINES="
            f"{deployment.num_machines}, because the first machine is 0"
        )
    if deployment.num_processes and deployment.num_processes % deployment.num_machines:
        raise ConfigError(
            f"NUM_PROCESSES={deployment.num_processes}: counts all machines together, so it must "
            f"be a multiple of NUM_MACHINES={deployment.num_machines}"
        )
    if deployment.machine_rank > 0 and deployment.master_addr is None:
        raise ConfigError(
            f"MACHINE_RANK={deployment.machine_rank}: set MASTER_ADDR to the address of machine 0, "
            "where the trainers of all machines meet"
        )
    if deployment.master_port is not None and not 0 < deployment.master_port <= _LAST_PORT:
        raise ConfigError(f"MASTER_PORT={deployment.master_port}: must be 1 to {_LAST_PORT}")
    if deployment.inference_engine not in (None, *_ENGINES):
        raise ConfigError(
            f"INFERENCE_ENGINE={deployment.inference_engine}: must be {' or '.join(_ENGINES)}"
        )
    if deployment.inference_engine == "local" and deployment.sglang_command:
        raise ConfigError("INFERENCE_ENGINE=local with SGLANG_COMMAND: set only one of the two")
    if deployment.samplers_only and deployment.num_samplers == 0:
        raise ConfigError("SAMPLERS_ONLY=1 with NUM_SAMPLERS=0 would start nothing")


def count_gpus(environment: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """NVIDIA GPUs that this process may use, found without loading torch."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    present = sum(entry.name[6:].isdecimal() for entry in devices.glob("nvidia[0-9]*"))
    if visible is None:
        return present
    named = [name for name in visible.split(",") if name.strip() not in ("", "-1")]
    return min(present, len(named))


def describe_variables(deployment: Deployment) -> dict[str, str]:
    """The variables by name, each with its meaning and what it is set to or stands at."""
    described = {}
    for variable in fields(Deployment):
        value = getattr(deployment, variable.name)
        text = variable.metadata["help"]
        if value != variable.default:
            flag = variable.metadata["flag"]
            hidden = flag is not None and FLAGS[flag].info.secret
            text += " (set)" if hidden else f" (set: {without_passwords(str(value))})"
        elif "(default: " not in text and value is not None:
            text += f" (default: {int(value) if isinstance(value, bool) else value})"
        described[variable.name.upper()] = text
    return described


def usable_cores() -> int:
    """Number of cores that this process may use, within the CPU quotas of container and job."""
    cores = len(os.sched_getaffinity(0))
    for quota, period in (limit.split() for limit in _limits("cpu.max")):
        if quota != "max":
            cores = max(1, min(cores, int(quota) // int(period)))
    return cores


def usable_memory() -> int:
    """Bytes of host memory that this process may use, within the limits of container and job."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([memory, *(int(limit) for limit in _limits("memory.max") if limit != "max")])


def _limits(file: str) -> Iterator[str]:
    """Yield what the control groups (v2) of this process have in `file`, inner ones first.

    A container sees its own as the root. A job of Slurm's and a unit of systemd's have theirs
    further in, and limit all that are within.
    """
    try:
        groups = _OWN_GROUP.read_text().splitlines()
    except FileNotFoundError:  # a kernel without control groups
        groups = []
    own = next((line for line in groups if line.startswith("0::")), "0::/")
    inner = PurePosixPath(own.removeprefix("0::/"))
    for group in (inner, *inner.parents):
        try:
            yield (_CONTROL_GROUPS / group / file).read_text().strip()
        except FileNotFoundError:  # the machine's root has none, nor have groups of another kind
            continue


def default_sampler_processes(cores: int, computing: int = 0) -> int:
    """Default number of sampler processes: one for each core, at most `_MOST_SAMPLERS`.

    `computing`: number of cores that other parts of a launch need.
    """
    return max(1, min(cores - computing, _MOST_SAMPLERS))
