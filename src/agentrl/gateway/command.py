"""`--agent_command`: the user's code as a command, which runs once for each attempt.

What it writes to standard output is its answer. It runs behind a subreaper (`subreaper.py`), with
which all processes end that it started: when it ends, when the attempt is cancelled, and when the
sampler is killed.
"""

import asyncio
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

import orjson

from agentrl.configs import ConfigError
from agentrl.configs.secret_variables import VARIABLES
from agentrl.gateway.exchange import MODEL
from agentrl.gateway.outcome import Outcome
from agentrl.gateway.sessions import Session
from agentrl.subreaper import SUBREAPER

_GRACE_S = 2.0  # for a program that is ended
_KEPT_BYTES = 200_000  # of each output
_READ_BYTES = 2**16
_SHOWN_CHARACTERS = 300


def words_of(command: str) -> tuple[str, ...]:
    """The words of `--agent_command`. Raises `ConfigError` if it cannot be run."""
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise ConfigError(f"--agent_command {command}: {error}") from None
    if not words or shutil.which(words[0]) is None:
        raise ConfigError(f"--agent_command {command}: there is no program {' '.join(words[:1])!r}")
    return words


async def run_command(
    words: Sequence[str], session: Session, url: str, keys: Collection[str | None]
) -> Outcome:
    """Run the command until it ends or the session is finished; it then has a moment to end.

    `url`: of the session. `keys`: variables of keys, which it must not see.
    """
    with tempfile.TemporaryDirectory(prefix="agentrl-") as folder:
        task = Path(folder) / "task.json"
        task.write_bytes(orjson.dumps(session.task_fields, option=orjson.OPT_INDENT_2))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", SUBREAPER, str(_GRACE_S), *words,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE, env=_environment(session, url, task, keys),
            start_new_session=True,
        )  # fmt: skip
        assert process.stdin and process.stdout and process.stderr
        reading = asyncio.gather(_read(process.stdout), _read(process.stderr))
        finished = asyncio.create_task(session.finished.wait())
        ended = asyncio.create_task(process.wait())
        try:
            await asyncio.wait({finished, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                await asyncio.wait({ended}, timeout=_GRACE_S)
        finally:
            finished.cancel()
            process.stdin.close()  # the subreaper ends what is left
            status = await ended
            out, err = await reading
    failed = status != 0 and not session.finished.is_set()
    error = RuntimeError(f"the program ended with status {status}: {_last_line(err or out)}")
    return Outcome(
        answer=out.strip() or None,
        error=error if failed else None,
        output=f"{out}\n--- standard error ---\n{err}" if err else out,
    )


def _environment(
    session: Session, url: str, task: Path, keys: Collection[str | None]
) -> dict[str, str]:
    """The sampler's environment without its secrets, and the way to the model."""
    secret = {*VARIABLES.values(), *keys}
    return {
        **{name: value for name, value in os.environ.items() if name not in secret},
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_BASE": f"{url}/v1",
        "OPENAI_API_KEY": session.key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": session.key,
        "AGENTRL_MODEL": MODEL,
        "AGENTRL_SESSION_URL": url,
        "AGENTRL_SESSION_KEY": session.key,
        "AGENTRL_TASK_FILE": str(task),
    }


async def _read(stream: asyncio.StreamReader) -> str:
    """All that a stream says; of more than is kept, the end."""
    kept = b""
    while piece := await stream.read(_READ_BYTES):
        kept = (kept + piece)[-_KEPT_BYTES:]
    return kept.decode(errors="replace")


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip()[:_SHOWN_CHARACTERS] if lines else "it wrote nothing"
