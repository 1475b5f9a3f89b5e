"""What starts a program: limits first, and in a sandbox the way to the gateway.

    python3 -I -S program_start.py START COMMAND [ARGUMENT ...]

START is a JSON object: `limits` are the process's, by their names in `resource`; `door` and `port`
are given in a sandbox. A sandbox has a network of its own, of which only the loopback interface is
there. The socket that listens on `port` in it is made here and handed to the sampler through
`door`, a Unix socket. So the program reaches the gateway at the address that it has outside, and
reaches nothing else. `door` stays open until the sampler closes it or ends; with it the program
ends.

It imports only the standard library, and also runs in containers, with the Python of their image.
"""

import json
import os
import resource
import select
import signal
import socket
import sys
from types import FrameType
from typing import Any, NoReturn

PROGRAM_START = __file__  # the program, for command lines
NOT_STARTED = 127  # the status of a command that cannot be started, as in a shell
_LISTENING = 128


def main() -> None:
    """Run the command of `sys.argv`."""
    start: dict[str, Any] = json.loads(sys.argv[1])
    command = sys.argv[2:]
    door = None if start.get("door") is None else _open(start["door"], start["port"])
    if door is None:
        _become(command, start["limits"])
    program = os.fork()
    if program == 0:
        door.close()
        _become(command, start["limits"])
    sys.exit(_watch(program, door))


def _open(path: str, port: int) -> socket.socket:
    """Let the gateway listen here. Returns the door."""
    door = socket.socket(socket.AF_UNIX)
    door.connect(path)
    with socket.create_server(("127.0.0.1", port), backlog=_LISTENING) as listener:
        socket.send_fds(door, [b"listener"], [listener.fileno()])
        door.recv(1)  # the gateway listens
    return door


def _watch(program: int, door: socket.socket) -> int:
    """Wait for the end of the program or of the sampler. Returns a status as a shell gives it."""

    def hand_on(number: int, frame: FrameType | None) -> None:
        os.kill(program, number)

    signal.signal(signal.SIGTERM, hand_on)
    ended = os.pidfd_open(program)
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(door, select.POLLIN)
    if not any(descriptor == ended for descriptor, _ in poll.poll()):
        os.kill(program, signal.SIGKILL)  # what it started ends with the sandbox
    status = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    return status if status >= 0 else 128 - status


def _become(command: list[str], limits: dict[str, list[int]]) -> NoReturn:
    for name, (soft, hard) in limits.items():
        _, most = resource.getrlimit(getattr(resource, name))
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(getattr(resource, name), (soft, hard))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]} cannot be started: {error.strerror}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(NOT_STARTED)


if __name__ == "__main__":
    main()
