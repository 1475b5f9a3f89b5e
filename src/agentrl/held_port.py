"""Reserves a TCP port for a server that is started later.

A bound socket that does not listen reserves the port, also while the server restarts. With
SO_REUSEADDR on both sockets, which asyncio, uvicorn and mongod set, the server can bind the port
too. Until it listens, connections are refused.
"""

import socket
from types import TracebackType
from typing import Self


class HeldPort:
    """Port `number`, reserved until `release` or the end of this process.

    `wanted`: the port to reserve, 0 for any free one. Raises `OSError` if it is in use.
    """

    def __init__(self, wanted: int = 0, host: str = "127.0.0.1") -> None:
        # Like servers, use the first address of the host's name.
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
        """Release the port."""
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
