"""A drift from end to end: sampled, stored, replayed and made a row of."""

import shutil
from pathlib import Path

from scripted_service import DEMO, END, ScriptedService, claim_and_record, stored_turns

from agentrl.configs import parse_config
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import Record
from agentrl.databases.records import RecordLedger
from agentrl.inference.pool import ServicePool
from agentrl.rollout.agents.base import AsyncSampler
from agentrl.rollout.chat import Drift, Message
from agentrl.rollout.groups.row_building import build_row, replay


class TalkingSampler(AsyncSampler):
    """A user's own sampler: a user who speaks twice."""

    async def run(self) -> Record:
        messages: list[Message] = [{"role": "user", "content": self.record.query}]
        await self.begin_conversation(messages, None)
        turn = await self.generate()
        await self.write_turn(turn, messages)
        added: list[Message] = [{"role": "user", "content": "Really?"}]
        await self.continue_conversation(turn, added)
        turn = await self.generate()
        await self.write_turn(turn, added)
        return self.record.model_copy(update={"score": 1.0})


async def test_where_the_template_drops_a_thought_the_record_goes_on_in_a_segment_without_it(
    service: ScriptedService, database: RunDatabase, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DEMO / "model", folder)
    template = folder / "chat_template.jinja"
    whole = template.read_text(encoding="utf-8")
    forgetful = whole.replace("message.content or ''", "(message.content or '').split('!')[-1]", 1)
    assert forgetful != whole
    template.write_text(forgetful, encoding="utf-8")
    service.script = [f"hm!one{END}", f"two{END}"]
    config = parse_config(["--model_name_or_path", str(folder)])
    async with (
        ServicePool() as pool,
        TalkingSampler.open_resources(config, pool, RecordLedger(database, 60.0)) as resources,
    ):
        pool.update([service.url])
        sampler = TalkingSampler(*claim_and_record(resources), resources)
        record = await sampler.run()
        codec = resources.renderer.codec
    first, second = await stored_turns(database, record)
    assert (record.n_segments, record.n_continuations, record.n_drifts) == (2, 1, 1)
    assert (first.drift, second.drift) == (None, Drift.TURN_REWRITTEN)
    prompts = [request["input_ids"] for request in service.requests]
    assert "hm!" not in codec.decode(prompts[1]) and "one" in codec.decode(prompts[1])
    row = build_row(record, [first, second], 1.0, 1.0, 0)
    assert (row.n_segments, row.n_continuations, row.n_drifts) == (2, 1, 1)
    context = replay([first, second])
    sampled = [
        context.line(segment)["ids"][: len(prompt)].tolist()
        for segment, prompt in zip(range(len(context.segments)), prompts, strict=True)
    ]
    assert sampled == prompts
