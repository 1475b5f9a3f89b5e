"""Moves the state of a learner to host memory while services use its device, and back.

Weights, gradients and optimizer state stay the tensors that they are: only their memory on the
device is freed. So FSDP, the optimizer and whoever else holds them or views of them need not know.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor

from agentrl.training.parallel.held_parts import local_part
from agentrl.training.parallel.host_memory import host_tensor


@dataclass(frozen=True)
class _OnHost:
    """The memory of some tensors, empty on the device, and its bytes on the host."""

    storage: UntypedStorage
    host: Tensor


class StateOffload:
    """The tensors of this process that are in host memory."""

    def __init__(self, device: torch.device) -> None:
        """`device`: tensors elsewhere stay where they are."""
        self._device = device
        self._held: dict[int, _OnHost] = {}
        self._spare: dict[int, Tensor] = {}  # host memory of the last stay

    @property
    def is_away(self) -> bool:
        """Whether tensors are in host memory."""
        return bool(self._held)

    def offload(self, tensors: Iterable[Tensor]) -> None:
        """Move the memory of tensors to the host. They must not be used until `bring_back`."""
        for tensor in map(local_part, tensors):
            storage = tensor.untyped_storage()
            if tensor.device.type != self._device.type or not storage.nbytes():
                continue
            if not storage.resizable():
                continue  # the memory of a file, which only a CPU uses as it is
            host = self._memory(_key(tensor), storage.nbytes())
            host.copy_(_bytes(storage), non_blocking=True)
            self._held[_key(tensor)] = _OnHost(storage, host)
        self._spare.clear()
        self._synchronise()
        for each in self._held.values():
            each.storage.resize_(0)

    def bring_back(self) -> None:
        """Move all memory back to the device."""
        for each in self._held.values():
            each.storage.resize_(each.host.nbytes)
            _bytes(each.storage).copy_(each.host, non_blocking=True)
        self._synchronise()
        self._spare = {key: each.host for key, each in self._held.items()}
        self._held.clear()

    def _memory(self, key: int, size: int) -> Tensor:
        """Host memory for a tensor: what it had the last time, because pinning takes its time."""
        spare = self._spare.pop(key, None)
        if spare is not None and spare.nbytes == size:
            return spare
        return host_tensor((size,), torch.uint8, pinned=self._device.type == "cuda")

    def on_host(self, state: Any) -> Any:
        """The tensors in nested dictionaries and lists, those in host memory from there."""
        if isinstance(state, dict):
            return {key: self.on_host(value) for key, value in state.items()}
        if isinstance(state, list):
            return [self.on_host(value) for value in state]
        if isinstance(state, Tensor) and _key(local_part(state)) in self._held:
            return self._copy_of(state)
        return state

    def _copy_of(self, tensor: Tensor) -> Tensor:
        local = local_part(tensor)
        host = torch.empty(0, dtype=local.dtype).set_(
            self._held[_key(local)].host.untyped_storage(),
            local.storage_offset(), local.size(), local.stride(),
        )  # fmt: skip
        if not isinstance(tensor, DTensor):
            return host
        # `DTensor.from_local` would copy it to the device of the mesh.
        return DTensor(host, tensor._spec, requires_grad=False)

    def _synchronise(self) -> None:
        """Wait for copies from or to a GPU, before memory of either side is freed."""
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()


def _key(tensor: Tensor) -> int:
    """What tensors of the same memory have in common, also while it is empty."""
    return int(tensor.untyped_storage()._cdata)


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
