"""Records of programs once more: the program is started again and answered from the ledger.

Nothing is written. What the program does otherwise than recorded is the result:

    diverged    a request that equals none of the recorded ones that are left
    left over   it ended before it had asked for all recorded turns
    answer, reward, error    not those of the Record
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agentrl.configs import Config
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import Record, RecordStatus, Task, ToolResult
from agentrl.databases.group_commit import GroupCommit, Write
from agentrl.databases.growing_tree import Ids
from agentrl.databases.records import RecordLedger, new_record
from agentrl.databases.tasks import Claim
from agentrl.failures import InfrastructureFailure
from agentrl.foreign_text import error_line
from agentrl.gateway.program import ProgramResources, ProgramSampler
from agentrl.gateway.reported import REWARD
from agentrl.rollout.agents.recorded import (
    Diverged,
    RecordedAnswers,
    RecordedTurn,
    recorded_turns,
)
from agentrl.rollout.contained import contained

UNFINISHED = (RecordStatus.SAMPLING, RecordStatus.FAILED)


class UnwrittenRecords(RecordLedger):
    """A ledger that is read only. `outputs`: what programs wrote, by Record.

    What an attempt writes, it writes under its lease: that, and `keep_tools`, write nothing here.
    """

    def __init__(self, database: RunDatabase) -> None:
        super().__init__(database, lease_seconds=60.0)  # there are no leases
        self.outputs: dict[str, str] = {}

    async def _write_held(
        self,
        records: Sequence[str],
        commit: GroupCommit,
        writes: Sequence[Write],
        *,
        at_once: bool = False,
    ) -> bool:
        """What an attempt writes is stored already, or it is nobody's."""
        return True

    async def keep_tools(self, tool_list: str, schemas: str) -> None:
        """They are stored already."""

    async def add_tool_result(self, result: ToolResult) -> None:
        """Keep it, to be printed."""
        self.outputs[result.record_id] = result.text


@dataclass(frozen=True, slots=True)
class Divergence:
    """A request and the recorded one that is most like it.

    `prompt`: its text. `params`: its sampling parameters. `turn`: number of the recorded turn; None
    if all recorded turns were asked for.
    """

    turn: int | None
    prompt: str
    params: Mapping[str, Any]
    recorded_prompt: str = ""
    recorded_params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Replayed:
    """What became of a Record's replay.

    `turns`: recorded ones. `asked`: how many of them the program asked for. `sampled`: answers of a
    service after them. `differences`: sentences; none if it did all as recorded. `output`: what it
    wrote.
    """

    record: str
    turns: int
    asked: int
    sampled: int
    differences: tuple[str, ...]
    divergence: Divergence | None
    output: str


class _Source(RecordedAnswers):
    """Recorded answers. Notes the first request without one, which raises `Diverged` unless a
    service may answer it (`live`)."""

    def __init__(self, turns: list[RecordedTurn], live: bool) -> None:
        super().__init__([turns])
        self.live = live
        self.missed: tuple[Ids, Mapping[str, Any], RecordedTurn | None] | None = None

    def take(self, prompt_ids: Ids, params: Mapping[str, Any]) -> RecordedTurn | None:
        answer = super().take(prompt_ids, params)
        if answer is not None:
            return answer
        if self.missed is None:
            self.missed = prompt_ids, params, self.nearest(prompt_ids)
        if not self.live:
            nearest = self.missed[2]
            raise Diverged(
                "all recorded turns are asked for, and nothing is sampled in a replay"
                if nearest is None
                else f"diverged at turn {nearest.number}: the request is not the recorded one"
            )
        return None


@dataclass(frozen=True)
class Replayer:
    """Replays Records with the program of `resources`, whose `records` are `UnwrittenRecords`.

    `live`: whether services answer what is not recorded.
    """

    config: Config
    resources: ProgramResources
    records: UnwrittenRecords
    live: bool

    async def replay(self, task: Task, record: Record) -> Replayed:
        """Run the program for a Record of a task."""
        stored = (await self.records.turns([record.id]))[record.id]
        turns = await asyncio.to_thread(recorded_turns, stored)
        if any(turn.params is None for turn in turns):
            told = "its turns were stored without their sampling parameters, by an earlier version"
            return Replayed(record.id, len(turns), 0, 0, (told,), None, "")
        claim = Claim(task, record.rollout, record.attempt, failures=0)
        again = new_record(claim, "replay", self.config.agent.agent_name)
        sampler = ProgramSampler(claim, again, self.resources)
        source = sampler.recorded = _Source(turns, self.live)
        error = await self._run(sampler)
        replay = again.replay
        asked = replay.turns if replay else 0
        return Replayed(
            record=record.id,
            turns=len(turns),
            asked=asked,
            sampled=again.n_turns - asked,
            differences=tuple(_differences(record, again, source, error)),
            divergence=self._divergence(source),
            output=self.records.outputs.pop(again.id, ""),
        )

    async def _run(self, sampler: ProgramSampler) -> str | None:
        """Run the program to its end. Returns its error."""
        limit = self.config.sampling.record_timeout
        running = asyncio.create_task(contained(sampler.sample(), "the program"))
        try:
            async with asyncio.timeout(limit):
                await running
        except TimeoutError as error:
            if not running.cancelled():
                return error_line(error)
            return f"not finished within --record_timeout {limit:g} s"
        except InfrastructureFailure:
            raise  # of a service
        except Exception as error:  # the program's own
            return error_line(error)
        return None

    def _divergence(self, source: _Source) -> Divergence | None:
        if source.missed is None:
            return None
        prompt, params, nearest = source.missed
        decode = self.resources.renderer.codec.decode
        asked = Divergence(None, decode(np.asarray(prompt).tolist()), params)
        if nearest is None:
            return asked
        recorded = decode(nearest.prompt.tolist())
        return Divergence(
            nearest.number, asked.prompt, asked.params, recorded, nearest.params or {}
        )


def _differences(record: Record, again: Record, source: _Source, error: str | None) -> list[str]:
    """What a replay did otherwise than its Record, in sentences."""
    unfinished = record.status in UNFINISHED
    if source.missed is not None:
        nearest = source.missed[2]
        if nearest is not None:
            return [f"diverged at turn {nearest.number}"]
        # An attempt that failed has no end to compare with.
        return [] if unfinished else ["asks for more turns than were recorded"]
    left = sorted(turn.number for turn in source.left())
    if error is not None:
        return [] if unfinished and not left else [f"fails: {error}"]
    if left:
        return [f"ends without asking for turn {left[0]}"]
    if unfinished:
        return []
    found = []
    if again.final_answer != record.final_answer:
        found.append(f"answers {again.final_answer!r:.80} and not {record.final_answer!r:.80}")
    reward, recorded = again.scores.get(REWARD), record.scores.get(REWARD)
    if reward != recorded:
        found.append(f"reports the reward {reward} and not {recorded}")
    of_agents, recorded_agents = again.agent_rewards, record.agent_rewards
    for agent in sorted({*of_agents, *recorded_agents}):
        reward, recorded = of_agents.get(agent), recorded_agents.get(agent)
        if reward != recorded:
            found.append(f"reports the reward {reward} of {agent} and not {recorded}")
    return found
