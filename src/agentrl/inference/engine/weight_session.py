"""Weights from the trainer's memory, by process group or shared memory, within a session.

As in SGLang, tensors are accepted only between `begin` and `end`, in any number of requests, and
each request changes the model at once. `weight_routes` has the HTTP routes.
"""

import torch
from torch import Tensor

from agentrl.inference.engine.assembly import WeightAssembly, WeightsError
from agentrl.inference.weights.group import Backend, WeightGroup, reach_store
from agentrl.inference.weights.shared_tensors import receive

_TIMEOUT_S = 120.0
_BACKENDS: dict[str, Backend] = {"gloo": "gloo", "nccl": "nccl"}


class WeightSession:
    """Receives tensors for one model. `join`, `from_group` and `from_shared` block.

    All methods raise WeightsError.
    """

    def __init__(self, assembly: WeightAssembly, device: torch.device) -> None:
        self.open = False
        self._assembly = assembly
        self._device = device
        self._groups: dict[str, WeightGroup] = {}

    def begin(self) -> None:
        """Open the session."""
        if self.open:
            raise WeightsError(
                "a weight-update session is already open; call end_weight_update() first"
            )
        self.open = True
        self._assembly.begin()

    def end(self) -> None:
        """Close the session. Weights that lack pieces are an error."""
        if not self.open:
            raise WeightsError("no weight-update session is open; call begin_weight_update() first")
        self.open = False
        self._assembly.end()

    def join(
        self, name: str, address: str, port: int, rank: int, world_size: int, backend: str
    ) -> None:
        """Join a group in which the trainer is rank 0; returns when all have joined."""
        if backend not in _BACKENDS:
            raise WeightsError(f"backend must be one of {', '.join(_BACKENDS)}, got {backend!r}")
        if rank + 1 != world_size:
            raise WeightsError(
                f"rank_offset {rank} of world_size {world_size}: the local engine is one rank,"
                " the last one"
            )
        try:
            self._groups[name] = WeightGroup(
                reach_store(address, port, _TIMEOUT_S),
                rank=rank,
                world_size=world_size,
                name=name,
                backend=_BACKENDS[backend],
                device=self._device,
                timeout_s=_TIMEOUT_S,
            )
        except (RuntimeError, ValueError) as error:
            raise WeightsError(f"Failed to initialize custom process group: {error}.") from error

    def leave(self, name: str) -> None:
        """Leave a group."""
        if self._groups.pop(name, None) is None:
            raise WeightsError("The group to be destroyed does not exist.")

    def from_group(
        self, name: str, names: list[str], dtypes: list[str], shapes: list[list[int]]
    ) -> dict[str, Tensor]:
        """Receive the tensors that rank 0 of a group broadcasts. Returns complete weights."""
        group = self._groups.get(name)
        if group is None:
            raise WeightsError(
                f"Failed to receive weights: Group {name} not in {list(self._groups)}. Please call"
                " `init_weights_update_group` first."
            )
        wanted = []
        for dtype, shape in zip(dtypes, shapes, strict=True):
            torch_dtype = getattr(torch, dtype, None)
            if not isinstance(torch_dtype, torch.dtype):
                raise WeightsError(f"Failed to receive weights: {dtype!r} is no dtype")
            wanted.append((torch_dtype, shape))
        try:
            tensors = group.receive(wanted)
        except RuntimeError as error:
            raise WeightsError(f"Failed to receive weights: {error}") from error
        return self._assembly.add(dict(zip(names, tensors, strict=True)), f"group {name}")

    def from_shared(self, texts: list[str]) -> dict[str, Tensor]:
        """Open tensors in shared memory. Returns complete weights.

        `texts` has one entry, for the engine's only rank.
        """
        if len(texts) != 1:
            raise WeightsError(f"{len(texts)} serialized_named_tensors for one rank")
        try:
            tensors = receive(texts[0])
        except ValueError as error:
            raise WeightsError(str(error)) from error
        return self._assembly.add(tensors, "serialized_named_tensors")
