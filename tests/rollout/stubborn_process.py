"""A sampler process with an agent that does not let go: `stubborn_process.py URL RUN AGENT`.

Its rollout 0 begins, says so, and goes on whatever happens; all others answer.
"""

import asyncio
import contextlib
import sys
import threading
import time

from scripted_run import ScriptedAgent, config

from agentrl.databases.documents import Record
from agentrl.rollout.agents import register_agent
from agentrl.rollout.scheduling import attempt, worker
from agentrl.rollout.scheduling.process_end import ProcessEnd, run_to_its_end


class Stubborn(ScriptedAgent):
    """Its rollout 0 is the hostile one."""

    async def run(self) -> Record:
        if self.claim.rollout == 0:
            print("begun", flush=True)
            await self.go_on()
        return await super().run()

    async def go_on(self) -> None:
        raise NotImplementedError


class Swallows(Stubborn):
    async def go_on(self) -> None:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)


class Blocks(Stubborn):
    async def go_on(self) -> None:
        time.sleep(3600)


class LeavesThread(Stubborn):
    async def go_on(self) -> None:
        await asyncio.to_thread(self.wait)

    def wait(self) -> None:
        threading.Event().wait()


class ExitsInTask(Stubborn):
    async def go_on(self) -> None:
        await asyncio.gather(self.leave(), asyncio.sleep(60))

    async def leave(self) -> None:
        sys.exit(3)


async def main(url: str, run: str, agent: str) -> None:
    for kind in (Swallows, Blocks, LeavesThread, ExitsInTask):
        register_agent(kind.__name__, kind)
    flags = config(
        "--db_connection_string", url, "--run_name", run, "--agent_name", agent,
        "--drain_seconds", "1", "--max_failures", "1",
    )  # fmt: skip
    await worker.sample(flags, end=ProcessEnd(asyncio.get_running_loop()))


if __name__ == "__main__":
    attempt.LET_GO_S = worker.LET_GO_S = worker.END_S = 1.0
    worker.set_up_log()
    run_to_its_end(main(*sys.argv[1:]))
