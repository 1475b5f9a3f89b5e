"""A port that is held goes to the server it is held for and to nobody else."""

import asyncio
import socket

import pytest
import uvicorn
from aiohttp import web

from agentrl.held_port import HeldPort


def test_nobody_else_gets_a_port_that_is_held() -> None:
    with HeldPort() as port, socket.socket() as other:
        with pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port.number))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port.number), timeout=2)


def test_a_port_that_is_listened_at_cannot_be_held() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            HeldPort(taken)


async def test_servers_come_up_on_a_held_port_and_again_after_their_end() -> None:
    with HeldPort() as port:
        for _ in range(2):
            runner = web.AppRunner(web.Application())
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", port.number).start()
            await runner.cleanup()
        server = uvicorn.Server(
            uvicorn.Config(_answer, host="127.0.0.1", port=port.number, lifespan="off")
        )
        serving = asyncio.create_task(server.serve())
        while not server.started:
            assert not serving.done()
            await asyncio.sleep(0.01)
        server.should_exit = True
        await serving


async def _answer(scope: object, receive: object, send: object) -> None:
    raise AssertionError("nobody asks")
