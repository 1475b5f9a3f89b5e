"""A service whose context is shorter than what the flags ask for: records end there, and count."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic

import pytest

from agentrl.configs import ConfigError, parse_config
from agentrl.databases.documents import Record, Slot, Split, StopReason, Task
from agentrl.databases.records import RecordLedger
from agentrl.databases.tasks import Claim
from agentrl.inference.engines import open_engines
from agentrl.inference.pool import ServicePool
from agentrl.launcher.service_checks import check_services
from agentrl.rollout.agents.base import AsyncSampler, SamplerResources
from agentrl.rollout.agents.limits import check_context
from agentrl.rollout.agents.single_turn import SingleTurnSampler

MODEL = Path(__file__).resolve().parents[2] / "assets" / "demo" / "model"
CONTEXT = 160


class Endless(AsyncSampler):
    """Asks the model again and again; that there is a limit is not its business."""

    async def run(self) -> Record:
        messages = [{"role": "user", "content": self.record.query}]
        await self.begin_conversation(messages, None)
        while True:
            turn = await self.generate()
            await self.write_turn(turn, messages)
            if turn.stop_reason is not None:
                self.record.stop_reason = turn.stop_reason
                return self.record
            messages = [{"role": "user", "content": "What else?"}]
            await self.continue_conversation(turn, messages)


@pytest.fixture(scope="module")
def short(start_service: Callable):
    """A service that has less room than its model."""
    return start_service("--context_length", str(CONTEXT))


@pytest.fixture
async def resources(short, database) -> AsyncIterator[SamplerResources]:
    @asynccontextmanager
    async def opened() -> AsyncIterator[SamplerResources]:
        config = parse_config(
            ["--model_name_or_path", str(MODEL), "--max_tokens", "900", "--max_new_tokens", "64"]
        )
        async with ServicePool(patience_s=20) as pool:
            pool.update([short.url])
            ledger = RecordLedger(database, 60.0)
            async with AsyncSampler.open_resources(config, pool, ledger) as shared:
                yield shared

    async with opened() as shared:
        yield shared


def sampler_of(kind: type[AsyncSampler], resources: SamplerResources, query: str) -> AsyncSampler:
    task = Task(
        _id="train-0-a", task_id="a", query=query, answer="4", scorer="exact_match",
        split=Split.TRAIN, epoch=0, seq=0, group_order=0, pending=0, slots=[Slot(rollout=0)],
    )  # fmt: skip
    claim = Claim(task, 0, attempt=0, failures=0)
    record = Record(
        _id=claim.record_id, task=task.id, task_id=task.task_id, rollout=0, attempt=0,
        split=Split.TRAIN, epoch=0, owner="test", query=query,
    )  # fmt: skip
    resources.records.leases.begin([record.id], monotonic())
    return kind(claim, record, resources)


async def test_a_conversation_that_fills_the_context_ends_there_and_is_scored(resources) -> None:
    sampler = sampler_of(Endless, resources, "How many?")
    record = await sampler.sample()
    assert record.stop_reason is StopReason.MAX_PROMPT_TOKENS
    assert record.n_turns == len(record.turns) > 0
    assert CONTEXT - 40 < sampler.context.n_tokens < CONTEXT + 40
    assert (await sampler.evaluate_record(record)).score == 0.0


async def test_a_prompt_that_fits_and_leaves_little_is_answered_as_far_as_there_is_room(
    resources,
) -> None:
    words = "bin " * 200
    renderer = resources.renderer
    room = CONTEXT - 30
    while len(renderer.render_prompt([{"role": "user", "content": words}])) > room:
        words = words[:-4]
    sampler = sampler_of(SingleTurnSampler, resources, words)
    record = await sampler.sample()
    if record.stop_reason is StopReason.ANSWERED:  # the model ended it by itself
        pytest.skip("the model's turn was shorter than what was left")
    assert record.stop_reason is StopReason.MAX_PROMPT_TOKENS
    assert 0 < record.tokens.generated < 64


async def test_a_first_prompt_that_does_not_fit_is_a_result_too(resources) -> None:
    sampler = sampler_of(SingleTurnSampler, resources, "bin " * 400)
    record = await sampler.sample()
    assert record.stop_reason is StopReason.MAX_PROMPT_TOKENS and record.n_turns == 0
    assert (await sampler.evaluate_record(record)).score == 0.0


async def test_before_a_launch_the_flags_are_compared_with_the_service(short) -> None:
    async with open_engines([short.url]) as [engine]:
        assert (await engine.fetch_limits()).context_length == CONTEXT
    fits = parse_config(["--max_prompt_tokens", str(CONTEXT - 7), "--max_tokens", "900"])
    assert check_context(fits.sampling, CONTEXT, "it") is None


def test_prompts_to_which_there_is_no_answer_are_refused_in_one_sentence(short) -> None:
    told: list[str] = []
    given = ["--inference_urls", short.url, "--max_tokens", "900"]
    check_services(parse_config(given), told.append)
    assert told == [
        f"records end at the context of inference service {short.url}, {CONTEXT} tokens, before "
        "--max_tokens 900"
    ]
    with pytest.raises(ConfigError, match=f"may have {CONTEXT - 7} at the most"):
        check_services(parse_config([*given, "--max_prompt_tokens", str(CONTEXT - 6)]), told.append)
    check_services(parse_config([*given, "--max_prompt_tokens", str(CONTEXT - 7)]), told.append)
    assert len(told) == 1
    gone = parse_config(["--inference_urls", "http://127.0.0.1:9"])
    check_services(gone, told.append)
    assert "is waited for" in told[-1]
