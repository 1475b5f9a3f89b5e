"""The process of a session, which keeps its files and runs its calls, one after another.

The server starts one for each session. They exchange lines of JSON on its standard input and
output. The first line configures the session, each further one is a call:

    {"limits": {...}, "read_only": ["/opt/x"], "files": {"data.csv": "..."}}    -> {}
    {"argv": ["python3", "/run/program"], "program": "print(1)"}                -> the Outcome
                                                                  or, to both:  {"error": "..."}

A call is stopped by an empty line. When its input ends, so do the session, its processes and its
files.
"""

import json
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import call
import kernel
import room
import syscall_filter
from limits import Limits

NOBODY = 65534  # user of the sessions if the server runs as root
_NAMESPACES = (
    kernel.CLONE_NEWNS
    | kernel.CLONE_NEWPID  # of the session: who kills the keeper kills all
    | kernel.CLONE_NEWNET  # with no interface but a loopback that is down
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUTS
    | kernel.CLONE_NEWCGROUP
)


def main() -> None:
    """Run a session's keeper until the server closes our input."""
    requests = _lines(sys.stdin.fileno())
    try:
        session = next(requests)
        limits = Limits(**session["limits"])
        _enter(limits, session["read_only"])
        room.put_files(session["files"])
    except (OSError, ValueError) as error:
        _say({"error": str(error)})
        return
    system_call_filter = syscall_filter.build_filter()
    _say({})
    for request in requests:
        try:
            outcome = call.run(
                request["argv"], request["program"].encode("utf-8", "surrogatepass"), limits,
                system_call_filter, sys.stdin.fileno(),
            )  # fmt: skip
        except (call.CallFailed, OSError) as error:
            _say({"error": str(error)})
        else:
            first, last = (part.decode("utf-8", "replace") for part in outcome.output)
            _say(asdict(outcome) | {"output": [first, last]})


def _enter(limits: Limits, read_only: list[str]) -> None:
    """Enter new namespaces; only input and output stay.

    Returns in a child, the first process of the session; this process waits for its end.
    """
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        kernel.set_dumpable(True)  # or /proc/self, where ids are mapped, would stay root's
    kernel.become_alone_in_user_namespace(_NAMESPACES, room.USER_ID)
    keeper = os.fork()
    if keeper:
        os.waitpid(keeper, 0)
        os._exit(0)
    kernel.die_with_parent()
    socket.sethostname("sandbox")
    room.move_in(limits, read_only)


def _lines(descriptor: int) -> Iterator[dict[str, Any]]:
    # Read by hand: a file object would take more than a line from what `call.run` polls.
    buffer = b""
    while block := os.read(descriptor, 1 << 16):
        buffer += block
        while b"\n" in buffer:
            line, buffer = buffer.split(b"\n", 1)
            if line:
                yield json.loads(line)


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
