"""Host memory for copies of a GPU. CUDA's registration is replaced by one that remembers."""

import gc

import pytest
import torch

from agentrl.training.parallel import host_memory
from agentrl.training.parallel.host_memory import host_tensor
from agentrl.training.step import state_offload
from agentrl.training.step.state_offload import StateOffload

SHAPES = [
    ((3, 5), torch.bfloat16), ((), torch.float32), ((0, 4), torch.float32),
    ((1300, 257), torch.float32), ((700_001,), torch.bfloat16),
]  # fmt: skip


class Registered:
    """What is registered, as CUDA has it: it refuses memory of which a part is registered."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self.most = 0

    def pin(self, address: int, size: int) -> None:
        pages = range(address // 4096, -(-(address + size) // 4096))
        for other, length in self.sizes.items():
            taken = range(other // 4096, -(-(other + length) // 4096))
            assert pages[-1] < taken[0] or taken[-1] < pages[0], "registered already"
        self.sizes[address] = size
        self.most = max(self.most, sum(self.sizes.values()))

    def unpin(self, address: int) -> None:
        del self.sizes[address]

    def holds(self, tensor: torch.Tensor) -> bool:
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        return any(at <= begin and end <= at + size for at, size in self.sizes.items())


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Registered:
    registered = Registered()
    monkeypatch.setattr(host_memory.cuda_memory, "pin_memory", registered.pin)
    monkeypatch.setattr(host_memory.cuda_memory, "unpin_memory", registered.unpin)
    return registered


def made(*, pinned: bool) -> list[torch.Tensor]:
    return [host_tensor(shape, dtype, pinned=pinned) for shape, dtype in SHAPES]


@pytest.mark.parametrize("pinned", [False, True])
def test_tensors_have_their_shapes_and_memory_of_their_own(
    registered: Registered, pinned: bool
) -> None:
    tensors = made(pinned=pinned)
    assert [(tuple(tensor.shape), tensor.dtype) for tensor in tensors] == SHAPES
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    assert all((tensor == number).all() for number, tensor in enumerate(tensors))
    assert all(registered.holds(tensor) == pinned for tensor in tensors if tensor.numel())


def test_what_is_pinned_is_not_rounded_up_and_ends_with_the_last_view_of_it(
    registered: Registered,
) -> None:
    tensors = made(pinned=True)
    needed = sum(tensor.nbytes for tensor in tensors)
    assert needed <= registered.most < needed + len(tensors) * 4096  # torch: 4.2 MB for these 2.7
    view = tensors[3][5:7].T
    del tensors
    gc.collect()
    assert len(registered.sizes) == 1 and registered.holds(view[:1, 0])
    del view
    gc.collect()
    assert not registered.sizes


def test_state_that_leaves_the_device_again_has_the_memory_of_the_last_time(
    registered: Registered, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        state_offload, "host_tensor", lambda *args, pinned: host_tensor(*args, pinned=True)
    )
    offload = StateOffload(torch.device("cpu"))
    tensors = [torch.full((300, 7), 2.0), torch.full((5,), 3.0)]
    expected = [tensor.clone() for tensor in tensors]
    places = []
    for _ in range(2):
        offload.offload(tensors)
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
        places.append(set(registered.sizes))
        offload.bring_back()
        assert all(torch.equal(one, two) for one, two in zip(tensors, expected, strict=True))
    assert places[0] == places[1]
    offload.offload(tensors[:1])
    gc.collect()
    assert len(registered.sizes) == 1, "the other tensor is gone"
