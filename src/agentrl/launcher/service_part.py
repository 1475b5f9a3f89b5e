"""An inference service as a part of a launch: the command of `agentrl serve`, and its GPUs."""

import sys
from collections.abc import Mapping

from agentrl.configs import Config, ServiceConfig
from agentrl.configs.secret_variables import VARIABLES
from agentrl.inference.protocol import FRESH_VERSION
from agentrl.launcher.processes import RESTARTS, Kind, Part
from agentrl.launcher.run_parts import LOGS

_LOCAL_GRACE_S = 10.0
_SGLANG_GRACE_S = 40.0  # longer than `agentrl serve` waits for SGLang to end


def service_part(
    config: Config,
    port: int,
    *,
    number: int | None,
    machine: int = 0,
    devices: str | None = None,
    address: str | None = None,
    threads: Mapping[str, str],
    sglang_command: str | None,
    weight_version: int = FRESH_VERSION,
) -> Part:
    """An inference service for the model of `config`, which must have the database's URL.

    `number`: index of the service if there are several. `machine`: this one's number.
    `devices`: CUDA_VISIBLE_DEVICES of the service; None: the CPU. `address`: this machine's, for
    other machines that ask the service; None if there are none. `sglang_command`: starts SGLang;
    None for the local engine. `weight_version`: policy version of the model's weights.
    """
    suffix = "" if number is None else f"-{number}"
    variable = config.sampling.inference_api_key_env
    key = ["--inference_api_key_env", variable] if variable else []
    assert config.run.db_connection_string and config.model.model_name_or_path
    on_gpu = devices is not None
    if sglang_command is None:
        engine = _local_flags(config.services) if on_gpu else []
    else:
        engine = _sglang_flags(config.services, sglang_command, on_gpu=on_gpu)
    if address is not None:
        engine += ["--host", "0.0.0.0", "--public_url", f"http://{address}:{port}"]
    return Part(
        name=f"service{suffix}",
        kind=Kind.SERVICE,
        command=(
            # independent of PATH
            sys.executable, "-m", "agentrl.cli", "serve",
            "--model", config.model.model_name_or_path,
            "--port", str(port),
            "--run_name", config.run.run_name,
            "--startup_timeout", str(config.sampling.startup_timeout),
            "--weight_version", str(weight_version),
            "--max_running_requests", str(config.sampling.max_concurrent_samples_per_process),
            *key,
            *engine,
            *(["--fp32_head"] if config.compute.fp32_head else []),
            *(["--enable_metrics"] if config.run.metrics_port is not None else []),
        ),
        log=LOGS / f"{config.run.run_name}_serve{f'-{machine}' if machine else ''}{suffix}.log",
        environment={
            **threads,
            **(gpu_environment(devices) if devices is not None else {}),
            VARIABLES["db_connection_string"]: config.run.db_connection_string,
        },
        restarts=RESTARTS,
        grace_s=service_grace_s("local" if sglang_command is None else "sglang"),
    )  # fmt: skip


def service_grace_s(engine: str) -> float:
    """Seconds between SIGTERM and SIGKILL of `agentrl serve` with this engine."""
    return _SGLANG_GRACE_S if engine == "sglang" else _LOCAL_GRACE_S


def gpu_environment(devices: str) -> dict[str, str]:
    """The variables that give a process these GPUs, numbered as nvidia-smi does."""
    return {"CUDA_VISIBLE_DEVICES": devices, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def _local_flags(services: ServiceConfig) -> list[str]:
    """The flags of `agentrl serve` for the local engine on a GPU."""
    # The trainer on GPUs computes and publishes in bfloat16 (assets/fsdp2_dst.yml).
    flags = ["--device", "cuda", "--dtype", "bfloat16"]
    if services.inf_mem_ratio is not None:
        flags += ["--inf_mem_ratio", str(services.inf_mem_ratio)]
    return flags


def _sglang_flags(services: ServiceConfig, command: str, *, on_gpu: bool) -> list[str]:
    """The flags of `agentrl serve` for SGLang."""
    flags = [
        "--engine", "sglang",
        "--sglang_command", command,
        "--dtype", "bfloat16" if on_gpu else "float32",
        "--inf_tp_size", str(services.inf_tp_size),
        "--inf_ep_size", str(services.inf_ep_size),
    ]  # fmt: skip
    if services.inf_mem_ratio is not None:
        flags += ["--inf_mem_ratio", str(services.inf_mem_ratio)]
    if services.inf_share_gpus and on_gpu:
        flags.append("--memory_saver")
    return flags
