"""What SGLang's API promises beyond what any engine does: its limits, refusals and sessions."""

import json

import pytest
from conformance import PROMPT, ask
from tokenizers import Tokenizer

from agentrl.inference.client import SGLangClient
from agentrl.inference.protocol import PromptTooLong, RequestRejected

VOCABULARY, CONTEXT = 406, 1024


async def test_the_context_is_filled_to_its_last_place(engine) -> None:
    made = await engine.generate(ask(PROMPT, 5000))
    assert made.finish_reason == "length"
    assert len(made.output_ids) == CONTEXT - 2 - len(PROMPT)
    brim = (40,) * (CONTEXT - 7)
    made = await engine.generate(ask(brim, 9))
    assert len(made.output_ids) == 5


async def test_what_would_kill_the_server_or_be_refused_is_never_sent(engine) -> None:
    for prompt, message in [
        ((1, VOCABULARY), "vocabulary is 406"),
        ((1, -1), "vocabulary is 406"),
        ((), "empty"),
        ((40,) * (CONTEXT - 6), "leaves no room"),
    ]:
        with pytest.raises(RequestRejected, match=message) as refused:
            await engine.generate(ask(prompt, 4))
        assert refused.value.status is None
    assert (await engine.generate(ask(PROMPT, 3))).finish_reason == "length"


async def test_a_context_that_was_not_known_is_learned_from_the_refusal(
    service, engine_name: str
) -> None:
    async with SGLangClient(service.url) as engine:
        with pytest.raises(PromptTooLong, match="leaves no room"):
            await engine.generate(ask((1,) * 2000, 4))
        assert engine.limits.context_length == CONTEXT
    async with SGLangClient(service.url) as engine:
        # The prompt fits, and leaves less than is asked for.
        made = await engine.generate(ask(PROMPT, 5000))
        assert made.finish_reason == "length"
        assert len(made.output_ids) == CONTEXT - 2 - len(PROMPT)
    if engine_name == "sglang":
        # It fits into the context and is refused all the same, in a stream with a made-up token.
        async with SGLangClient(service.url) as engine:
            with pytest.raises(PromptTooLong, match="leaves no room"):
                await engine.generate(ask((40,) * (CONTEXT - 4), 2))


async def test_the_service_s_own_refusal_is_an_error_with_its_message(service) -> None:
    async with SGLangClient(service.url) as engine:  # it has not learned the limits
        with pytest.raises(RequestRejected, match="temperature"):
            await engine.generate(ask(PROMPT, 4, temperature=-1))


async def test_tensors_are_refused_outside_a_session_which_a_second_begin_reopens(engine) -> None:
    with pytest.raises(RequestRejected, match="must run between begin_weight_update"):
        await engine.update_weights_from_tensor(["AAAA"], version=1, flush_cache=False)
    with pytest.raises(RequestRejected, match="must run between begin_weight_update"):
        await engine.update_weights_from_distributed({}, group="g", version=1, flush_cache=False)
    await engine.begin_weight_update()
    await engine.begin_weight_update()
    await engine.end_weight_update()


async def test_an_answer_is_in_a_schema_or_the_schema_is_refused_in_one_sentence(
    engine, engine_name: str, folders
) -> None:
    places = {"type": "string", "enum": ["B7", "K2"]}
    schema = {
        "type": "object", "properties": {"bin": places, "n": {"type": "integer", "maximum": 9}},
        "required": ["bin", "n"], "additionalProperties": False,
    }  # fmt: skip
    request = ask(PROMPT, 60, json_schema=json.dumps(schema), ignore_eos=False)
    if engine_name == "local":
        with pytest.raises(RequestRejected, match="json_schema needs SGLang"):
            await engine.generate(request)
        return
    made = await engine.generate(request)
    tokenizer = Tokenizer.from_file(str(folders.first / "tokenizer.json"))
    said = json.loads(tokenizer.decode(list(made.output_ids), skip_special_tokens=True))
    assert said.keys() == {"bin", "n"} and said["bin"] in places["enum"] and said["n"] <= 9
    assert made.finish_reason == "stop"
