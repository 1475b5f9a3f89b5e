"""Which processes a run needs on this machine, and the command line of each.

All processes get the same run flags, and the URLs of services that are started here. Secrets are
passed by environment, because every user of a machine can read a command line.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from agentrl.configs import Config, ConfigError, ParallelConfig, ServiceConfig, parse_config
from agentrl.configs.command_line import run_parser
from agentrl.configs.flags import FLAGS
from agentrl.configs.parsing import (
    Layer,
    as_words,
    config_of,
    handed_on,
    layers_given,
    merged,
    origins_of,
)
from agentrl.configs.secret_variables import VARIABLES
from agentrl.configs.verbs import SGLANG_FLAGS
from agentrl.inference.protocol import FRESH_VERSION
from agentrl.launcher.deployment import Deployment, default_sampler_processes
from agentrl.launcher.presets import DEMO_TOOLS, REPOSITORY, Preset, is_demo, launch_layers
from agentrl.launcher.processes import RESTARTS, Kind, Part
from agentrl.launcher.run_parts import LOGS
from agentrl.launcher.sampler_processes import sampler_part
from agentrl.rollout.agents import NEED_TOOLS
from agentrl.rollout.scheduling.process_share import ProcessShare

_CORES_BESIDE_A_GPU = 2  # cores for each trainer process or service that uses a GPU
_END_S = 15.0  # time after --drain_seconds in which a trainer releases its rows and the run
_SGLANG_GRACE_S = 40.0  # longer than `agentrl serve` waits for SGLang to end


@dataclass(frozen=True)
class Stack:
    """The parts of a run to start on this machine."""

    config: Config
    flags: tuple[str, ...]  # the run's flags, for every part
    origins: Mapping[str, str]  # where each flag comes from, by name
    mongod: bool  # whether a MongoDB is started
    tools: bool  # whether samplers use the demo's tools, as none are given
    services: int
    samplers: int
    trainers: int  # trainer processes of all machines; 0: none here
    gpus: int  # number of GPUs to use here
    deployment: Deployment

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
            f"samplers {self.samplers}",
            f"trainer processes {self.trainers}",
        ]
        return " · ".join(parts)

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
    gpus: int,
    command: str = "agentrl launch",
    cores: int = 1,
) -> Stack:
    """Plan the parts of a launch on this machine, by flags, files of flags and variables.

    `gpus`, `cores`: of this machine. `command`: the user's command, for messages. Raises
    `ConfigError`.
    """
    given = run_parser(command).parse(user_flags)
    own = layers_given(given.values, given.files, deployment.layers)
    layers = launch_layers(preset, run, own, deployment, gpus)
    config = config_of(merged(layers))
    use_gpus = 0 if config.parallel.use_cpu else gpus
    trainers = deployment.trainer_processes(use_gpus)
    demo = is_demo(own)
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
        elsewhere = config.sampling.inference_urls is not None or deployment.machine_rank > 0
        services = 0 if elsewhere else deployment.services
    here = services + trainers // deployment.num_machines
    computing = cores if here and not use_gpus else _CORES_BESIDE_A_GPU * here
    samplers = _samplers(config, deployment, default_sampler_processes(cores, computing))
    if trainers:
        _refuse_processes_that_do_not_fit(config.parallel, deployment, trainers, use_gpus)
    if services and deployment.sglang_command is None:
        _refuse_sglang_flags(config.services)
    return Stack(
        config=config,
        flags=tuple(as_words(layers)),
        origins=origins_of(layers),
        mongod=not has_database,
        tools=demo and not has_tools and samplers > 0,
        services=services,
        samplers=samplers,
        trainers=trainers,
        gpus=use_gpus,
        deployment=deployment,
    )


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
        services=0,
        samplers=_samplers(config, deployment, default_sampler_processes(cores)),
        trainers=0,
        gpus=0,
        deployment=deployment,
    )


def _samplers(config: Config, deployment: Deployment, default: int) -> int:
    """Number of sampler processes to start here."""
    if not config.sampling.enable_sampling:
        return 0
    return deployment.samplers(config.sampling.sampler_processes or default)


def _refuse_sglang_flags(services: ServiceConfig) -> None:
    """Raise `ConfigError` for flags that the local engine does not have."""
    for flag in SGLANG_FLAGS:
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
    run = stack.config.run.run_name
    parts: list[Part] = []
    for number, port in enumerate(addresses.service_ports[: stack.services]):
        service = service_part(
            stack.config,
            port,
            number=number if stack.services > 1 else None,
            gpus=stack.gpus,
            threads=threads,
            sglang_command=stack.deployment.sglang_command,
        )
        parts.append(service)
    if stack.trainers:
        parts.append(_trainer_part(stack, addresses.trainer_port, threads))
    for number in range(stack.samplers):
        parts.append(
            sampler_part(
                ProcessShare(number, stack.samplers),
                stack.flags,
                stack.config.sampling.drain_seconds,
                LOGS / f"{run}_sample-{number}.log",
            )
        )
    return parts


def service_part(
    config: Config,
    port: int,
    *,
    number: int | None,
    gpus: int,
    threads: Mapping[str, str],
    sglang_command: str | None,
    weight_version: int = FRESH_VERSION,
) -> Part:
    """An inference service for the model of `config`, which must have the database's URL.

    `number`: index of the service if there are several. `gpus`: number of GPUs of this machine to
    use (0: the CPU). `sglang_command`: starts SGLang; None for the local engine. `weight_version`:
    policy version of the model's weights.
    """
    suffix = "" if number is None else f"-{number}"
    variable = config.sampling.inference_api_key_env
    key = ["--inference_api_key_env", variable] if variable else []
    assert config.run.db_connection_string and config.model.model_name_or_path
    if sglang_command is None:
        # The trainer on GPUs computes and publishes in bfloat16 (assets/fsdp2_dst.yml).
        engine = ["--device", "cuda", "--dtype", "bfloat16"] if gpus else []
    else:
        engine = _sglang_flags(config.services, sglang_command, number or 0, gpus)
    return Part(
        name=f"service{suffix}",
        kind=Kind.SERVICE,
        command=_agentrl(
            "serve",
            "--model", config.model.model_name_or_path,
            "--port", str(port),
            "--run_name", config.run.run_name,
            "--startup_timeout", str(config.sampling.startup_timeout),
            "--weight_version", str(weight_version),
            "--max_running_requests", str(config.sampling.max_concurrent_samples_per_process),
            *key,
            *engine,
            *(["--fp32_head"] if config.compute.fp32_head else []),
        ),
        log=LOGS / f"{config.run.run_name}_serve{suffix}.log",
        environment={**threads, VARIABLES["db_connection_string"]: config.run.db_connection_string},
        restarts=RESTARTS,
        grace_s=10.0 if sglang_command is None else _SGLANG_GRACE_S,
    )  # fmt: skip


def _sglang_flags(services: ServiceConfig, command: str, number: int, gpus: int) -> list[str]:
    """The flags of `agentrl serve` for SGLang as service `number` of this machine."""
    if gpus:
        # Services take this machine's GPUs in turn.
        command += f" --base-gpu-id {number * services.inf_tp_size % gpus}"
    flags = [
        "--engine", "sglang",
        "--sglang_command", command,
        "--dtype", "bfloat16" if gpus else "float32",
        "--inf_tp_size", str(services.inf_tp_size),
        "--inf_ep_size", str(services.inf_ep_size),
    ]  # fmt: skip
    if services.inf_mem_ratio is not None:
        flags += ["--inf_mem_ratio", str(services.inf_mem_ratio)]
    if services.inf_share_gpus and gpus:
        flags.append("--memory_saver")
    return flags


def _trainer_part(stack: Stack, port: int | None, threads: dict[str, str]) -> Part:
    deployment = stack.deployment
    name = "fsdp2_dst.yml" if stack.gpus else "fsdp2_cpu.yml"
    drain = stack.config.sampling.drain_seconds
    meeting = [] if port is None else ["--main_process_port", str(port)]
    settings = deployment.accelerate_config or str(REPOSITORY / "assets" / name)
    flags, secrets = handed_on(stack.flags)
    return Part(
        name="trainer",
        kind=Kind.TRAINER,
        command=(
            sys.executable, "-m", "agentrl.launcher.accelerate", "--quiet",
            "--config_file", settings,
            "--num_processes", str(stack.trainers),
            "--num_machines", str(deployment.num_machines),
            "--machine_rank", str(deployment.machine_rank),
            "--main_process_ip", deployment.master_addr or "127.0.0.1",
            *meeting,
            "-m", "agentrl.training.trainer",
            *flags,
        ),
        log=trainer_log(stack.config.run.run_name, deployment.machine_rank),
        environment={
            **threads,
            **secrets,
            # By default, torch's agent kills processes that still run after 30 s.
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(math.ceil(drain + _END_S)),
        },
        may_end=True,
        grace_s=drain + 2 * _END_S,
    )  # fmt: skip


def trainer_log(run: str, machine_rank: int) -> Path:
    """The log file of one machine's trainer."""
    return LOGS / f"{run}_train_{machine_rank}.log"


def _agentrl(*arguments: str) -> tuple[str, ...]:
    """The `agentrl` command of this Python environment, independent of PATH."""
    return (sys.executable, "-m", "agentrl.cli", *arguments)
