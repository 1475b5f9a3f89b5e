"""Python programs in processes of their own that are forked from one with the libraries loaded.

Importing torch, transformers and the trainer takes seconds of CPU time, importing MCP's libraries
takes 1.7, and tests start some hundred programs. A forked program is a process like any other: it
has its own memory, it can be killed, and its files and signals are its own.
"""

import atexit
import gc
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe, connection, get_context
from pathlib import Path
from typing import IO

from ports import free_port

FORKS = get_context("forkserver")
RANKS_CONFIG = Path(__file__).parents[1] / "assets" / "fsdp2_cpu.yml"

_preloaded: list[str] = []


def preload(*modules: str) -> None:
    """Load modules into the process that all programs are forked from. For test modules, when they
    are imported: that is before the first program."""
    _preloaded.extend(module for module in modules if module not in _preloaded)
    FORKS.set_forkserver_preload(["uncollected", *_preloaded])


def preload_training() -> None:
    """What the trainer and the local engine need."""
    preload(
        "agentrl.training.trainer", "agentrl.inference.engine.server",
        "transformers.models.qwen3.modeling_qwen3", "transformers.models.auto.tokenization_auto",
    )  # fmt: skip


class Forked:
    """A program that runs, with what `subprocess.Popen` has of methods and attributes.

    `arguments` are those of Python: `-m MODULE`, `-c CODE` or a file, and the program's own.
    `log`: a file for what it prints; with `piped` its output is read from `stdout` instead.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        log: Path | None = None,
        piped: bool = False,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.args = ["python", *arguments]
        self.stdout: IO[str] | None = None
        reader, writer = Pipe(duplex=False) if piped else (None, None)
        self._process = FORKS.Process(
            target=_run,
            args=(list(arguments), os.getcwd(), {**os.environ, **(environment or {})}, log, writer),
            daemon=True,
        )
        self._process.start()
        if reader is not None and writer is not None:
            writer.close()
            self.stdout = os.fdopen(os.dup(reader.fileno()))
            reader.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status, negative for a signal; None while the program runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """`returncode` now."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """`returncode` when the program has ended. Raises `subprocess.TimeoutExpired`."""
        self._process.join(timeout)
        if self.returncode is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the program has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        if self.returncode is None:
            self._process.terminate()

    def kill(self) -> None:
        """SIGKILL."""
        if self.returncode is None:
            self._process.kill()


class ForkedRanks:
    """Processes of one program, as `accelerate launch` starts them: with the same environment.

    All of them write to `log`.
    """

    def __init__(self, processes: int, log: Path, arguments: Sequence[str]) -> None:
        from accelerate.commands.launch import _validate_launch_command, launch_command_parser
        from accelerate.utils.launch import prepare_multi_gpu_env

        port = str(free_port())
        launched = launch_command_parser().parse_args(
            [
                "--config_file", str(RANKS_CONFIG), "--num_processes", str(processes),
                "--main_process_port", port, *arguments,
            ]
        )  # fmt: skip
        common = {
            **prepare_multi_gpu_env(_validate_launch_command(launched)[0]),
            "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(processes), "MASTER_PORT": port,
            "LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1",
        }  # fmt: skip
        self._ranks = [
            Forked(arguments, log=log, environment={**common, "RANK": rank, "LOCAL_RANK": rank})
            for rank in map(str, range(processes))
        ]

    def wait(self, timeout: float = 100) -> int:
        """The largest exit status in size, 0 if all ended well. Raises `subprocess.TimeoutExpired`,
        when all are killed."""
        deadline = time.monotonic() + timeout
        try:
            statuses = [rank.wait(deadline - time.monotonic()) for rank in self._ranks]
        finally:
            for rank in self._ranks:
                rank.kill()
        return max(statuses, key=abs)


def _run(
    arguments: list[str],
    folder: str,
    environment: dict[str, str],
    log: Path | None,
    output: "connection.Connection | None",
) -> None:
    gc.freeze()  # what was preloaded: a collection would visit, and so copy, all of its memory
    gc.enable()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    target = None
    if log is not None:
        target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    elif output is not None:
        target = output.fileno()
    if target is not None:
        os.dup2(target, 1)
        if log is not None:
            os.dup2(target, 2)
    kind, *rest = arguments
    try:
        match kind:
            case "-m":
                sys.argv = ["-m", *rest[1:]]
                runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
            case "-c":
                sys.argv = ["-c", *rest[1:]]
                exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
            case _:
                sys.argv = [kind, *rest]
                sys.path.insert(0, str(Path(kind).parent))
                runpy.run_path(kind, run_name="__main__")
    finally:
        # A forked process leaves without what an interpreter does at its end.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
