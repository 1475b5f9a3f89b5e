"""Answers in a JSON schema: of an engine that has grammars, and of one that has none."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest
from aiohttp import web
from open_session import opened
from slow_service import SlowService
from stage import Stage
from test_clients import QUESTION, anthropic_client, openai_client

from agentrl.rollout.groups.row_building import build_row

SCHEMA = {"type": "object", "properties": {"bin": {"type": "string"}}, "required": ["bin"]}
FORM: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
QUESTIONS: Any = [QUESTION]
Handle = Callable[[web.Request], Awaitable[web.StreamResponse]]


def noting(asked: list[Any], handle: Handle) -> Handle:
    async def generate(request: web.Request) -> web.StreamResponse:
        asked.append((await request.json())["sampling_params"].get("json_schema"))
        return await handle(request)

    return generate


@pytest.fixture
async def schemas(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The schemas that the service is asked for. It says what the test lets it say."""
    asked: list[Any] = []
    service = SlowService(stage.renderer, stage._say)
    monkeypatch.setattr(service, "_generate", noting(asked, service._generate))
    async with service.running():
        stage.service = service
        yield asked


async def test_an_answer_in_a_schema_is_sampled_so_and_never_trained(
    stage: Stage, schemas: list[Any]
) -> None:
    said = '{"bin": "B7"}'
    stage.lines = ["one", said, said, said, said]
    async with opened(stage) as there:
        client = openai_client(there)
        ask: dict[str, Any] = {"model": "m", "messages": QUESTIONS}
        await client.chat.completions.create(**ask)
        made = await client.chat.completions.create(**ask, response_format=FORM)
        assert made.choices[0].message.content == said
        stream = await client.chat.completions.create(**ask, response_format=FORM, stream=True)
        assert said == "".join([c.choices[0].delta.content or "" async for c in stream])
        text: Any = {"format": {"type": "json_schema", "name": "place", "schema": SCHEMA}}
        response = await client.responses.create(model="m", input=QUESTIONS, text=text)
        assert response.output_text == said
        form = {"type": "json_schema", "schema": SCHEMA}
        message = await anthropic_client(there).messages.create(
            model="m", max_tokens=99, messages=QUESTIONS,
            extra_body={"output_config": {"format": form}},
        )  # fmt: skip
        assert message.content[0].text == said
        assert schemas[0] is None and [json.loads(each) for each in schemas[1:]] == [SCHEMA] * 4
        await there.session.close()
        record = there.sampler.record.model_copy(update={"score": 1.0})
        turns = await stage.turns(record)
    assert [turn.trained for turn in turns] == [True, False, False, False, False]
    row = build_row(record, turns, 1.0, 1.0, 0)
    trained = row.tree["ids"][row.tree["mask"] == 1].tolist()
    assert trained == stage.service.outputs[0], "its logprobs are not those of the policy"


async def test_an_answer_in_a_schema_begins_anew_when_its_service_dies(
    stage: Stage, schemas: list[Any]
) -> None:
    said = '{"bin": "B7"}'
    stage.lines = [said, said]
    assert isinstance(stage.service, SlowService)
    stage.service.dies_after = 5
    async with opened(stage) as there:
        made = await openai_client(there).chat.completions.create(
            model="m", messages=QUESTIONS, response_format=FORM
        )
        assert made.choices[0].message.content == said
    assert len(schemas) == 2 and len(stage.service.prompts[0]) == made.usage.prompt_tokens  # type: ignore[union-attr]


async def test_an_engine_without_grammars_refuses_it_in_one_sentence(
    stage: Stage, schemas: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(request: web.Request) -> web.Response:
        told = {"message": "sampling_params.json_schema needs SGLang: the local engine has none"}
        return web.json_response({"error": told}, status=400)

    await stage.service.stop()
    monkeypatch.setattr(stage.service, "_generate", refuse)
    await stage.service.start()
    async with opened(stage) as there:
        with pytest.raises(openai.BadRequestError, match=r"in a JSON schema: .* needs SGLang"):
            await openai_client(there).chat.completions.create(
                model="m", messages=QUESTIONS, response_format=FORM
            )
        assert there.sampler.record.n_turns == 0 and there.sampler.outage is None
