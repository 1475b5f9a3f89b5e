"""The agent `program`: a command of the user's is run for each attempt.

    ./grpo_example.sh my-run --agent_name program --agent_command "python my_agent.py"

The program finds its task in the file `$AGENTRL_TASK_FILE` (JSON) and its model where it would find
OpenAI's or Anthropic's: `OPENAI_BASE_URL`, `OPENAI_API_KEY`, `ANTHROPIC_BASE_URL`,
`ANTHROPIC_API_KEY`. Its answer is what it writes to standard output, or else the model's last
answer. A reward that it posts to `$AGENTRL_SESSION_URL/reward` is the score; without one, the
task's scorer decides.
"""

import asyncio
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import orjson

from agentrl import subreaper
from agentrl.configs import ConfigError
from agentrl.configs.secret_variables import VARIABLES
from agentrl.databases.documents import Record, StopReason, ToolResult
from agentrl.gateway.exchange import MODEL
from agentrl.gateway.server import Gateway, task_fields
from agentrl.gateway.sessions import REWARD, Session
from agentrl.rollout.agents.answers import extract_answer
from agentrl.rollout.agents.base import AsyncSampler, SamplerResources

OUTPUT = "program"  # the name under which its output is stored as a result
_GRACE_S = 2.0  # for a program that is ended
_KEPT_CHARACTERS = 200_000  # of each output
_READ_BYTES = 2**16


@dataclass(frozen=True)
class ProgramResources(SamplerResources):
    """Resources of programs. `command`: that of `--agent_command`, in words."""

    gateway: Gateway
    command: tuple[str, ...]


class ProgramSampler(AsyncSampler):
    """An attempt by a program."""

    resources: ProgramResources

    @classmethod
    @asynccontextmanager
    async def extend_resources(cls, shared: SamplerResources) -> AsyncIterator[ProgramResources]:
        """Start the gateway. Raises `ConfigError` if the command is not given or not there."""
        command = _words(shared.config.agent.agent_command)
        async with Gateway().running() as gateway:
            yield ProgramResources(**vars(shared), gateway=gateway, command=command)

    async def run(self) -> Record:
        """Run the program until it ends, or says that it is done.

        Raises RuntimeError if it ends with an error, and ValueError if it never asks the model.
        """
        session = Session(self)
        with tempfile.TemporaryDirectory(prefix="agentrl-") as folder:
            async with self.resources.gateway.session(session) as url:
                output = await self._run(session, url, Path(folder))
        await self._keep_output(output)
        self.record.stop_reason = session.limit
        if session.limit is not None:
            return self.record
        if output.status and not session.finished.is_set():
            raise RuntimeError(
                f"the program ended with status {output.status}: {output.last_words}"
            )
        last = session.last
        if last is None:
            raise ValueError("the program did not ask the model, so there is nothing to train")
        # The program decides whether a truncated turn is an answer.
        self.record.stop_reason = StopReason.MAX_NEW_TOKENS if last.cut_off else StopReason.ANSWERED
        said = session.answer or output.out.strip() or last.content
        self.record.final_answer = extract_answer(said, self.claim.task.answer_schema)
        return self.record

    async def evaluate_record(self, record: Record) -> Record:
        """The reward that the program reported, if it did, else the score of the task's scorer."""
        reward = record.scores.get(REWARD)
        if reward is None:
            return await super().evaluate_record(record)
        return record.model_copy(update={"score": reward})

    async def _run(self, session: Session, url: str, folder: Path) -> "_Output":
        task = folder / "task.json"
        task.write_bytes(orjson.dumps(task_fields(session), option=orjson.OPT_INDENT_2))
        # Behind the subreaper, with which all that it starts ends: also if this process is killed.
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", subreaper.__file__, str(_GRACE_S), *self.resources.command,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE, env=self._environment(session, url, task),
            start_new_session=True,
        )  # fmt: skip
        assert process.stdin and process.stdout and process.stderr
        reading = asyncio.gather(_read(process.stdout), _read(process.stderr))
        finished = asyncio.create_task(session.finished.wait())
        ended = asyncio.create_task(process.wait())
        try:
            await asyncio.wait({finished, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():  # it is done, and may end by itself
                await asyncio.wait({ended}, timeout=_GRACE_S)
        finally:
            finished.cancel()
            process.stdin.close()  # the subreaper ends what is left
            status = await asyncio.shield(ended)
            out, err = await reading
        return _Output(status, out, err)

    def _environment(self, session: Session, url: str, task: Path) -> dict[str, str]:
        """The sampler's environment without its secrets, and the way to the model."""
        key_variable = self.resources.config.sampling.inference_api_key_env
        secret = {*VARIABLES.values(), *([key_variable] if key_variable else [])}
        inherited = {name: value for name, value in os.environ.items() if name not in secret}
        return {
            **inherited,
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_BASE": f"{url}/v1",
            "OPENAI_API_KEY": session.key,
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": session.key,
            "AGENTRL_SESSION_URL": url,
            "AGENTRL_SESSION_KEY": session.key,
            "AGENTRL_TASK_FILE": str(task),
            "AGENTRL_MODEL": MODEL,
        }

    async def _keep_output(self, output: "_Output") -> None:
        """Store what the program wrote, for a person to read."""
        if not output.out and not output.err:
            return
        text = f"{output.out}\n--- standard error ---\n{output.err}" if output.err else output.out
        result = ToolResult(
            id=f"{self.record.id}-{OUTPUT}", record_id=self.record.id, tool=OUTPUT, text=text,
            created_at=datetime.now(UTC),
        )  # fmt: skip
        await self.resources.records.add_tool_result(result)


@dataclass(frozen=True, slots=True)
class _Output:
    """How a program ended, and what it wrote to standard output and standard error."""

    status: int
    out: str
    err: str

    @property
    def last_words(self) -> str:
        """The last line of its errors, or of its output."""
        lines = (self.err.strip() or self.out.strip()).splitlines()
        return lines[-1].strip()[:300] if lines else "it wrote nothing"


async def _read(stream: asyncio.StreamReader) -> str:
    """All that a stream says; of more than is kept, the end."""
    kept = b""
    while piece := await stream.read(_READ_BYTES):
        kept = (kept + piece)[-_KEPT_CHARACTERS:]
    return kept.decode(errors="replace")


def _words(command: str | None) -> tuple[str, ...]:
    """The words of `--agent_command`."""
    if command is None:
        raise ConfigError(
            "--agent_name program: --agent_command is needed, the command that runs an attempt"
        )
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise ConfigError(f"--agent_command {command}: {error}") from None
    if not words or shutil.which(words[0]) is None:
        raise ConfigError(f"--agent_command {command}: there is no program {words[:1]}")
    return words
