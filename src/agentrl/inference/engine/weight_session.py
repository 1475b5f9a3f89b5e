"""Weights from the trainer's memory, by process group or shared memory, within a session.

As in SGLang, tensors are accepted only between `begin` and `end`, in any number of requests, and
each request changes the model at once. `weight_routes` has the HTTP routes.
"""

from collections.abc import Iterator
from contextlib import contextmanager

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
        self._assembly = assembly
        self._update: WeightAssembly | None = None  # of the open session
        self._outside: set[object] = set()  # its requests whose weights are not in the model
        self._device = device
        self._groups: dict[str, WeightGroup] = {}

    @property
    def open(self) -> bool:
        """Whether tensors are accepted."""
        return self._update is not None

    def begin(self) -> None:
        """Open the session."""
        if self.open:
            raise WeightsError(
                "a weight-update session is already open; call end_weight_update() first"
            )
        self._update = self._assembly.begin()
        self._outside = set()

    @contextmanager
    def request(self) -> Iterator[None]:
        """Entered until the weights of a request are in the model."""
        outside, this = self._outside, object()
        outside.add(this)
        try:
            yield
        except WeightsError:
            outside.remove(this)  # its client is told
            raise
        outside.remove(this)

    def end(self) -> None:
        """Close the session. Weights that lack pieces, or are not in the model, are an error."""
        update, self._update = self._begun(), None
        if self._outside:  # first, because its thread may still add pieces
            raise WeightsError(
                "the client of a weight update hung up before its weights were in the model:"
                " publish all of them again"
            )
        update.end()

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
        update = self._begun()
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
        return update.add(dict(zip(names, tensors, strict=True)), f"group {name}")

    def from_shared(self, texts: list[str]) -> dict[str, Tensor]:
        """Open tensors in shared memory. Returns complete weights.

        `texts` has one entry, for the engine's only rank.
        """
        update = self._begun()
        if len(texts) != 1:
            raise WeightsError(f"{len(texts)} serialized_named_tensors for one rank")
        try:
            tensors = receive(texts[0])
        except ValueError as error:
            raise WeightsError(str(error)) from error
        return update.add(tensors, "serialized_named_tensors")

    def _begun(self) -> WeightAssembly:
        if self._update is None:
            raise WeightsError("no weight-update session is open; call begin_weight_update() first")
        return self._update
