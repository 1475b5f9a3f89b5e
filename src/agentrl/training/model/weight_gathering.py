"""Gathers the weights of a sharded model on rank 0, while training goes on.

    copy    each process copies its parts into its own host memory, in the published dtype
    send    the others send rank 0 whether the copy failed, and why; then their parts, one layer at
            a time, and free them
    gather  rank 0 puts a layer together, by names and in pieces of the model's folder

All of it runs in the background, of the weights at the moment of `stage`: the optimizer waits until
they are copied, which usually is before it has a gradient. A part that several processes have is
copied by the first of them. So rank 0 holds one copy of the published weights, and every other
process at most its part of one.

On a GPU the copies have their own stream and go to pinned memory. The transfers have their own gloo
group, so that they do not meet training's collectives, and a time-out.
"""

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from agentrl.training.model.lora import (
    adapter_of,
    adapter_scaling,
    base_name,
    is_adapter_weight,
    merge,
)
from agentrl.training.model.weight_files import layer_of
from agentrl.training.model.written_form import WrittenForm
from agentrl.training.parallel.agreement import process_lost
from agentrl.training.parallel.held_parts import (
    Part,
    held_part,
    in_place,
    local_part,
    part_shape,
    place,
)
from agentrl.training.parallel.host_memory import host_tensor

logger = logging.getLogger(__name__)

TIMEOUT_S = 120.0  # for a process to send its part of a weight, once rank 0 asks for it
_REASON_BYTES = 512  # of the message that a copy has failed; all 0 if it has not
_LONGEST_WAIT = timedelta(days=30)  # for rank 0 to ask: it may still write the last publication


class GatherStalled(RuntimeError):
    """A process did not send its part of the weights. The message is one sentence for the user."""


@dataclass(frozen=True)
class _Weight:
    """A weight as it is sent. `senders`: the process that sends each part of it."""

    shape: torch.Size
    dtype: torch.dtype
    senders: Mapping[Part, int]


@dataclass(frozen=True)
class _Plan:
    """What stays the same from one publication to the next.

    weights: by name in the model, in order
    scaling: of the model's adapter
    stream: that parts are copied on from a GPU; None on a CPU
    pin_whole: whether rank 0 pins the whole weights
    """

    weights: Mapping[str, _Weight]
    form: WrittenForm
    dtype: torch.dtype
    scaling: float
    group: dist.ProcessGroup
    timeout: timedelta
    stream: torch.cuda.Stream | None
    pin_whole: bool

    @property
    def senders(self) -> set[int]:
        """The processes that send parts to rank 0."""
        ranks = {rank for weight in self.weights.values() for rank in weight.senders.values()}
        return ranks - {0}


class WeightGatherer:
    """Gathers the weights of one model. All processes make one and make the same calls."""

    def __init__(
        self,
        model: PreTrainedModel,
        form: WrittenForm,
        dtype: torch.dtype,
        optimizer: Optimizer | None = None,
        *,
        sent_by_gpu: bool = False,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Collective. `optimizer`: the one that changes the weights; None if nothing does.

        `form`: how weights are published, in `dtype`. `sent_by_gpu`: whether rank 0's GPU sends the
        whole weights, which are pinned then.
        """
        self._model = model
        timeout = timedelta(seconds=timeout_s)
        group = dist.new_group(backend="gloo", timeout=timeout)
        state = self._state()
        held = {name: held_part(value) for name, value in state.items()}
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, held, group)
        weights = {
            name: _Weight(
                value.shape,
                _sent_dtype(name, value, form, dtype),
                _first_holders([parts[name] for parts in everywhere]),
            )
            for name, value in state.items()
        }
        on_gpu = any(value.device.type == "cuda" for value in state.values())
        stream = torch.cuda.Stream() if on_gpu else None
        self._plan = _Plan(
            weights, form, dtype, adapter_scaling(model), group, timeout, stream, sent_by_gpu
        )
        self._copying: Future[None] | None = None
        self._waited_s = 0.0
        if optimizer is not None:
            optimizer.register_step_pre_hook(self._hold_update)

    def stage(self) -> "StagedWeights":
        """Begin to copy this process's parts of the present weights, and to send them.

        All processes call it after the same step. The last weights must be gathered before.
        """
        rank = dist.get_rank()
        parts = {
            name: local_part(value).detach()
            for name, value in self._state().items()
            if rank in self._plan.weights[name].senders.values()
        }
        staged = StagedWeights(self._plan, parts)
        self._copying = staged.copied
        return staged

    def waited_seconds(self) -> float:
        """How long the optimizer has waited for copies since the last call."""
        waited, self._waited_s = self._waited_s, 0.0
        return waited

    def _hold_update(self, *_: object) -> None:
        """Called before the optimizer changes the weights."""
        began = time.monotonic()
        if self._copying is not None:
            self._copying.result()
        self._waited_s += time.monotonic() - began

    def _state(self) -> dict[str, Tensor]:
        """The weights of the model and of its adapter, tied ones once, by name in the model."""
        tied = self._model.all_tied_weights_keys
        state: dict[str, Tensor] = self._model.state_dict()
        return {name: value for name, value in state.items() if name not in tied}


class StagedWeights:
    """The weights of one moment, of which each process has its parts in host memory.

    copied: done when this process's parts are copied, and may change; has the error of the copy
    """

    def __init__(self, plan: _Plan, parts: dict[str, Tensor]) -> None:
        """`parts`: the weights' parts that this process sends, on its device."""
        self._plan = plan
        self._host: dict[str, Tensor] = {}
        self._whole: dict[str, Tensor] | None = None
        self.copied: Future[None] = Future()
        ready = None if plan.stream is None else torch.cuda.current_stream().record_event()
        # A daemon, so that a transfer that hangs does not keep a failed process alive.
        self._thread = threading.Thread(
            target=self._run, args=(parts, ready), name="publication", daemon=True
        )
        self._thread.start()

    def gather(self) -> dict[str, Tensor]:
        """Return the whole weights on rank 0, by names and in pieces of the folder.

        Some are views of one tensor. The other processes return an empty dictionary once theirs are
        sent. May be called again, from any thread. Raises `GatherStalled`, and `ProcessLost` if a
        process has ended.
        """
        self._thread.join()
        self.copied.result()
        if self._whole is None:
            self._whole = self._receive() if dist.get_rank() == 0 else {}
        return self._whole

    def _run(self, parts: dict[str, Tensor], ready: torch.cuda.Event | None) -> None:
        try:
            with torch.no_grad(), torch.cuda.stream(self._plan.stream):
                self._copy(parts, ready)
        except BaseException as error:
            logger.error("this process could not copy its part of the weights: %s", error)
            self.copied.set_exception(error)  # raised by who waits for it
            self._host.clear()
            self._send(f"{type(error).__name__}: {error}")
            return
        self.copied.set_result(None)
        self._send()

    def _copy(self, parts: dict[str, Tensor], ready: torch.cuda.Event | None) -> None:
        stream = self._plan.stream
        if stream is not None and ready is not None:
            stream.wait_event(ready)
        for name, part in parts.items():
            dtype = self._plan.weights[name].dtype
            host = host_tensor(part.shape, dtype, pinned=stream is not None)
            # Without blocking, a GPU changes the dtype before it sends.
            self._host[name] = host.copy_(part, non_blocking=True)
        if stream is not None:
            stream.synchronize()

    def _send(self, failure: str = "") -> None:
        if dist.get_rank() not in self._plan.senders:
            return
        try:
            reason = failure.encode()[:_REASON_BYTES].ljust(_REASON_BYTES, b"\0")
            self._send_all([torch.tensor(list(reason), dtype=torch.uint8)])
            for _, names in groupby(list(self._host), key=_unit_of):
                # Popped, so that the memory of a layer is free once rank 0 has it.
                self._send_all([self._host.pop(name) for name in names])
        except RuntimeError as error:  # rank 0 says why it has ended
            logger.debug("rank 0 did not take the weights: %s", error)

    def _send_all(self, tensors: list[Tensor]) -> None:
        for work in [dist.isend(tensor, 0, self._plan.group) for tensor in tensors]:
            assert work is not None
            work.wait(_LONGEST_WAIT)

    def _receive(self) -> dict[str, Tensor]:
        whole: dict[str, Tensor] = {}
        self._check_copies()
        with torch.no_grad():
            for _, names in groupby(self._plan.weights, key=_unit_of):
                arriving = [self._ask(name) for name in names]
                layer = {each.name: self._complete(each) for each in arriving}
                whole |= self._plan.form.names.to_folder(self._merged(layer))
        return whole

    def _check_copies(self) -> None:
        """Wait until the other processes have copied. Raises `GatherStalled` if one could not."""
        reasons = {
            rank: torch.empty(_REASON_BYTES, dtype=torch.uint8) for rank in self._plan.senders
        }
        arriving = {
            rank: dist.irecv(reason, rank, self._plan.group) for rank, reason in reasons.items()
        }
        for rank, work in arriving.items():
            assert work is not None
            self._wait(work, rank, "the weights")
            failure = bytes(reasons[rank].tolist()).rstrip(b"\0").decode(errors="ignore")
            if failure:
                raise GatherStalled(
                    f"the weights could not be published: process {rank} of the trainer could not "
                    f"copy its part to host memory ({failure.splitlines()[0]}); its log has the "
                    "rest; a new start goes on from the last checkpoint"
                )

    def _ask(self, name: str) -> "_Arriving":
        """Begin to receive the parts of a weight."""
        weight, own = self._plan.weights[name], self._host.pop(name, None)
        if own is not None and len(weight.senders) == 1:
            return _Arriving(name, own, [])
        whole = host_tensor(weight.shape, weight.dtype, pinned=self._plan.pin_whole)
        parts = []
        for part, rank in weight.senders.items():
            if rank == dist.get_rank():
                assert own is not None
                place(own, part, whole)
                continue
            direct = in_place(part, whole)
            values = torch.empty(part_shape(part), dtype=weight.dtype) if direct is None else direct
            work = dist.irecv(values, rank, self._plan.group)
            assert work is not None
            parts.append((rank, work, None if direct is not None else (values, part)))
        return _Arriving(name, whole, parts)

    def _complete(self, arriving: "_Arriving") -> Tensor:
        """Wait for the parts of a weight."""
        for rank, work, apart in arriving.parts:
            self._wait(work, rank, arriving.name)
            if apart is not None:
                place(*apart, arriving.whole)
        return arriving.whole

    def _wait(self, work: dist.Work, rank: int, what: str) -> None:
        """Wait for what another process sends. Raises `GatherStalled` if nothing comes."""
        try:
            work.wait(self._plan.timeout)
        except RuntimeError as error:
            if "timed out" not in str(error).lower():
                raise process_lost(error) or error from error
            raise GatherStalled(
                f"the weights could not be published: process {rank} of the trainer did not send "
                f"its part of {what} within {self._plan.timeout.total_seconds():g} s; it hangs or "
                "its network does, see its log; a new start goes on from the last checkpoint"
            ) from error

    def _merged(self, layer: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights of a layer with its adapter merged into them, by their names without it."""
        merged = {}
        for name, weight in layer.items():
            if is_adapter_weight(name):
                continue
            base, adapter = base_name(name), adapter_of(name)
            if adapter is not None:
                a, b = (layer[part] for part in adapter)
                dtype = self._plan.form.dtype(base, self._plan.dtype)
                weight = merge(weight, a, b, self._plan.scaling).to(dtype)
            merged[base] = weight
        return merged


@dataclass(frozen=True)
class _Arriving:
    """A weight and its parts that are on their way: from whom, the receipt, and where they belong
    if they do not arrive in their place."""

    name: str
    whole: Tensor
    parts: Sequence[tuple[int, dist.Work, tuple[Tensor, Part] | None]]


def _sent_dtype(name: str, value: Tensor, form: WrittenForm, dtype: torch.dtype) -> torch.dtype:
    if is_adapter_weight(name) or adapter_of(name) is not None:
        return value.dtype  # they are merged in float32
    return form.dtype(base_name(name), dtype)


def _first_holders(parts: Iterable[Part]) -> dict[Part, int]:
    """The first process that holds each part, of the parts by rank."""
    holders: dict[Part, int] = {}
    for rank, part in enumerate(parts):
        if 0 not in part_shape(part):
            holders.setdefault(part, rank)
    return holders


def _unit_of(name: str) -> str:
    """What the names of weights that are put together have in common: a layer, or a module."""
    layer = layer_of(name)
    return layer if layer != name else name.partition(".base_layer.")[0].partition(".lora_")[0]
