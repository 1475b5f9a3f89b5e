"""Which processes a run needs on this machine, and the command line of each.

All processes get the same run flags, and the URLs of services that are started here. Secrets are
passed by environment, because every user of a machine can read a command line.
"""

import math
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from agentrl.configs import Config, ConfigError, ParallelConfig, ServiceConfig, parse_config
from agentrl.configs.command_line import run_parser
from agentrl.configs.flags import FLAGS
from agentrl.configs.hub import with_models_here
from agentrl.configs.parsing import (
    Layer,
    as_words,
    config_of,
    handed_on,
    layers_given,
    merged,
    origins_of,
)
from agentrl.configs.verbs import SGLANG_FLAGS
from agentrl.inference.protocol import FRESH_VERSION
from agentrl.launcher.deployment import REPOSITORY, Deployment, default_sampler_processes
from agentrl.launcher.gpu_plan import plan_gpus
from agentrl.launcher.inventory import Inventory
from agentrl.launcher.placement import Placement
from agentrl.launcher.presets import (
    DEMO_TOOLS,
    Preset,
    is_demo,
    launch_layers,
    preset_layers,
)
from agentrl.launcher.processes import Kind, Part
from agentrl.launcher.run_parts import LOGS
from agentrl.launcher.sampler_processes import gateway_part, sampler_part
from agentrl.launcher.service_part import gpu_environment, service_part
from agentrl.rollout.agents import NEED_TOOLS, OUTSIDE
from agentrl.rollout.scheduling.process_share import ProcessShare

_CORES_BESIDE_A_GPU = 2  # cores for each trainer process or service that uses a GPU
_END_S = 15.0  # time after --drain_seconds in which a trainer releases its rows and the run


@dataclass(frozen=True)
class Stack:
    """The parts of a run to start on this machine."""

    config: Config
    flags: tuple[str, ...]  # the run's flags, for every part
    origins: Mapping[str, str]  # where each flag comes from, by name
    mongod: bool  # whether a MongoDB is started
    tools: bool  # whether samplers use the demo's tools, as none are given
    samplers: int
    trainers: int  # trainer processes of all machines; 0: none here
    gpus: int  # number of GPUs to use here
    deployment: Deployment
    service_devices: tuple[str | None, ...] = ()  # CUDA_VISIBLE_DEVICES of each; None: the CPU
    placement: Placement | None = None  # of the GPUs, if trainer and services are placed on any
    feeds: bool = False  # whether this launch feeds a run without a trainer
    weight_version: int = FRESH_VERSION  # of the services that are started here
    own_rank: bool = False  # whether the trainer here is one process, of a rank that is given

    @property
    def services(self) -> int:
        """How many inference services are started here."""
        return len(self.service_devices)

    @property
    def is_first_machine(self) -> bool:
        """Whether this machine starts the parts that exist once, and reports on the run."""
        return self.deployment.machine_rank == 0

    @property
    def line(self) -> str:
        """A summary of the parts on one line."""
        count = {True: "started here", False: "given"}
        parts = [
            f"MongoDB {count[self.mongod]}",
            self._tools,
            f"inference services {self.services or 'given'}",
            self._samplers,
            "no trainer" if self.feeds else f"trainer processes {self.trainers}",
        ]
        return " · ".join(parts)

    @property
    def _samplers(self) -> str:
        agent = self.config.agent
        if agent.agent_name == OUTSIDE and self.samplers:
            return f"gateway on port {agent.gateway_port}"
        return f"samplers {self.samplers}"

    @property
    def _tools(self) -> str:
        if self.tools:
            return "tools of the demo in the samplers"
        return "tools given" if self.config.agent.mcp_manager_url else "no tools"


def plan_stack(
    preset: Preset,
    run: str,
    user_flags: Sequence[str],
    deployment: Deployment,
    inventory: Inventory,
    command: str = "agentrl launch",
    cores: int = 1,
) -> Stack:
    """Plan the parts of a launch on this machine, by flags, files of flags and variables.

    `inventory`: GPUs of this machine; `cores`: its cores. `command`: the user's command, for
    messages. Raises `ConfigError`.
    """
    given = run_parser(command).parse(user_flags)
    own = layers_given(given.values, given.files, deployment.layers)
    return plan_layers(preset, run, own, deployment, inventory, cores)


def plan_layers(
    preset: Preset,
    run: str,
    own: Sequence[Layer],
    deployment: Deployment,
    inventory: Inventory,
    cores: int = 1,
) -> Stack:
    """Plan the parts of a launch whose flags, beside the preset's, are `own`.

    The other arguments are those of `plan_stack`. Raises `ConfigError`.
    """
    layers, placement = placed_layers(preset, run, own, deployment, inventory)
    config = config_of(merged(layers))
    use_gpus = 0 if placement is None else len(inventory.gpus)
    trainers = deployment.trainer_processes(placement.train.gpus if placement else 0)
    demo, gateway = is_demo(own), config.agent.agent_name == OUTSIDE
    has_database = config.run.db_connection_string is not None
    has_tools = config.agent.mcp_manager_url is not None
    if deployment.num_machines > 1 and not has_database:
        raise ConfigError(
            f"NUM_MACHINES={deployment.num_machines}: machines share a run through its MongoDB, so "
            "set DB_URL to one that all of them reach"
        )
    else:
        if config.sampling.inference_urls is not None and deployment.num_services:
            raise ConfigError(
                f"NUM_SERVICES={deployment.num_services} with INFERENCE_URLS="
                f"{config.sampling.inference_urls}: set only one of the two, because no service is "
                "started if services are given"
            )
        services = _services(config, deployment, placement)
    here = services + trainers // deployment.num_machines
    computing = cores if here and not use_gpus else _CORES_BESIDE_A_GPU * here
    samplers = _samplers(config, deployment, default_sampler_processes(cores, computing))
    if trainers:
        _refuse_processes_that_do_not_fit(config.parallel, deployment, trainers, use_gpus)
    if services and deployment.service_command(use_gpus) is None:
        _refuse_sglang_flags(config.services, on_gpus=use_gpus > 0)
    return Stack(
        config=config,
        flags=tuple(as_words(layers)),
        origins=origins_of(layers),
        mongod=not has_database,
        tools=demo and not has_tools and samplers > 0 and not gateway,
        samplers=samplers,
        trainers=trainers,
        gpus=use_gpus,
        deployment=deployment,
        service_devices=_service_devices(services, placement),
        placement=placement,
    )


def placed_layers(
    preset: Preset, run: str, own: Sequence[Layer], deployment: Deployment, inventory: Inventory
) -> tuple[list[Layer], Placement | None]:
    """All flags of a launch, and the placement that some of them follow from, if GPUs are used.

    Models that are named as on the hub are downloaded. Raises `ConfigError` if the launch does not
    fit the GPUs.
    """
    own = [Layer(layer.origin, with_models_here(layer.values)) for layer in own]
    if not inventory.gpus or merged(own).get("use_cpu"):
        return launch_layers(preset, run, own, deployment, 0), None
    base = [*preset_layers(preset, 1, demo=is_demo(own)), *own]
    plan = plan_gpus(base, deployment, inventory, accelerate_file(deployment, on_gpus=True))
    gpus = plan.placement.train.gpus
    return launch_layers(preset, run, own, deployment, gpus, [plan.layer]), plan.placement


def accelerate_file(deployment: Deployment, *, on_gpus: bool) -> str:
    """Accelerate's file of a launch."""
    name = "fsdp2_dst.yml" if on_gpus else "fsdp2_cpu.yml"
    return deployment.accelerate_config or str(REPOSITORY / "assets" / name)


def _services(config: Config, deployment: Deployment, placement: Placement | None) -> int:
    """Number of inference services to start on this machine."""
    if config.sampling.inference_urls is not None:
        return 0
    if placement is None:
        reached = _are_reached(config, deployment) and deployment.num_services is not None
        return deployment.services if deployment.machine_rank == 0 or reached else 0
    if placement.serve is None or not placement.serves(deployment.machine_rank):
        return 0
    return placement.serve.count


def _service_devices(services: int, placement: Placement | None) -> tuple[str | None, ...]:
    if placement is None:
        return (None,) * services
    return tuple(map(placement.devices, placement.service_gpus[:services]))


def _are_reached(config: Config, deployment: Deployment) -> bool:
    """Whether other machines ask the services of this one: they may if they have a key."""
    return deployment.num_machines > 1 and config.sampling.inference_api_key_env is not None


def _refuse_processes_that_do_not_fit(
    parallel: ParallelConfig, deployment: Deployment, trainers: int, gpus: int
) -> None:
    """Raise `ConfigError` if the processes do not fit the GPUs or the parallel degrees.

    The trainer checks this too, but only after it is started.
    """
    here = trainers // deployment.num_machines
    if gpus and here > gpus:
        raise ConfigError(
            f"NUM_PROCESSES={trainers}: {here} trainer processes on this machine, which has "
            f"{gpus} GPU(s) to use; each needs one (or train on the CPU: --use_cpu true)"
        )
    multiple = parallel.processes_per_rank * parallel.dp_replicate_size
    if trainers % multiple:
        raise ConfigError(
            f"--tp_size {parallel.tp_size} x --cp_size {parallel.cp_size} x --dp_replicate_size "
            f"{parallel.dp_replicate_size}: set NUM_PROCESSES to a multiple of {multiple}, it is "
            f"{trainers}"
        )


def sampler_flags(
    run: str, user_flags: Sequence[str], deployment: Deployment, command: str = "agentrl launch"
) -> list[str]:
    """The flags of samplers that join a run: the given ones and the run's name.

    All other flags come from the run's database. Raises `ConfigError` without its URL.
    """
    given = run_parser(command).parse(user_flags)
    layers = layers_given(given.values, given.files, deployment.layers)
    if merged(layers).get("db_connection_string") is None:
        raise ConfigError(
            "SAMPLERS_ONLY=1 adds samplers to a run on other machines: set DB_URL to its MongoDB"
        )
    return as_words([*layers, Layer("run", {"run_name": run})])


def plan_samplers(
    flags: Sequence[str], config: Config, deployment: Deployment, cores: int = 1
) -> Stack:
    """Plan samplers alone, started with `flags`. `config`: that of the run that they join.

    Raises `ConfigError` if the agent needs tools and `config` does not have their address.
    """
    run, agent = config.run.run_name, config.agent
    if agent.agent_name in NEED_TOOLS and agent.mcp_manager_url is None:
        raise ConfigError(
            f"SAMPLERS_ONLY=1: agent {agent.agent_name} of run {run!r} uses tools, and the run's "
            "database does not have their address: set MCP_URL"
        )
    return Stack(
        config=config,
        flags=tuple(flags),
        origins={},
        mongod=False,
        tools=False,
        samplers=_samplers(config, deployment, default_sampler_processes(cores)),
        trainers=0,
        gpus=0,
        deployment=deployment,
    )


def _samplers(config: Config, deployment: Deployment, default: int) -> int:
    """Number of sampler processes to start here."""
    if not config.sampling.enable_sampling:
        return 0
    if config.agent.agent_name == OUTSIDE:
        return min(1, deployment.samplers(1))  # a gateway
    wanted = deployment.samplers(config.sampling.sampler_processes or default)
    return ProcessShare.processes(wanted, config.sampling.target_concurrency)


def _refuse_sglang_flags(services: ServiceConfig, *, on_gpus: bool) -> None:
    """Raise `ConfigError` for flags that the local engine does not have."""
    for flag in SGLANG_FLAGS:
        if on_gpus and flag == "inf_mem_ratio":
            continue  # it has a cache of that size
        if getattr(services, flag) != FLAGS[flag].default:
            raise ConfigError(
                f"--{flag} {getattr(services, flag)}: only SGLang has it; set SGLANG_COMMAND to the"
                " command that starts its server, or INFERENCE_URLS to services that run already"
            )


@dataclass(frozen=True)
class Addresses:
    """The loopback ports that this launch has reserved for its parts.

    `trainer_port`: None if torch chooses a free port.
    """

    service_ports: tuple[int, ...]
    trainer_port: int | None


def with_urls(stack: Stack, database_url: str) -> Stack:
    """Return the stack with the database's URL and the demo's tools, if it has them, as flags."""
    if stack.deployment.samplers_only:
        return stack  # no part that is started here has a URL
    flags = [*stack.flags, "--db_connection_string", database_url]
    if stack.tools:
        flags += ["--mcp_manager_url", DEMO_TOOLS]
    return replace(stack, flags=tuple(flags), config=parse_config(flags))


def thread_environment(stack: Stack, cores: int, environment: Mapping[str, str]) -> dict[str, str]:
    """OMP_NUM_THREADS of each service and trainer: its share of `cores`; {} if it is set."""
    if "OMP_NUM_THREADS" in environment:
        return {}
    here = stack.services + max(1, stack.trainers // stack.deployment.num_machines)
    return {"OMP_NUM_THREADS": str(max(1, cores // here))}


def plan_parts(stack: Stack, addresses: Addresses, threads: dict[str, str]) -> list[Part]:
    """The processes of a stack from `with_urls`, in the order in which they are started."""
    run, machine = stack.config.run.run_name, stack.deployment.machine_rank
    # Machines may share the folder of logs.
    prefix = f"{machine}-" if machine else ""
    parts: list[Part] = []
    for number, port in enumerate(addresses.service_ports[: stack.services]):
        service = service_part(
            stack.config,
            port,
            number=number if stack.services > 1 else None,
            machine=machine,
            devices=stack.service_devices[number],
            address=_address(stack),
            threads=threads,
            sglang_command=stack.deployment.service_command(stack.gpus),
            weight_version=stack.weight_version,
        )
        parts.append(service)
    if stack.trainers:
        parts.append(_trainer_part(stack, addresses.trainer_port, threads))
    for number in range(stack.samplers):
        if stack.config.agent.agent_name == OUTSIDE:
            parts.append(gateway_part(stack.flags, LOGS / f"{run}_gateway.log"))
            continue
        parts.append(
            sampler_part(
                ProcessShare(number, stack.samplers),
                stack.flags,
                stack.config.sampling.drain_seconds,
                LOGS / f"{run}_sample-{prefix}{number}.log",
            )
        )
    return parts


def service_urls(stack: Stack, addresses: Addresses) -> list[str]:
    """The URLs by which the services that are started here register with the run."""
    host = _address(stack) or "127.0.0.1"
    return [f"http://{host}:{port}" for port in addresses.service_ports[: stack.services]]


def _address(stack: Stack) -> str | None:
    """This machine's address for services that other machines ask; None if none do."""
    deployment, placement = stack.deployment, stack.placement
    if not (placement.reachable if placement else _are_reached(stack.config, deployment)):
        return None
    first = deployment.master_addr if deployment.machine_rank == 0 else None
    return deployment.node_address or first or socket.getfqdn()


def trainer_gpus(stack: Stack) -> dict[str, str]:
    """The variables that give a trainer process the trainer's GPUs of this machine."""
    placement = stack.placement
    return gpu_environment(placement.devices(placement.train_gpus)) if placement else {}


def _trainer_part(stack: Stack, port: int | None, threads: dict[str, str]) -> Part:
    deployment = stack.deployment
    drain = stack.config.sampling.drain_seconds
    flags, secrets = handed_on(stack.flags)
    command: tuple[str, ...] = (sys.executable, "-m", "agentrl.training.trainer", *flags)
    if not stack.own_rank:
        command = trainer_command(
            "agentrl.training.trainer", flags, deployment, stack.trainers, port,
            on_gpus=stack.gpus > 0,
        )  # fmt: skip
    log = trainer_log(stack.config.run.run_name, deployment.machine_rank)
    return Part(
        name="trainer",
        kind=Kind.TRAINER,
        command=command,
        log=None if stack.own_rank else log,
        environment={
            **threads,
            **secrets,
            **trainer_gpus(stack),
            # By default, torch's agent kills processes that still run after 30 s.
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(math.ceil(drain + _END_S)),
        },
        may_end=True,
        grace_s=drain + 2 * _END_S,
    )  # fmt: skip


def trainer_command(
    module: str,
    flags: Sequence[str],
    deployment: Deployment,
    processes: int,
    port: int | None,
    *,
    on_gpus: bool,
) -> tuple[str, ...]:
    """The command that launches `module` in the trainer's processes of this machine.

    `processes`: of all machines together; `port`: where they meet, None for any free one.
    """
    return (
        sys.executable, "-m", "agentrl.launcher.accelerate", "--quiet",
        "--config_file", accelerate_file(deployment, on_gpus=on_gpus),
        "--num_processes", str(processes),
        "--num_machines", str(deployment.num_machines),
        "--machine_rank", str(deployment.machine_rank),
        "--main_process_ip", deployment.master_addr or "127.0.0.1",
        *([] if port is None else ["--main_process_port", str(port)]),
        "-m", module,
        *flags,
    )  # fmt: skip


def trainer_log(run: str, machine_rank: int) -> Path:
    """The log file of one machine's trainer."""
    return LOGS / f"{run}_train_{machine_rank}.log"
