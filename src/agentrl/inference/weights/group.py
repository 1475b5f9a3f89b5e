"""The process group in which rank 0 broadcasts weights to the ranks of one service.

It does not touch the process's default group. Its keys in the store are those of
`torch.distributed.init_process_group`, which services such as SGLang use to join.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]  # re-exported without saying so
    PrefixStore,
    ProcessGroupGloo,
    Store,
    TCPStore,
)
from torch.distributed.distributed_c10d import BroadcastOptions

Backend = Literal["gloo", "nccl"]

# What torch puts before the keys of a group's first device.
_FIRST_DEVICE = {"gloo": "cpu", "nccl": "cuda"}
# torch ends the process of an NCCL group whose time-out passes. Ours must pass first.
_NEVER = timedelta(days=30)
_FIRST_LOOK_S, _LAST_LOOK_S = 5e-5, 5e-3  # between two looks whether a broadcast is complete


def host_store(address: str, timeout_s: float) -> TCPStore:
    """Host the rendezvous store of a group on a free port. `address` is this machine's."""
    return TCPStore(
        address, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )


def reach_store(address: str, port: int, timeout_s: float) -> TCPStore:
    """Connect to the store that rank 0 hosts."""
    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout_s))


class WeightGroup:
    """One rank of the group. All calls block, at most for the time-out.

    A group that has failed is of no use any more. `abort` ends what still waits in it.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        world_size: int,
        name: str,
        backend: Backend,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        """Join the group. Returns once all ranks have joined.

        `device`: the device that tensors are sent from or received on. Raises RuntimeError if a
        rank does not join within the time-out.
        """
        self._store = store  # rank 0's is the server and must live as long as the group
        self._device = device
        self._timeout_s = timeout_s
        # A stream of its own: what else the device computes is neither waited for nor held up.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        keys: Store = PrefixStore(name, store)
        for prefix in (f"{name}/", f"{_FIRST_DEVICE[backend]}/"):
            keys = PrefixStore(prefix, keys)
        timeout = timedelta(seconds=timeout_s)
        self._group: Any  # a torch Backend, whose stubs have no broadcast
        if backend == "gloo":
            self._group = ProcessGroupGloo(keys, rank, world_size, timeout=timeout)
        else:
            # CPU builds of torch do not have it.
            from torch.distributed import ProcessGroupNCCL

            options = ProcessGroupNCCL.Options()
            options._timeout = _NEVER
            self._group = ProcessGroupNCCL(keys, rank, world_size, options)

    def abort(self) -> None:
        """End all broadcasts of this rank with an error, and close the connections. For any thread.

        With NCCL it also ends the kernel that waits for a peer, and so the wait for the stream.
        """
        group, self._group = self._group, None
        if group is not None:
            group.abort()  # with gloo the connections are closed when the object goes

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Broadcast from rank 0. Raises RuntimeError when a peer is gone or hangs."""
        # Tensors in host memory are complete, and need not wait for a step that computes.
        with self._on_stream(after_caller=any(tensor.is_cuda for tensor in tensors)):
            for tensor in tensors:
                self._broadcast(tensor.to(self._device, non_blocking=True).contiguous())

    def receive(self, shapes: Sequence[tuple[torch.dtype, Sequence[int]]]) -> list[Tensor]:
        """Receive the tensors that rank 0 broadcasts. Raises RuntimeError like `send`."""
        tensors = [
            torch.empty(list(shape), dtype=dtype, device=self._device) for dtype, shape in shapes
        ]
        with self._on_stream(after_caller=True):
            for tensor in tensors:
                self._broadcast(tensor)
        return tensors

    def _broadcast(self, tensor: Tensor) -> None:
        options = BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        group = self._group
        if group is None:
            raise RuntimeError("the group was aborted")
        work = group.broadcast([tensor], options)
        del group
        # With NCCL `wait` returns at once, and the wait for the stream has no time-out.
        end = time.monotonic() + self._timeout_s
        pause = _FIRST_LOOK_S
        while not work.is_completed():
            if time.monotonic() > end:
                self.abort()
                del work
                raise RuntimeError(f"no peer took or sent a tensor within {self._timeout_s:g} s")
            time.sleep(pause)
            pause = min(2 * pause, _LAST_LOOK_S)
        try:
            work.wait()
        except RuntimeError as error:
            told = str(error)
        else:
            return
        # An error keeps the values of its frames. With gloo the connections close, and a peer that
        # waits is told, when the last of them that holds the work is gone.
        del work
        raise RuntimeError(told)

    @contextmanager
    def _on_stream(self, *, after_caller: bool) -> Iterator[None]:
        """Run the block on the group's stream, and wait for its end.

        `after_caller`: after what the caller's stream has begun.
        """
        if self._stream is None:
            yield
            return
        if after_caller:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()
