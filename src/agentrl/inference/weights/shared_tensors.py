"""Passes named tensors to another process of the same machine, as a text with memory handles.

The text is what SGLang's serialiser writes for CPU tensors: torch's pickle of shared storages,
named by file, in base64. A pickle can run any code, so one that names anything but tensors is
refused.
"""

import base64
import binascii
import io
import pickle
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler

import torch
import torch.multiprocessing
from torch import Tensor

NamedTensors = Sequence[tuple[str, Tensor]]

_ALLOWED = {
    ("torch", "Size"),
    ("torch", "Tensor"),
    ("torch.storage", "TypedStorage"),
    ("torch.storage", "UntypedStorage"),
    ("torch.multiprocessing.reductions", "rebuild_tensor"),
    ("torch.multiprocessing.reductions", "rebuild_storage_filename"),
    ("torch.multiprocessing.reductions", "rebuild_storage_empty"),
    ("torch.multiprocessing.reductions", "rebuild_typed_storage"),
}
_strategy = threading.Lock()


def share(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Move CPU tensors to shared memory and return the text that names them.

    One reader may read each text, and the tensors must live until then.
    """
    buffer = io.BytesIO()
    with _by_file_name():
        ForkingPickler(buffer).dump(list(tensors))
    return base64.b64encode(buffer.getvalue()).decode()


def give_up(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Drop the reference of a text of `tensors` that was never read, so that memory is freed."""
    for _, tensor in tensors:
        if tensor.numel():
            tensor.untyped_storage()._shared_decref()


def receive(text: str) -> dict[str, Tensor]:
    """Open the tensors of a text, in shared memory. Raises ValueError if the text is invalid."""
    try:
        loaded = _TensorUnpickler(io.BytesIO(base64.b64decode(text, validate=True))).load()
        tensors = dict(loaded)
    except (
        binascii.Error, pickle.UnpicklingError, EOFError, TypeError, ValueError, RuntimeError,
        OSError,
    ) as error:  # fmt: skip
        raise ValueError(f"no tensors in shared memory of this machine: {error}") from error
    if not all(isinstance(n, str) and isinstance(t, Tensor) for n, t in tensors.items()):
        raise ValueError("a list of names and tensors is expected")
    return tensors


class _TensorUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of tensors")
        return super().find_class(module, name)


@contextmanager
def _by_file_name() -> Iterator[None]:
    """Share memory by file name. torch's default needs a connection between the processes."""
    with _strategy:
        before = torch.multiprocessing.get_sharing_strategy()
        torch.multiprocessing.set_sharing_strategy("file_system")
        try:
            yield
        finally:
            torch.multiprocessing.set_sharing_strategy(before)
