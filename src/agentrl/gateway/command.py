"""`--agent_command`: the user's code as a command, which runs once for each attempt.

What it writes to standard output is its answer. It runs behind a subreaper (`program_process.py`),
with which all processes end that it started: when it ends, when the attempt is cancelled, and when
the sampler is killed. `program_limits.py` has its limits, `sandbox.py` the sandboxes.
"""

import asyncio
import hashlib
import logging
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import orjson

from agentrl.configs import Config, ConfigError
from agentrl.configs.secret_variables import VARIABLES
from agentrl.gateway.door import door
from agentrl.gateway.exchange import MODEL
from agentrl.gateway.outcome import Outcome
from agentrl.gateway.program_limits import ProgramLimits
from agentrl.gateway.program_process import ProgramProcess
from agentrl.gateway.program_start import PROGRAM_START
from agentrl.gateway.sandbox import (
    DOOR,
    SHOWN,
    TASK,
    Docker,
    Sandbox,
    SandboxedProgram,
    sandbox_of,
    show,
)
from agentrl.gateway.server import Gateway
from agentrl.gateway.sessions import Session

log = logging.getLogger(__name__)

_MARK = "AGENTRL_SESSION_KEY"
_REMOVED_WITHIN_S = 20.0
_SHOWN_CHARACTERS = 300


def words_of(command: str, *, here: bool = True) -> tuple[str, ...]:
    """The words of `--agent_command`. Raises `ConfigError` if it cannot be run.

    `here`: whether it is a program of this machine.
    """
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise ConfigError(f"--agent_command {command}: {error}") from None
    if not words or (here and shutil.which(words[0]) is None):
        raise ConfigError(f"--agent_command {command}: there is no program {' '.join(words[:1])!r}")
    return words


@dataclass(frozen=True)
class Command:
    """A command, and how it is run. `secrets`: names of variables that it must not see."""

    words: tuple[str, ...]
    secrets: frozenset[str]
    limits: ProgramLimits
    sandbox: Sandbox | None

    @classmethod
    def of(cls, config: Config) -> Self:
        """The command of the flags. Raises `ConfigError` if it cannot be run."""
        agent = config.agent
        assert agent.agent_command is not None
        limits = ProgramLimits.of(agent)
        sandbox = sandbox_of(agent, limits)
        keys = {config.sampling.inference_api_key_env, agent.agent_models_key_env} - {None}
        # A container has programs of its own.
        words = words_of(agent.agent_command, here=not isinstance(sandbox, Docker))
        return cls(words, frozenset({*VARIABLES.values(), *map(str, keys)}), limits, sandbox)


async def run_command(command: Command, session: Session, url: str, gateway: Gateway) -> Outcome:
    """Run the command until it ends or the session is finished; it then has a moment to end.

    `url`: of the session.
    """
    task = orjson.dumps(session.task_fields, option=orjson.OPT_INDENT_2)
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="agentrl-")))
        if command.sandbox is None:
            (folder / TASK).write_bytes(task)
            words = _limited(command)
            variables = _variables(session, url, str(folder / TASK))
            others = os.environ.items()
            environment = {
                **{name: value for name, value in others if name not in command.secrets},
                **variables,
            }
        else:
            shown = show(folder, task)
            await stack.enter_async_context(door(gateway, shown / DOOR))
            variables = _variables(session, url, f"{SHOWN}/{TASK}")
            # The key's digest: names of containers can be seen by others.
            name = hashlib.blake2b(session.key.encode(), digest_size=8).hexdigest()
            words = command.sandbox.command(
                SandboxedProgram(command.words, name, shown, gateway.port, list(variables))
            )
            environment = command.sandbox.environment(variables)
            if (removal := command.sandbox.removal(name)) is not None:
                stack.push_async_callback(_remove, removal, environment)
        program = await ProgramProcess.start(words, environment, _MARK)
        try:
            await program.wait(session.finished)
        finally:
            status = await program.end()
    out, err = program.outputs
    failed = status != 0 and not session.finished.is_set()
    return Outcome(
        answer=out.strip() or None,
        error=RuntimeError(_why(command, program, status)) if failed else None,
        output=f"{out}\n--- standard error ---\n{err}" if err else out,
    )


def _limited(command: Command) -> Sequence[str]:
    """The words of a command outside of a sandbox, with its limits."""
    limits = command.limits.of_process()
    if not limits:
        return command.words
    start = orjson.dumps({"limits": limits}).decode()
    return [sys.executable, "-I", "-S", PROGRAM_START, start, *command.words]


def _variables(session: Session, url: str, task: str) -> dict[str, str]:
    """The way to the model, and to the task."""
    return {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_BASE": f"{url}/v1",
        "OPENAI_API_KEY": session.key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": session.key,
        "AGENTRL_MODEL": MODEL,
        "AGENTRL_SESSION_URL": url,
        _MARK: session.key,
        "AGENTRL_TASK_FILE": task,
    }


async def _remove(words: Sequence[str], environment: Mapping[str, str]) -> None:
    """End what may be left of a sandbox; usually nothing is, which is no error."""
    process = await asyncio.create_subprocess_exec(
        *words, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL, env=environment,
    )  # fmt: skip
    try:
        await asyncio.wait_for(process.wait(), _REMOVED_WITHIN_S)
    except TimeoutError:
        process.kill()
        log.warning("%s did not end within %g s", " ".join(words), _REMOVED_WITHIN_S)


def _why(command: Command, program: ProgramProcess, status: int) -> str:
    """Why a program failed, in one sentence."""
    out, err = program.outputs
    said = _last_line(err or out)
    if program.lost:
        return f"the process that watches over the program was killed, and all ended: {said}"
    kills = command.sandbox is not None and command.sandbox.kills
    limit = command.limits.explain(status, err or out, kills=kills)
    if limit is not None:
        return f"the program reached {limit} and ended with status {status}: {said}"
    return f"the program ended with status {status}: {said}"


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip()[:_SHOWN_CHARACTERS] if lines else "it wrote nothing"
