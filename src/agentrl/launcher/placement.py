"""Which GPUs train and which serve, with which degrees and how many tokens at once.

`place` is a function of values: the GPUs, the model's sizes, and what the flags ask for. It tries
the layouts of a machine from the best to the last resort, and takes the first at which trainer and
services fit their GPUs:

    apart       some GPUs train, the others serve; as many as possible of each
    in turns    on the same GPUs: services release their memory while the trainer loads and during a
                step, and the trainer has its state on the host between steps (`--inf_share_gpus`)
    side by side    on the same GPUs, each within its share, only if asked for

All machines have the same layout. Memory is in bytes of one GPU.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from agentrl.launcher.inventory import GIB, Inventory
from agentrl.training.model.memory_model import (
    MemoryEstimate,
    MemorySetup,
    ModelShape,
    estimate,
    longest_line,
)

USABLE = 0.85  # of the free memory: the rest is CUDA's, NCCL's, and the allocator's
RELEASED = 2 * GIB  # what a service keeps that has released its memory: CUDA and its graphs
_FULL_TOKENS = 32768  # tokens at once that fill any GPU
_TOKENS_STEP = 1024
_SERVING_BYTES = 2  # of a weight, and of a number of the cache: bfloat16
_STATE_BYTES = 12  # of a trained parameter in a checkpoint: a weight and two moments

Degrees = tuple[int, int, int]  # tp, cp, ep


@dataclass(frozen=True)
class ModelSizes:
    """What placement knows of a model."""

    shape: ModelShape
    key_heads: int
    context: int | None  # largest number of tokens of a sequence
    degrees: frozenset[Degrees]  # by which the trainer can divide it
    serving: frozenset[int]  # numbers of GPUs by which a service can divide it


@dataclass(frozen=True)
class Asked:
    """What the flags ask for; None leaves the choice to the planner. Counts are per machine."""

    tokens: int  # of the longest record
    setup: MemorySetup  # chunk, dtype and offloading; its other values are not read
    tp: int | None = None
    cp: int | None = None
    ep: int | None = None
    dp_replicate: int = 1
    micro_batch_tokens: int | None = None
    checkpointing: bool | None = None
    models: int = 1  # that are trained: 2 with a critic
    reference: bool = False  # frozen weights beside them
    trainers: int | None = None  # GPUs that train
    serving: int | None = None  # GPUs that serve
    services: int | None = None  # 0: none are started
    inf_tp: int | None = None
    inf_mem_ratio: float | None = None
    in_turns: bool | None = None
    reachable: bool = False  # services of one machine can be asked from the others


@dataclass(frozen=True)
class Training:
    """A trainer's degrees and micro-batches, and its memory on each GPU."""

    gpus: int  # of one machine
    dp: int
    tp: int
    cp: int
    ep: int
    checkpointing: bool
    tokens: int
    peak: int
    loaded: int  # once a checkpoint is loaded
    between: int  # between two steps


@dataclass(frozen=True)
class Serving:
    """The services of one machine. `share`: of a GPU's free memory, for weights and cache."""

    count: int
    tp: int
    share: float


@dataclass(frozen=True)
class Placement:
    """The plan of all machines. GPUs are numbered from 0 in the inventory's order."""

    inventory: Inventory
    train: Training
    serve: Serving | None
    in_turns: bool
    reachable: bool
    host: int  # bytes of host memory of one machine: staged, published and offloaded

    @property
    def train_gpus(self) -> tuple[int, ...]:
        """The GPUs of each machine that train: the first ones."""
        return tuple(range(self.train.gpus))

    @cached_property
    def service_gpus(self) -> tuple[tuple[int, ...], ...]:
        """The GPUs of each service of a machine: the last ones."""
        if self.serve is None:
            return ()
        first = len(self.inventory.gpus) - self.serve.count * self.serve.tp
        return tuple(
            tuple(range(first + number * self.serve.tp, first + (number + 1) * self.serve.tp))
            for number in range(self.serve.count)
        )

    @property
    def idle_gpus(self) -> tuple[int, ...]:
        """The GPUs of each machine that nobody uses."""
        used = {*self.train_gpus, *(gpu for service in self.service_gpus for gpu in service)}
        return tuple(gpu for gpu in range(len(self.inventory.gpus)) if gpu not in used)

    def serves(self, machine: int) -> bool:
        """Whether services are started on this machine."""
        return self.serve is not None and (machine == 0 or self.reachable)

    def devices(self, gpus: tuple[int, ...]) -> str:
        """CUDA_VISIBLE_DEVICES for these GPUs."""
        return ",".join(self.inventory.gpus[gpu].device for gpu in gpus)


def place(inventory: Inventory, model: ModelSizes, asked: Asked) -> Placement | None:
    """The best placement; None if none fits."""
    apart: list[Placement] = []
    for plan in _plans(inventory, model, asked):
        if plan.serve is None or plan.in_turns or _overlaps(plan):
            return min(apart, key=_worth, default=plan)
        apart.append(plan)
    return min(apart, key=_worth, default=None)


def host_needed(inventory: Inventory, model: ModelSizes, asked: Asked) -> int | None:
    """Bytes of each machine's host memory with which the GPUs suffice; None if they never do."""
    plans = _plans(replace(inventory, host_bytes=None), model, asked)
    return min((plan.host for plan in plans), default=None)


def place_services(inventory: Inventory, model: ModelSizes, asked: Asked) -> Serving | None:
    """The services of a machine on which nothing trains; None if they do not fit."""
    share = asked.inf_mem_ratio or USABLE
    return _serving(model, asked, len(inventory.gpus), share, inventory.free)


def longest_record(model: ModelSizes, asked: Asked) -> int:
    """Tokens of the longest sequence that is trained."""
    return min(asked.tokens, model.context or asked.tokens)


def _plans(inventory: Inventory, model: ModelSizes, asked: Asked) -> Iterator[Placement]:
    """Yield the placements that fit, in the order of `_layouts`."""
    for layout in _layouts(len(inventory.gpus), asked):
        plan = _placed(inventory, model, asked, *layout)
        if plan is not None:
            yield plan


def _overlaps(plan: Placement) -> bool:
    return any(gpu in plan.train_gpus for service in plan.service_gpus for gpu in service)


def _worth(plan: Placement) -> tuple[int, int, bool, int]:
    """Fewest idle GPUs, then as many that train as serve, then a number that divides a step."""
    assert plan.serve is not None
    gpus = plan.train.gpus
    uneven = abs(gpus - plan.serve.count * plan.serve.tp)
    return len(plan.idle_gpus), uneven, bool(gpus & (gpus - 1)), gpus


def _layouts(gpus: int, asked: Asked) -> Iterator[tuple[int, int, bool]]:
    """Yield (GPUs that train, GPUs that serve, in turns), those apart first."""
    training = [asked.trainers] if asked.trainers else range(gpus, 0, -1)
    if asked.services == 0:
        yield from ((train, 0, False) for train in training if train <= gpus)
        return
    serving = [asked.serving] if asked.serving else range(gpus, 0, -1)
    pairs = [(train, serve) for train in training for serve in serving]
    if not asked.in_turns:
        yield from ((*pair, False) for pair in pairs if sum(pair) <= gpus)
    if asked.trainers and asked.serving and asked.inf_mem_ratio and not asked.in_turns:
        yield asked.trainers, asked.serving, False
    if asked.in_turns is not False:
        yield from ((*pair, True) for pair in pairs if asked.in_turns or sum(pair) > gpus)


def _placed(
    inventory: Inventory, model: ModelSizes, asked: Asked, train: int, serve: int, in_turns: bool
) -> Placement | None:
    """The placement of one layout; None if it does not fit."""
    if max(train, serve) > len(inventory.gpus):
        return None
    overlap = train + serve > len(inventory.gpus)
    limit = int(USABLE * inventory.free)
    share = asked.inf_mem_ratio or USABLE
    if in_turns:
        limit -= RELEASED
    elif overlap:
        limit -= int(share * inventory.free)
    training = _training(inventory.machines, model, asked, train, limit)
    if training is None:
        return None
    host = _host_bytes(inventory.machines, model, asked, training)
    if in_turns:
        host += training.gpus * training.between
        training = replace(training, between=0)
        room = limit / inventory.free
        share = asked.inf_mem_ratio or int(100 * room) / 100
        if not 0 < share <= room:
            return None
    services = _serving(model, asked, serve, share, inventory.free) if serve else None
    if serve and services is None:
        return None
    if services is not None and in_turns:
        host += services.count * _SERVING_BYTES * model.shape.parameters
    if inventory.host_bytes is not None and host > inventory.host_bytes:
        return None
    return Placement(inventory, training, services, in_turns, asked.reachable, host)


def _training(
    machines: int, model: ModelSizes, asked: Asked, gpus: int, limit: int
) -> Training | None:
    """The trainer on `gpus` GPUs of each machine, with as little division as fits `limit`."""
    longest = longest_record(model, asked)
    least = max(longest, asked.micro_batch_tokens or 0)
    for tp, cp, ep in sorted(model.degrees, key=lambda each: (each[0] * each[1], each)):
        if any(
            given not in (None, degree)
            for given, degree in ((asked.tp, tp), (asked.cp, cp), (asked.ep, ep))
        ):
            continue
        processes = gpus * machines
        replica, rest = divmod(processes, asked.dp_replicate)
        # Tensor parallelism stays within a machine, whose GPUs have fast links.
        if rest or replica % (tp * cp) or gpus % tp or replica % ep or (ep > 1 and ep % tp):
            continue
        for checkpointing in (False, True):
            if asked.checkpointing not in (None, checkpointing):
                continue
            setup = replace(
                asked.setup, tokens=least, fsdp=replica // tp, tp=tp, cp=cp, ep=ep,
                checkpointing=checkpointing,
            )  # fmt: skip
            if _peak(model, asked, setup) > limit:
                continue
            tokens = asked.micro_batch_tokens or _filling(model, asked, setup, limit)
            setup = replace(setup, tokens=max(tokens, least))
            found = estimate(model.shape, setup)
            states = found.states + _beside(asked, found)
            return Training(
                gpus=gpus,
                dp=processes // (tp * cp),
                tp=tp,
                cp=cp,
                ep=ep,
                checkpointing=checkpointing,
                tokens=tokens,
                peak=found.peak + _beside(asked, found, gradients=True),
                loaded=states,
                between=states,
            )
    return None


def _filling(model: ModelSizes, asked: Asked, setup: MemorySetup, limit: int) -> int:
    """Tokens of a micro-batch: those of the longest record, or as many as fill the GPU."""
    beside = _beside(asked, estimate(model.shape, setup), gradients=True)
    longest = min(longest_line(model.shape, setup, limit - beside), _FULL_TOKENS)
    return max(setup.tokens, longest // _TOKENS_STEP * _TOKENS_STEP)


def _peak(model: ModelSizes, asked: Asked, setup: MemorySetup) -> int:
    found = estimate(model.shape, setup)
    return found.peak + _beside(asked, found, gradients=True)


def _beside(asked: Asked, found: MemoryEstimate, *, gradients: bool = False) -> int:
    """Bytes of the models beside the policy: a critic is trained too, a reference has weights."""
    critic = found.states + (found.gradients if gradients else 0)
    return (asked.models - 1) * critic + (found.weights if asked.reference else 0)


def _serving(model: ModelSizes, asked: Asked, gpus: int, share: float, free: int) -> Serving | None:
    """The services on `gpus` GPUs: as many as possible, without too little room for the cache."""
    room = share * free
    fitting = []
    for tp in sorted(model.serving):
        count = asked.services or gpus // tp
        if asked.inf_tp not in (None, tp) or not 0 < count * tp <= gpus:
            continue
        weights, cache = service_bytes(model, longest_record(model, asked), tp)
        if weights + cache <= room:
            fitting.append((2 * weights > room, tp, count))
    if not fitting:
        return None
    _, tp, count = min(fitting)
    return Serving(count, tp, share)


def service_bytes(model: ModelSizes, tokens: int, tp: int) -> tuple[int, int]:
    """Bytes of weights, and of the cache of one record, on each of a service's `tp` GPUs."""
    shape = model.shape
    weights = _SERVING_BYTES * shape.parameters // tp
    cache = 2 * _SERVING_BYTES * shape.layers * shape.key * tokens // min(tp, model.key_heads)
    return weights, cache


def _host_bytes(machines: int, model: ModelSizes, asked: Asked, training: Training) -> int:
    """Bytes of a machine's host memory: what is staged, published and offloaded."""
    shape = model.shape
    trained = shape.layers * shape.layer_trained + shape.root_trained
    setup = replace(
        asked.setup, tokens=training.tokens, checkpointing=training.checkpointing, tp=training.tp,
        cp=training.cp, ep=training.ep,
        fsdp=training.gpus * machines // (training.tp * asked.dp_replicate),
    )  # fmt: skip
    offloaded = estimate(shape, setup).host * training.gpus
    # The first machine has its part of the published weights, and gathers all of them.
    published = setup.compute_bytes * shape.parameters * (machines + 1) // machines
    return asked.models * _STATE_BYTES * trained // machines + published + offloaded
