"""What any engine must do with new weights and its memory; see conformance.py."""

import asyncio
import socket
from pathlib import Path

import pytest
import torch
from conformance import PROMPT, ask, start, until_used
from safetensors.torch import load_file

from agentrl.inference.engine_protocol import Engine, PauseMode
from agentrl.inference.engines import engine_at
from agentrl.inference.generation_builder import GenerationBuilder
from agentrl.inference.memory import release_memory, resume_memory
from agentrl.inference.protocol import Generation
from agentrl.inference.weights.disk import DiskUpdater
from agentrl.inference.weights.updates import (
    PublishedWeights,
    PublishOutcome,
    UpdatePause,
    WeightUpdater,
    update_services,
)
from agentrl.inference.weights.ways import make_updater
from agentrl.policy_version import VersionSpan


async def publish(
    engine: Engine,
    folder: Path,
    version: int,
    updater: WeightUpdater | None = None,
    pause: UpdatePause = "retract",
) -> PublishOutcome:
    """Bring the weights of a folder to the service, from disk if no other way is given."""
    tensors = load_file(folder / "model.safetensors")
    weights = PublishedWeights(version, folder, tensors)
    (outcome,) = await update_services(updater or DiskUpdater(), [engine], weights, pause)
    return outcome


def check_logprobs(made: Generation, folder_of: dict[int, Path], reference) -> None:
    """Each token has the logprob of the weights whose version it carries."""
    for span in made.versions:
        expected = reference(folder_of[span.version], PROMPT, made.output_ids)
        mine = slice(span.start, span.end)
        assert made.output_logprobs[mine] == pytest.approx(expected[mine], abs=1e-4)


def require_pause(engine: Engine, mode: PauseMode) -> None:
    """Skip the test for an engine that cannot be paused so."""
    if mode not in engine.capabilities.pauses:
        pytest.skip(f"the engine has no pause {mode!r}")


class WeightConformance:
    """New weights while it generates: every token carries the version that made it."""

    @pytest.fixture(params=["disk", "distributed", "tensor"])
    async def updater(self, engine, request: pytest.FixtureRequest):
        if request.param not in engine.capabilities.weight_ways:
            pytest.skip(f"the engine takes no weights by {request.param}")
        updater = make_updater(request.param, torch.device("cpu"))
        yield updater
        await updater.close()

    async def test_each_token_has_the_logprob_of_the_version_it_carries(
        self, engine, folders, reference, updater: WeightUpdater
    ) -> None:
        first = await engine.weight_version() + 1
        folder_of = {first: folders.first, first + 1: folders.second, first + 2: folders.first}
        assert (await publish(engine, folders.first, first, updater)).ok
        running = await start(engine, PROMPT, 3, 700)
        for crossed, version in enumerate((first + 1, first + 2), 1):
            await until_used(engine, 3 * (len(PROMPT) + 60 * crossed), running)
            outcome = await publish(engine, folder_of[version], version, updater)
            assert outcome.error is None and outcome.stall_s > 0
        assert await engine.weight_version() == first + 2
        for made in await asyncio.gather(*running):
            assert [span.version for span in made.versions] == list(folder_of)
            assert len(made.output_ids) == 700
            check_logprobs(made, folder_of, reference)

    async def test_an_aborted_answer_is_continued_by_the_next_version(
        self, engine, folders, reference
    ) -> None:
        old = await engine.weight_version()
        answer = GenerationBuilder(ask(PROMPT, 400))
        making = asyncio.create_task(engine.extend(answer))
        await until_used(engine, len(PROMPT) + 50, [making])
        await engine.abort()
        await making
        had = list(answer.ids)
        assert answer.ending is None and 0 < len(had) < 400
        assert (await publish(engine, folders.second, old + 1)).ok
        await engine.extend(answer)
        made = answer.generation(engine.url, 1.0)
        assert made.finish_reason == "length" and len(made.output_ids) == 400
        assert list(made.output_ids[: len(had)]) == had
        assert made.versions == (
            VersionSpan(old, 0, len(had)), VersionSpan(old + 1, len(had), 400),
        )  # fmt: skip
        check_logprobs(made, {old: folders.first, old + 1: folders.second}, reference)

    async def test_in_place_the_old_keys_and_values_go_on_serving(
        self, engine, folders, reference, updater: WeightUpdater
    ) -> None:
        require_pause(engine, "in_place")
        old = await engine.weight_version() + 1
        assert (await publish(engine, folders.first, old, updater)).ok
        (running,) = await start(engine, PROMPT, 1, 500)
        await until_used(engine, len(PROMPT) + 50, [running])
        assert (await publish(engine, folders.second, old + 1, updater, "in_place")).ok
        made = await running
        assert [span.version for span in made.versions] == [old, old + 1]
        before, after = made.versions
        expected = reference(folders.first, PROMPT, made.output_ids)[: before.end]
        assert made.output_logprobs[: before.end] == pytest.approx(expected, abs=1e-4)
        # What the new weights chose still saw keys and values of the old ones.
        exact = reference(folders.second, PROMPT, made.output_ids)[after.start :]
        assert made.output_logprobs[after.start :] != pytest.approx(exact, abs=1e-2)
        await engine.flush_cache()

    @pytest.mark.parametrize("mode", ["retract", "in_place"])
    async def test_nothing_is_generated_while_it_is_paused(self, engine, mode: PauseMode) -> None:
        require_pause(engine, mode)
        running = await start(engine, PROMPT, 2, 400)
        await engine.pause(mode)
        late = asyncio.create_task(engine.generate(ask(PROMPT, 3)))
        done, _ = await asyncio.wait([*running, late], timeout=1.0)
        assert not done
        # It takes no new work, but it is not gone: what is here waits.
        assert not await engine.ready() and await engine.alive()
        await engine.continue_()
        assert await engine.ready()
        made = await asyncio.gather(*running, late)
        assert [len(one.output_ids) for one in made[:2]] == [400, 400]

    async def test_requests_outlive_a_pause_in_which_their_service_says_nothing(
        self, engine
    ) -> None:
        require_pause(engine, "in_place")
        async with engine_at(engine.url, silence_s=0.2) as impatient:
            (running,) = await start(impatient, PROMPT, 1, 400)
            await impatient.pause("in_place")
            done, _ = await asyncio.wait([running], timeout=1.5)
            assert not done
            await impatient.continue_()
            assert len((await running).output_ids) == 400

    async def test_a_pause_that_aborts_keeps_what_was_made_and_holds_what_comes(
        self, engine
    ) -> None:
        require_pause(engine, "abort")
        running = await start(engine, PROMPT, 2, 700)
        await engine.pause("abort")
        ended = await asyncio.gather(*running)
        assert {made.finish_reason for made in ended} == {"abort"}
        assert all(0 < len(made.output_ids) < 700 for made in ended)
        late = asyncio.create_task(engine.generate(ask(PROMPT, 3)))
        done, _ = await asyncio.wait([late], timeout=0.5)
        assert not done
        await engine.continue_()
        assert (await late).finish_reason != "abort"

    async def test_a_failed_publication_is_told_and_generation_goes_on(
        self, engine, folders
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            nobody = engine.at(f"http://127.0.0.1:{free.getsockname()[1]}")
        before = await engine.weight_version()
        async with nobody:
            outcomes = await update_services(
                DiskUpdater(), [engine, nobody], PublishedWeights(99, folders.first.parent)
            )
        assert [outcome.url for outcome in outcomes] == [engine.url, nobody.url]
        assert outcomes[0].error and "cannot connect" in (outcomes[1].error or "")
        assert not outcomes[0].mixed
        assert await engine.weight_version() == before
        made = await engine.generate(ask(PROMPT, 3))
        assert made.versions[0].version == before

    async def test_a_published_service_forgets_prefixes_of_the_old_version(
        self, engine, folders, updater: WeightUpdater
    ) -> None:
        await engine.generate(ask(PROMPT, 3))
        warm = await engine.generate(ask(PROMPT, 3))
        assert warm.cached_tokens == len(PROMPT) - 1
        version = await engine.weight_version() + 1
        assert (await publish(engine, folders.second, version, updater)).ok
        cold = await engine.generate(ask(PROMPT, 3))
        assert cold.cached_tokens == 0

    async def test_publications_without_anything_running_are_versions_too(
        self, engine, folders, updater: WeightUpdater
    ) -> None:
        first = await engine.weight_version() + 1
        for version in (first, first + 1, first + 2):
            assert (await publish(engine, folders.first, version, updater)).ok
        made = await engine.generate(ask(PROMPT, 3))
        assert {span.version for span in made.versions} == {first + 2}


class MemoryConformance:
    """Memory given back to a trainer and taken again, with requests that wait meanwhile.

    On a CPU this shows the order of things, not that a GPU's memory is really free.
    """

    @pytest.fixture(autouse=True)
    def needs_memory(self, engine: Engine) -> None:
        """Skip what follows for an engine that keeps its memory."""
        if not engine.capabilities.memory:
            pytest.skip("the engine keeps its memory")

    async def test_requests_wait_for_the_memory_and_go_on_with_the_new_weights(
        self, engine, folders, reference
    ) -> None:
        old = await engine.weight_version() + 1
        await update_services(DiskUpdater(), [engine], PublishedWeights(old, folders.first))
        running = await start(engine, PROMPT, 3, 500)
        await release_memory(engine)
        late = asyncio.create_task(engine.generate(ask(PROMPT, 5)))
        done, _ = await asyncio.wait([*running, late], timeout=0.5)
        assert not done

        await resume_memory(engine)
        new = PublishedWeights(old + 1, folders.second)
        (outcome,) = await update_services(DiskUpdater(), [engine], new)
        assert outcome.ok
        for made in await asyncio.gather(*running):
            assert len(made.output_ids) == 500
            assert [span.version for span in made.versions] == [old, old + 1]
            joint = made.versions[0].end
            before = reference(folders.first, PROMPT, made.output_ids)[:joint]
            after = reference(folders.second, PROMPT, made.output_ids)[joint:]
            assert made.output_logprobs == pytest.approx(before + after, abs=1e-4)
        assert {span.version for span in (await late).versions} == {old + 1}

    async def test_memory_comes_back_with_the_weights_that_were_there(
        self, engine, folders, reference
    ) -> None:
        version = await engine.weight_version() + 1
        await update_services(DiskUpdater(), [engine], PublishedWeights(version, folders.second))
        for _ in range(2):
            await release_memory(engine)
            await resume_memory(engine)
            await engine.continue_()
        made = await engine.generate(ask(PROMPT, 20))
        assert {span.version for span in made.versions} == {version}
        expected = reference(folders.second, PROMPT, made.output_ids)
        assert made.output_logprobs == pytest.approx(expected, abs=1e-4)
