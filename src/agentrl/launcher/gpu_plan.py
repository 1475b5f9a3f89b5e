"""The placement of a launch: from its flags and variables to a plan, and the flags that follow.

A flag that the user gives stands; one that is left out gets the value of the plan. Where nothing
fits, the error says what would.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from agentrl.configs import Config, ConfigError
from agentrl.configs.flags import Value
from agentrl.configs.parsing import Layer, config_of, merged
from agentrl.launcher.deployment import Deployment
from agentrl.launcher.inventory import GIB, Inventory, gib
from agentrl.launcher.placement import (
    USABLE,
    Asked,
    ModelSizes,
    Placement,
    host_needed,
    longest_record,
    place,
)
from agentrl.training.model.memory_model import MemorySetup

ORIGIN = "placement"
_OF_A_MACHINE = 8  # GPUs, where more machines are proposed
_MOST_MACHINES = 64
_SHORTEST_RECORD = 1024
_ADAPTER = 0.02  # of a layer: --lora_rank 32 on all of its projections are 1.3% of an 8B's


@dataclass(frozen=True)
class GpuPlan:
    """A placement, and the flags that it sets beside those that are given."""

    placement: Placement
    layer: Layer


def plan_gpus(
    layers: Sequence[Layer], deployment: Deployment, inventory: Inventory, accelerate: str
) -> GpuPlan:
    """Plan a launch with these flags. `accelerate`: Accelerate's file. Raises `ConfigError`."""
    # Imported here: it makes a model, and torch and transformers load slowly.
    from agentrl.launcher.model_sizes import read_sizes

    given = merged(layers)
    config = config_of(given)
    asked = asked_of(config, given, deployment, inventory, bf16=_mixed_precision(accelerate))
    plan = place_or_refuse(inventory, read_sizes(config), asked)
    return GpuPlan(plan, Layer(ORIGIN, _flags(plan, given)))


def asked_of(
    config: Config,
    given: Mapping[str, Value],
    deployment: Deployment,
    inventory: Inventory,
    *,
    bf16: bool,
) -> Asked:
    """What flags and variables ask of a placement. Raises `ConfigError` if they contradict."""
    machines = inventory.machines
    trainers = deployment.num_processes and deployment.num_processes // machines
    services = 0 if config.sampling.inference_urls is not None else deployment.num_services
    serving, gpus = config.services.gpus_for_inference, len(inventory.gpus)
    ratio = config.services.inf_mem_ratio
    if trainers and trainers > gpus:
        raise ConfigError(
            f"NUM_PROCESSES={deployment.num_processes}: {trainers} trainer processes on this "
            f"machine, which has {gpus} GPU(s) to use; each needs one (or train on the CPU: "
            "--use_cpu true)"
        )
    if serving and serving > gpus:
        raise ConfigError(f"--gpus_for_inference {serving}: a machine has {gpus} GPU(s) to use")
    shared = config.services.inf_share_gpus or ratio is not None
    if trainers and serving and trainers + serving > gpus and services != 0 and not shared:
        raise ConfigError(
            f"{trainers} GPUs that train and --gpus_for_inference {serving} are more than the "
            f"{gpus} of a machine: to share some, let the services release their memory during a "
            "step (--sync_sampling true --inf_share_gpus true), or keep to a share of it "
            "(--inf_mem_ratio)"
        )
    turns = config.services.inf_share_gpus if "inf_share_gpus" in given else None
    if given.get("sync_sampling") is False:
        turns = False
    asked_for = {name: getattr(config.parallel, name) for name in ("tp_size", "cp_size", "ep_size")}
    tp, cp, ep = (value if name in given else None for name, value in asked_for.items())
    compute = config.compute
    return Asked(
        tokens=config.sampling.max_tokens,
        setup=MemorySetup(
            tokens=1,
            chunk=compute.loss_seq_chunk_size,
            gathers_keys=config.parallel.cp_mode == "allgather",
            entropy=config.loss.log_entropy or config.loss.entropy_coef > 0,
            bf16=bf16 or compute.bf16,
            fp32_head=compute.fp32_head,
            activation_offloading=compute.activation_offloading,
            param_offload=compute.param_offload,
        ),
        tp=tp,
        cp=cp,
        ep=ep,
        dp_replicate=config.parallel.dp_replicate_size,
        micro_batch_tokens=compute.micro_batch_tokens,
        checkpointing=(
            compute.gradient_checkpointing if "gradient_checkpointing" in given else None
        ),
        models=2 if config.loss.loss_calculator == "PPO" else 1,
        reference=config.loss.beta > 0 and not config.lora.lora_rank,
        trainers=trainers,
        serving=serving,
        services=services,
        inf_tp=config.services.inf_tp_size if "inf_tp_size" in given else None,
        inf_mem_ratio=ratio,
        in_turns=turns,
        reachable=machines > 1 and config.sampling.inference_api_key_env is not None,
    )


def place_or_refuse(inventory: Inventory, model: ModelSizes, asked: Asked) -> Placement:
    """The best placement. Raises `ConfigError` with what would fit if there is none."""
    found = place(inventory, model, asked)
    if found is not None:
        return found
    needed = host_needed(inventory, model, asked)
    missing = "do not fit"
    if needed is not None:
        assert inventory.host_bytes is not None, "nothing else was missing"
        each = " of each machine" if inventory.machines > 1 else ""
        missing = (
            f"fit, but {_up(needed)} GiB of host memory{each} are needed, and "
            f"{inventory.host_bytes // GIB} may be used (for a checkpoint while it is saved, "
            "published weights and offloaded states)"
        )
    billions = f"{model.shape.parameters / 1e9:.1f}B parameters"
    parts = "a trainer" if asked.services == 0 else "a trainer and a service"
    raise ConfigError(
        f"{inventory.line}, of which {USABLE:.0%} can be used: {parts} for a model of {billions} "
        f"and records of {longest_record(model, asked):,} tokens {missing}; "
        + ("; ".join(would_fit(inventory, model, asked)) or "nor would they on more such GPUs")
    )


def _up(size: int) -> int:
    """GiB that `size` bytes fit in."""
    return -(-size // GIB)


def would_fit(inventory: Inventory, model: ModelSizes, asked: Asked) -> Iterator[str]:
    """Yield what would fit instead, each with one change."""
    for fewer in inventory.freer():
        needed = host_needed(fewer, model, asked)
        if needed is not None:
            host = inventory.host_bytes
            short = host is not None and needed > host
            also = f", with {_up(needed)} GiB of host memory" if short else ""
            yield inventory.choosing(fewer) + also
            break
    low, high = 0, longest_record(model, asked)
    while high - low > _SHORTEST_RECORD:
        middle = (low + high) // 2
        fits = place(inventory, model, replace(asked, tokens=middle, micro_batch_tokens=None))
        low, high = (middle, high) if fits else (low, middle)
    if low:
        yield f"records of --max_tokens {low // _SHORTEST_RECORD * _SHORTEST_RECORD} would"
    free = Asked(asked.tokens, asked.setup, models=asked.models, reference=asked.reference,
                 services=0 if asked.services == 0 else None)  # fmt: skip
    if place(inventory, model, free):
        yield "it would without the flags that place or divide the model"
    for flag in ("param_offload", "activation_offloading"):
        kept = replace(asked, setup=replace(asked.setup, **{flag: False}))
        if getattr(asked.setup, flag) and place(inventory, model, kept):
            yield f"--{flag} false would"
    if host_needed(inventory, model, asked) is not None:
        adapted = _with_adapter(model)
        if adapted is not None and place(inventory, adapted, asked):
            yield "an adapter would, whose checkpoint is small (--lora_rank)"
    offloading = replace(asked, setup=replace(asked.setup, param_offload=True))
    if not asked.setup.param_offload and (found := place(inventory, model, offloading)):
        yield f"--param_offload would, with {found.host / GIB:.0f} GiB of each machine's memory"
    more = next(_larger(inventory, model, asked), None)
    if more is not None:
        where = f"{more.machines} machines of " if more.machines > 1 else ""
        such = "such GPUs" if inventory.even else f"GPUs with {gib(more.free)} GiB"
        yield f"{where}{len(more.gpus)} {such} would"


def _with_adapter(model: ModelSizes) -> ModelSizes | None:
    """The model with an adapter of usual size in the place of what is trained; None if it has one.

    An adapter is not divided.
    """
    shape = model.shape
    if shape.layer_trained < shape.layer_parameters:
        return None
    layer = int(_ADAPTER * shape.layer_parameters)
    return replace(
        model,
        shape=replace(shape, layer_trained=layer, root_trained=0),
        degrees=frozenset(each for each in model.degrees if each[0] == each[2] == 1),
    )


def _larger(inventory: Inventory, model: ModelSizes, asked: Asked) -> Iterator[Inventory]:
    """Yield larger inventories of the same GPUs at which the model fits."""
    gpu, machines = inventory.gpus[0], inventory.machines
    gpu = replace(gpu, free=inventory.free)
    free = replace(asked, trainers=None, serving=None)
    count = len(inventory.gpus) + 1
    if count > _OF_A_MACHINE:
        count, machines = len(inventory.gpus), machines + 1
    while machines <= _MOST_MACHINES:
        larger = replace(inventory, gpus=(gpu,) * count, machines=machines)
        if place(larger, model, free):
            yield larger
        if count < _OF_A_MACHINE:
            count += 1
        else:
            machines += 1 if machines < _OF_A_MACHINE else machines


def _flags(plan: Placement, given: Mapping[str, Value]) -> dict[str, Value]:
    """The flags of a placement that are not given."""
    train, serve = plan.train, plan.serve
    flags: dict[str, Value] = {
        "tp_size": train.tp,
        "cp_size": train.cp,
        "ep_size": train.ep,
        "micro_batch_tokens": train.tokens,
        "gradient_checkpointing": train.checkpointing,
    }
    if serve is not None:
        flags |= {
            "gpus_for_inference": serve.count * serve.tp,
            "inf_tp_size": serve.tp,
            "inf_mem_ratio": serve.share,
        }
    if plan.in_turns:
        flags |= {"inf_share_gpus": True, "sync_sampling": True}
    return {name: value for name, value in flags.items() if name not in given}


def _mixed_precision(file: str) -> bool:
    """Whether Accelerate's file has the trainer compute in bfloat16."""
    try:
        content = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"ACCELERATE_CONFIG={file}: cannot be read ({error})") from None
    return isinstance(content, dict) and content.get("mixed_precision") == "bf16"


def plan_lines(plan: Placement) -> list[str]:
    """The plan in words, a line for each part."""
    train, serve, usable = plan.train, plan.serve, USABLE * plan.inventory.free
    lines = [
        plan.inventory.line,
        f"train: {_gpus(plan.train_gpus)} · dp {train.dp} x tp {train.tp} x cp {train.cp}"
        f" · ep {train.ep} · micro-batches of {train.tokens:,} tokens, "
        f"{'with' if train.checkpointing else 'without'} gradient checkpointing · "
        f"{train.peak / GIB:.1f} of {usable / GIB:.1f} GiB at the peak, "
        f"{train.between / GIB:.1f} between steps",
    ]
    if serve is not None:
        used = tuple(gpu for service in plan.service_gpus for gpu in service)
        how = ""
        if plan.in_turns:
            how = (
                " · in turns with the trainer: released before it loads (at a resume "
                f"{train.loaded / GIB:.1f} GiB), and for each step"
            )
        where = (
            " of the first machine" if plan.inventory.machines > 1 and not plan.reachable else ""
        )
        lines.append(
            f"serve: {_gpus(used)}{where} · services {serve.count} x tp {serve.tp} · "
            f"{serve.share * plan.inventory.free / GIB:.1f} GiB each GPU "
            f"(--inf_mem_ratio {serve.share:g}){how}"
        )
    lines += [f"idle: {_gpus(plan.idle_gpus)} · {_why_idle(plan)}"] if plan.idle_gpus else []
    if serve is not None and plan.inventory.machines > 1 and not plan.reachable:
        key = "need a key: --inference_api_key_env"
        serving = tuple(gpu for service in plan.service_gpus for gpu in service)
        unused = tuple(gpu for gpu in serving if gpu not in plan.train_gpus)
        lines.append(
            f"idle: {_gpus(unused)} of the other machines · their services {key}"
            if unused
            else f"no services on the other machines: they {key}"
        )
    host = f"host memory: {plan.host / GIB:.1f} GiB for staged, published and offloaded states"
    return [*lines, host]


def step_line(plan: Placement, config: Config) -> str:
    """The rows of a step in words."""
    optimizer, group = config.optimizer, config.sampling.num_generations
    each = optimizer.per_device_train_batch_size * optimizer.gradient_accumulation_steps
    ranks = plan.train.dp
    groups, rest = divmod(each * ranks, group)
    said = f"{groups} groups of --num_generations {group}"
    if rest:
        said = f"no multiple of --num_generations {group}, so that steps divide groups"
    return f"a step: {each * ranks} rows, {each} for each of {ranks} data-parallel rank(s) · {said}"


def _gpus(gpus: Sequence[int]) -> str:
    numbers = [str(gpu) for gpu in gpus]
    run = len(gpus) > 2 and gpus[-1] - gpus[0] == len(gpus) - 1
    text = f"{gpus[0]}-{gpus[-1]}" if run else ", ".join(numbers)
    return f"GPU{'s' * (len(gpus) > 1)} {text}"


def _why_idle(plan: Placement) -> str:
    if plan.serve is None:
        return f"{plan.train.gpus} processes divide the model, and all GPUs of a machine do not"
    return (
        f"neither the trainer's degrees nor services of {plan.serve.tp} GPU(s) take them, or "
        "NUM_PROCESSES, NUM_SERVICES and --gpus_for_inference leave them out"
    )
