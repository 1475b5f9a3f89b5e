"""A TCP port that is bound from the moment it is chosen, for a server that is started later.

A socket that is bound and does not listen keeps the port: the system hands it to nobody else, also
while the server dies and comes back. With SO_REUSEADDR on both, which asyncio, uvicorn and mongod
set, the server binds it beside us. Until it listens, whoever connects is refused.
"""

import socket
from types import TracebackType
from typing import Self


class HeldPort:
    """`number` is ours until `release`, or the end of this process.

    `wanted`: the number to hold, 0 for any. Raises `OSError` if it is not to be had.
    """

    def __init__(self, wanted: int = 0, host: str = "127.0.0.1") -> None:
        # The first address that the host's name has, as servers take it too.
        family, kind, _, _, address = socket.getaddrinfo(host, wanted, type=socket.SOCK_STREAM)[0]
        self._socket = socket.socket(family, kind)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind(address)
        except OSError:
            self._socket.close()
            raise
        self.number = int(self._socket.getsockname()[1])

    def release(self) -> None:
        """Give it back."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
