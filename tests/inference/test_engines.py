"""Which engine serves a URL, and what it takes to add one that speaks another protocol."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from counting_engine import CountingEngine

from agentrl.inference.client import SGLangClient
from agentrl.inference.engine_protocol import Engine
from agentrl.inference.engines import ENGINES, engine_at
from agentrl.inference.memory import release_memory
from agentrl.inference.pool import ServicePool
from agentrl.inference.protocol import (
    GenerateRequest,
    RequestRejected,
    SamplingParams,
)
from agentrl.inference.weights.disk import DiskUpdater
from agentrl.inference.weights.updates import PublishedWeights, update_services
from agentrl.inference.weights.ways import make_updater

URL = "counting+http://127.0.0.1:1"


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The engine in its file, and its line in the register."""
    monkeypatch.setitem(ENGINES, "counting", CountingEngine)
    monkeypatch.setattr(CountingEngine, "held", {})
    yield


def test_a_url_is_sglang_s_unless_it_says_otherwise(registered: None) -> None:
    plain, named = engine_at("http://a:1/"), engine_at("sglang+https://a:1")
    assert isinstance(plain, SGLangClient) and isinstance(named, SGLangClient)
    assert (plain.url, named.url) == ("http://a:1", "sglang+https://a:1")
    assert isinstance(engine_at(URL), CountingEngine)
    with pytest.raises(ValueError, match="no engine is called 'other', only sglang, counting"):
        engine_at("other+http://a:1")


async def test_a_named_service_is_reached_at_its_address(engine) -> None:
    async with engine_at("sglang+" + engine.url) as named:
        assert await named.ready()
        made = await named.generate(GenerateRequest("named", (1, 2, 3), SamplingParams(2)))
    assert made.service == named.url == "sglang+" + engine.url


async def test_an_engine_of_another_protocol_serves_and_is_updated_beside_the_others(
    registered: None, engine, folders
) -> None:
    async with ServicePool() as pool:
        pool.update([URL])
        await pool.wait_ready(1)
        made = await pool.generate(
            GenerateRequest("r", (1, 2, 3), SamplingParams(4)), record_id="r"
        )
        assert (made.output_ids, made.service) == ((4, 5, 6, 7), URL)
    async with engine_at(URL) as other, engine_at(engine.url) as local:
        weights = PublishedWeights(31, folders.first)
        for outcome in await update_services(DiskUpdater(), [other, local], weights):
            assert outcome.ok, outcome.error
        assert (await other.generate(GenerateRequest("s", (1,)))).versions[0].version == 31


async def test_what_an_engine_cannot_do_is_refused_with_its_name(registered: None) -> None:
    async with engine_at(URL) as other:
        weights = PublishedWeights(1, Path("nowhere"))
        updater = make_updater("tensor", torch.device("cpu"))
        (outcome,) = await update_services(updater, [other], weights)
        assert f"{URL} cannot be updated by --weight_update tensor" in (outcome.error or "")
        (outcome,) = await update_services(DiskUpdater(), [other], weights, "in_place")
        assert "it has disk, with retract" in (outcome.error or "") and not outcome.mixed
        with pytest.raises(RequestRejected, match="cannot give its GPU memory back"):
            await release_memory(other)


@pytest.mark.parametrize("lacking", sorted(Engine.__abstractmethods__))
def test_an_engine_without_a_required_method_cannot_be_made(lacking: str) -> None:
    has = {n: v for n, v in vars(CountingEngine).items() if n in Engine.__abstractmethods__}
    assert type("Whole", (Engine,), has)(URL).url == URL
    del has[lacking]
    with pytest.raises(TypeError, match=rf"abstract method '?{lacking}\b"):
        type("Forgetful", (Engine,), has)(URL)


def test_the_docstring_of_engine_lists_what_is_required() -> None:
    listed = (Engine.__doc__ or "").partition("Required of every")[2].partition("Required with")[0]
    names = set(re.findall(r"`(\w+)`", listed)) - {"TypeError", "limits"}
    assert names == Engine.__abstractmethods__


async def test_what_an_engine_left_out_raises_and_does_not_return_as_if_it_were_done() -> None:
    async with CountingEngine(URL) as bare:
        for method in ("pause", "continue_"):
            arguments = ("retract",) if method == "pause" else ()
            with pytest.raises(RequestRejected, match=f"{re.escape(URL)} cannot be paused"):
                await getattr(Engine, method)(bare, *arguments)
        for refused in (bare.weight_ranks(), bare.destroy_weights_update_group("g")):
            with pytest.raises(RequestRejected, match="takes"):
                await refused
