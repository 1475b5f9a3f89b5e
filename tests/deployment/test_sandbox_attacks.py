"""Programs that try to get out of the sandbox, to see what is not theirs, or to use too much.

Each is really run. None of them can harm this machine if the sandbox fails: the bombs are small.
"""

import errno
import os
import platform
import socket
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from sandbox_server import FOLDER, TOKEN, Server, running_server

sys.path.insert(0, str(FOLDER))
import syscall_filter

pytestmark = pytest.mark.slow

CALL_SECONDS, PROCESSES, MEMORY_MIB, DISK_MIB, FILES = 4, 24, 128, 8, 300
MEMORY_OF_ALL = "its processes used more than 128 MiB together"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    limits = {
        "call_seconds": CALL_SECONDS, "processes": PROCESSES, "memory_mib": MEMORY_MIB,
        "disk_mib": DISK_MIB, "files": FILES, "output_kib": 8,
    }  # fmt: skip
    with running_server(*[f"--{name}={value}" for name, value in limits.items()]) as server:
        yield server


# Getting out: the network


CONNECT = """
import socket
for name in ("INET", "INET6", "NETLINK", "VSOCK", "PACKET"):
    try:
        socket.socket(getattr(socket, "AF_" + name))
        print(name, "is there")
    except OSError as error:
        assert error.errno == 97, error
"""


async def test_no_address_outside_or_on_loopback_can_be_reached(server: Server) -> None:
    async with server.session() as sandbox:
        assert await sandbox.python(CONNECT) == "[no output]"
        asked = await sandbox.shell(f"exec 3<>/dev/tcp/127.0.0.1/{server.port}")
        assert "Address family not supported" in asked
        # And if a socket could be had: the network that it would be of is another one.
        assert await sandbox.shell("readlink /proc/self/ns/net") != os.readlink("/proc/self/ns/net")


async def test_no_socket_of_the_machine_can_be_reached_by_name(server: Server) -> None:
    name = f"agentrl-test-{os.getpid()}"
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        async with server.session() as sandbox:
            connect = f"import socket; socket.socket(socket.AF_UNIX).connect(chr(0) + {name!r})"
            assert "ConnectionRefusedError" in await sandbox.python(connect)


# Getting out: files


async def test_files_of_the_machine_are_not_there(server: Server, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    tmp_path.chmod(0o777)
    async with server.session() as sandbox:
        for path in (secret, FOLDER, Path.home(), "/etc/shadow", "/var", "/sys", "/dev/mem"):
            assert "No such file or directory" in await sandbox.shell(f"cat {path}")
        assert await sandbox.shell("ls /home /root /mnt /srv 2>/dev/null") == "[exit status 2]"


async def test_links_lead_nowhere_else(server: Server, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    async with server.session() as sandbox:
        await sandbox.shell(f"ln -s / root; ln -s {tmp_path}/secret s; ln -s /proc/1/root one")
        for path in (
            "s",
            f"root{tmp_path}/secret",
            f"one{tmp_path}/secret",
            "root/../../etc/shadow",
        ):
            answer = await sandbox.shell(f"cat {path}")
            assert "No such file" in answer or "Permission denied" in answer


async def test_the_system_cannot_be_written_to(server: Server) -> None:
    async with server.session() as sandbox:
        for path in ("/x", "/usr/x", "/usr/bin/env", "/etc/passwd", "/run/program", "/dev/x"):
            assert "Read-only file system" in await sandbox.shell(f"echo x > {path}")
        assert "[exit status" in await sandbox.shell("mount -o remount,rw /usr")


async def test_other_sessions_files_are_not_there(server: Server) -> None:
    async with server.session() as one, server.session() as other:
        marker = "marker-of-the-other-session"
        await other.shell(f"for d in /work /tmp /dev/shm; do echo {marker} > $d/mine; done")
        found = await one.shell("ls -A /work /tmp /dev/shm")
        assert "mine" not in found
        assert await other.shell("cat /dev/shm/mine") == f"{marker}\n"


# Getting out: processes and privileges


async def test_no_other_process_can_be_seen(server: Server) -> None:
    async with server.session() as one, server.session() as other:
        await other.shell("true")
        seen = await one.shell("echo /proc/[0-9]*")
        # the shell itself: `init` is hidden, and all else is in other namespaces
        assert seen.split() == ["/proc/2"]
        for path in ("/proc/1/environ", "/proc/sys/kernel/hostname", "/proc/kcore", "/proc/kmsg"):
            assert "No such file" in await one.shell(f"cat {path}")


async def test_the_servers_environment_is_nowhere(server: Server) -> None:
    of_server = Path(f"/proc/{server.process.pid}/environ").read_bytes()
    assert TOKEN.encode() in of_server
    async with server.session() as sandbox:
        await sandbox.shell("true")
        for process in server.descendants():
            assert TOKEN.encode() not in Path(f"/proc/{process.pid}/environ").read_bytes()
        found = await sandbox.shell("env; cat /proc/*/environ /proc/*/cmdline")
        assert "SANDBOX" not in found and TOKEN not in found


async def test_the_server_and_the_keepers_cannot_be_killed(server: Server) -> None:
    async with server.session() as sandbox, server.session() as other:
        await other.shell("echo kept > file")
        await sandbox.shell("true")
        keepers = {process.pid for process in server.descendants()}
        pids = " ".join(str(pid) for pid in (server.process.pid, *keepers))
        await sandbox.shell(f"kill -9 1 {pids}; kill -9 -1")
        assert await other.shell("cat file") == "kept\n"
        assert server.process.poll() is None
        assert {process.pid for process in server.descendants()} == keepers


async def test_a_program_has_no_privilege_and_gets_none(server: Server) -> None:
    async with server.session() as sandbox:
        status = await sandbox.shell("grep -E '^(Cap|NoNew|Seccomp:)' /proc/self/status")
        values = dict(line.split(":\t") for line in status.splitlines())
        assert set(values[name] for name in values if name.startswith("Cap")) == {"0" * 16}
        assert (values["NoNewPrivs"], values["Seccomp"]) == ("1", "2")
        assert (await sandbox.shell("id -u")).strip() == "1000"
        for command in ("unshare --user true", "unshare --net true", "chroot / true", "su -c id"):
            assert "[exit status" in await sandbox.shell(command)


REFUSED = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for number in {numbers}:
    ctypes.set_errno(0)
    result = libc.syscall(number, {arguments})
    if (result, ctypes.get_errno()) != (-1, {error}):
        print(number, result, ctypes.get_errno())
"""


async def test_refused_system_calls_are_refused(server: Server) -> None:
    column = {"x86_64": 0, "aarch64": 1}[platform.machine()]
    numbers = [
        number
        for name, columns in syscall_filter._REFUSED.items()
        if (number := columns[column]) is not None
    ]
    clone, clone3 = syscall_filter._CLONE[column], syscall_filter._CLONE3[column]
    new_namespaces = [0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000]
    async with server.session() as sandbox:
        asked = [
            (numbers, "0, 0, 0, 0, 0", errno.EPERM),
            ([clone3], "0, 0", errno.ENOSYS),
            *[([clone], f"{flag | 17}, 0, 0, 0, 0", errno.EPERM) for flag in new_namespaces],
        ]
        for called, arguments, error in asked:
            program = REFUSED.format(numbers=called, arguments=arguments, error=int(error))
            assert await sandbox.python(program) == "[no output]"
        if platform.machine() == "x86_64":  # where unshare has another number too
            x32 = "import ctypes; ctypes.CDLL(None).syscall(0x40000000 + 272, 1 << 28); print(1)"
            assert await sandbox.python(x32) == "[exit status 159]"  # SIGSYS


# Using too much


FORK_BOMB = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""
COUNT_FORKS = """
import os, time
forks = 0
while True:
    try:
        child = os.fork()
    except OSError:
        break
    if child == 0:
        time.sleep(60)
    forks += 1
print(forks)
"""


async def test_a_fork_bomb_is_bounded_and_gone_after_the_call(server: Server) -> None:
    async with server.session() as sandbox, server.session() as other:
        await sandbox.shell("true")
        await other.shell("true")
        quiet = len(server.descendants())
        bomb = await sandbox.call("python", code=FORK_BOMB)
        assert bomb.is_error and f"ran longer than {CALL_SECONDS} s" in bomb.text
        assert len(server.descendants()) == quiet
        assert int(await sandbox.python(COUNT_FORKS)) == PROCESSES - 1
        assert len(server.descendants()) == quiet
        assert await other.shell("echo well") == "well\n"


async def test_one_process_gets_no_more_memory_than_allowed(server: Server) -> None:
    async with server.session() as sandbox:
        assert "MemoryError" in await sandbox.python("bytearray(200 << 20)")
        mapped = "import mmap; mmap.mmap(-1, 200 << 20)"
        assert "Cannot allocate memory" in await sandbox.python(mapped)


SHARE = """
import os, time
for _ in range(4):
    if os.fork() == 0:
        block = bytearray(os.urandom(1)) * (60 << 20)
        time.sleep(60)
time.sleep(60)
"""


async def test_nor_do_all_processes_together(server: Server) -> None:
    async with server.session() as sandbox:
        stopped = await sandbox.call("python", code=SHARE)
        assert stopped.is_error and MEMORY_OF_ALL in stopped.text
        assert await sandbox.shell("echo well") == "well\n"


async def test_the_disk_cannot_be_filled(server: Server) -> None:
    async with server.session() as sandbox:
        full = "No space left on device"
        for folder in ("/work", "/tmp", "/dev/shm"):
            assert full in await sandbox.shell(f"head -c {DISK_MIB + 1}M /dev/zero > {folder}/big")
        # The folders have one bound together, and a full one does not keep programs from running.
        assert full in await sandbox.shell("echo x > /tmp/x")
        assert await sandbox.shell("rm /work/big /tmp/big /dev/shm/big; echo x > x; cat x") == "x\n"
        sparse = f"import os; os.truncate(os.open('s', 66), {DISK_MIB + 1} << 20)"
        assert "File too large" in await sandbox.python(sparse)


async def test_the_number_of_files_is_bounded(server: Server) -> None:
    async with server.session() as sandbox:
        made = await sandbox.shell(
            "i=0; while mkdir d$i 2>/dev/null; do i=$((i + 1));"
            f" [ $i -gt {2 * FILES} ] && break; done; echo $i; rm -r d*"
        )
        assert FILES <= int(made) <= FILES + 100
        assert await sandbox.shell("echo x > x; cat x") == "x\n"


async def test_endless_output_is_stopped_and_cut(server: Server) -> None:
    async with server.session() as sandbox:
        endless = await sandbox.call("shell", command="yes")
        assert endless.is_error and "[stopped: it printed more than 2048 KiB]" in endless.text
        assert len(endless.text) < 9 * 1024
        much = await sandbox.shell("echo first; yes 2>&- | head -c 100000; echo last")
        assert much.startswith("first\n") and much.endswith("last\n")
        assert "[91819 bytes left out]" in much


async def test_a_program_that_ignores_signals_is_ended_all_the_same(server: Server) -> None:
    async with server.session() as sandbox:
        ignoring = "trap '' TERM INT HUP QUIT; while :; do sleep 1; done"
        stopped = await sandbox.call("shell", command=ignoring)
        assert stopped.is_error and f"ran longer than {CALL_SECONDS} s" in stopped.text


async def test_nothing_outlives_its_call(server: Server) -> None:
    async with server.session() as sandbox:
        await sandbox.shell("true")
        quiet = server.descendants()
        left = (
            "setsid nohup sh -c 'sleep 3000; echo late > late' >/dev/null 2>&1 & disown; echo done"
        )
        assert await sandbox.shell(left) == "done\n"
        assert server.descendants() == quiet
        hidden = "import os\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        hidden += "        while True: pass\n"
        assert await sandbox.python(hidden) == "[no output]"
        assert server.descendants() == quiet


async def test_when_the_server_is_killed_nothing_of_it_stays() -> None:
    with running_server() as server:
        async with server.session() as sandbox:
            await sandbox.shell("true")
            processes = server.descendants()
            assert processes
            server.process.kill()
            _, alive = psutil.wait_procs(processes, timeout=10)
            assert alive == []
