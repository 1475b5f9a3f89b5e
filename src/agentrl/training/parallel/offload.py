"""`--activation_offloading`: keeps saved activations in host memory until the backward pass.

Each tensor that a layer saves is copied to pinned host memory on a separate stream during the
forward pass, and copied back when the backward pass needs it. With activation checkpointing these
are the inputs of the layers only. Weights and the head's chunks are not offloaded. On a CPU the
copies have no benefit.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel

LEAST_BYTES = 1 << 20  # smaller tensors are not worth a copy


def offload_activations(model: PreTrainedModel) -> None:
    """Make the layers of `model`, except the head, save their tensors on the host, in place."""
    layers = model.base_model
    forward = layers.forward
    streams = _Streams()

    @functools.wraps(forward)
    def offloading(*args: object, **kwargs: object) -> object:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with saved_tensors_hooks(functools.partial(_pack, streams=streams), _unpack):
            return forward(*args, **kwargs)

    layers.forward = offloading


@dataclass(frozen=True)
class _OnHost:
    """A saved tensor that is, or will be, on the host."""

    tensor: Tensor
    device: torch.device
    copied: torch.cuda.Event | None  # end of the copy; None if it is complete


class _Streams:
    """One copy stream per device, made at first use."""

    def __init__(self) -> None:
        self._of: dict[torch.device, torch.cuda.Stream] = {}

    def of(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._of:
            self._of[device] = torch.cuda.Stream(device)
        return self._of[device]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _pack(saved: Tensor, *, streams: _Streams) -> Tensor | _OnHost:
    weight = isinstance(saved, nn.Parameter) or isinstance(saved._base, nn.Parameter)
    if weight or saved.nbytes < LEAST_BYTES:
        return saved
    if saved.device.type != "cuda":
        return _OnHost(saved.to("cpu", copy=True), saved.device, None)
    host = torch.empty_like(saved, device="cpu", pin_memory=True)
    stream = streams.of(saved.device)
    stream.wait_stream(torch.cuda.current_stream(saved.device))
    with torch.cuda.stream(stream):
        host.copy_(saved, non_blocking=True)
        copied = stream.record_event()
    saved.record_stream(stream)  # keeps its memory until the copy is complete
    return _OnHost(host, saved.device, copied)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _unpack(packed: Tensor | _OnHost) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    if packed.copied is not None:
        torch.cuda.current_stream(packed.device).wait_event(packed.copied)
    return packed.tensor.to(packed.device, non_blocking=True)
