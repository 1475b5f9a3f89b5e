"""Hosts of their own reach each other, and nobody when their cable is pulled."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import network as network_module
import pytest
from network import Host, Network

pytestmark = pytest.mark.slow

ANSWER = """
import socket, sys
with socket.create_server((sys.argv[1], 7000)) as server:
    print("listening", flush=True)
    while True:
        connection, _ = server.accept()
        connection.sendall(b"here")
        connection.close()
"""
ASK = """
import socket, sys
with socket.create_connection((sys.argv[1], 7000), timeout=0.5) as connection:
    print(connection.recv(4).decode())
"""


@pytest.fixture
def network() -> Iterator[Network]:
    with Network() as network:
        yield network


def ask(asker: Host, address: str) -> str:
    """What the server at `address` says to a process on `asker`, or the name of the error."""
    result = subprocess.run(
        asker.command(sys.executable, "-c", ASK, address), capture_output=True, text=True
    )
    return result.stdout.strip() or result.stderr.strip().splitlines()[-1].split(":")[0]


def test_a_host_that_is_cut_off_is_silent_and_answers_again_when_it_is_joined(
    network: Network,
) -> None:
    one, two = network.host("one"), network.host("two")
    server = subprocess.Popen(
        one.command(sys.executable, "-c", ANSWER, one.address), stdout=subprocess.PIPE
    )
    try:
        assert server.stdout is not None and server.stdout.readline() == b"listening\n"
        assert ask(two, one.address) == "here"
        one.cut()
        assert ask(two, one.address) == "TimeoutError"
        one.join()
        assert ask(two, one.address) == "here"
    finally:
        server.kill()
        server.communicate()


def test_hosts_reach_nothing_outside_their_network(network: Network) -> None:
    host = network.host("alone")
    with socket.create_server(("127.0.0.1", 0)) as here:
        port = here.getsockname()[1]
        script = f"import socket; socket.create_connection(('127.0.0.1', {port}), timeout=1)"
        result = subprocess.run(
            host.command(sys.executable, "-c", script), capture_output=True, text=True
        )
    assert "ConnectionRefusedError" in result.stderr


def test_namespaces_end_with_the_process_that_made_them() -> None:
    script = (
        "import os, sys; sys.path.insert(0, sys.argv[1]); from network import Network\n"
        "network = Network().__enter__(); print(network.host('one').pid, flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    maker = subprocess.run(
        [sys.executable, "-c", script, str(Path(network_module.__file__).parent)],
        capture_output=True,
        text=True,
    )
    holder = int(maker.stdout)
    gone = subprocess.run(["tail", f"--pid={holder}", "-f", "/dev/null"], timeout=10)
    assert gone.returncode == 0
