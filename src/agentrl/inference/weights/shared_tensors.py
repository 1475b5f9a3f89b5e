"""Named tensors as text that another process of this machine turns into the same tensors.

The text holds handles of shared memory, not values: it is what SGLang's own serialiser writes for
CPU tensors (torch's pickle of shared storages, named by file, in base64). Reading it is refused
where it names anything but tensors, since a pickle can otherwise run any code.
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
    """The text of CPU tensors, which are moved to shared memory.

    Each text is for one reader, and the tensors must live until it has read them.
    """
    buffer = io.BytesIO()
    with _by_file_name():
        ForkingPickler(buffer).dump(list(tensors))
    return base64.b64encode(buffer.getvalue()).decode()


def give_up(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Say that the reader of one text of `tensors` never came, so that the memory is freed."""
    for _, tensor in tensors:
        if tensor.numel():
            tensor.untyped_storage()._shared_decref()


def receive(text: str) -> dict[str, Tensor]:
    """The tensors of a text, in shared memory. Raises ValueError if it is none."""
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
    """Share by file name: the default, file descriptors, needs a connection between processes."""
    with _strategy:
        before = torch.multiprocessing.get_sharing_strategy()
        torch.multiprocessing.set_sharing_strategy("file_system")
        try:
            yield
        finally:
            torch.multiprocessing.set_sharing_strategy(before)
