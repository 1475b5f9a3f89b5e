"""The engine's HTTP answers, field by field, as SGLang gives them."""

import asyncio
import base64
import json
import os
import pickle
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from tokenizers import pre_tokenizers

EOS = 257
PROMPT = list(range(40, 60))


@pytest.fixture
async def http(engine) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(base_url=engine.url) as session:
        yield session


async def post(http: aiohttp.ClientSession, path: str, body: object) -> tuple[int, Any]:
    async with http.post(path, json=body) as response:
        content = await response.text()
        is_json = response.content_type == "application/json"
        return response.status, await response.json() if is_json else content


async def generate(http: aiohttp.ClientSession, **body: Any) -> Any:
    status, answer = await post(http, "/generate", {"input_ids": PROMPT} | body)
    assert status == 200, answer
    return answer


async def until_running(http: aiohttp.ClientSession, tokens: int) -> None:
    while True:
        async with http.get("/v1/loads") as response:
            (load,) = (await response.json())["loads"]
        if load["num_used_tokens"] >= tokens:
            return
        await asyncio.sleep(0.005)


def long(http: aiohttp.ClientSession, rid: str) -> "asyncio.Task[Any]":
    params = {"max_new_tokens": 900, "ignore_eos": True}
    return asyncio.create_task(generate(http, rid=rid, sampling_params=params))


async def test_an_answer_has_the_fields_of_sglang(http) -> None:
    params = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
    answer = await generate(http, rid="mine", sampling_params=params, return_logprob=True)
    meta = answer["meta_info"]
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "length", "length": 4}
    assert meta["prompt_tokens"] == 20 and meta["completion_tokens"] == 4
    assert [entry[1:] for entry in meta["output_token_logprobs"]] == [
        [token, None] for token in answer["output_ids"]
    ]
    assert meta["output_token_logprobs_length"] == 4 and meta["input_token_logprobs"] == []
    version = meta["weight_version"]
    assert meta["weight_versions"] == [{"version": version, "start": 0, "end": 4}]
    assert meta["num_retractions"] == 0 and meta["e2e_latency"] > 0
    assert answer["text"] == bytes_text(answer["output_ids"])
    without = await generate(http, sampling_params=params)
    assert without["output_ids"] == answer["output_ids"]
    assert "output_token_logprobs" not in without["meta_info"]


def bytes_text(ids: list[int]) -> str:
    """What the test tokenizer's ids say; ids that are no bytes are special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    values = {c: i for i, c in enumerate(byte_characters())}
    return bytes(values[alphabet[i]] for i in ids if i < 256).decode(errors="replace")


def byte_characters() -> list[str]:
    """The character that stands for each byte in byte-level tokenizers (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


async def test_output_ids_keep_the_stop_token_and_the_text_does_not(http) -> None:
    params = {"max_new_tokens": 30, "temperature": 0, "ignore_eos": True}
    plain = await generate(http, sampling_params=params)
    stop = plain["output_ids"][6]
    first = plain["output_ids"].index(stop)
    params = {"max_new_tokens": 30, "temperature": 0, "stop_token_ids": [stop]}
    answer = await generate(http, sampling_params=params)
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert answer["output_ids"] == plain["output_ids"][: first + 1]
    assert answer["text"] == bytes_text(plain["output_ids"][:first])
    kept = await generate(http, sampling_params=params | {"no_stop_trim": True})
    assert kept["text"] == bytes_text(plain["output_ids"][: first + 1])


async def test_a_stop_string_ends_and_trims_the_text(http) -> None:
    params = {"max_new_tokens": 60, "temperature": 0, "ignore_eos": True}
    plain = await generate(http, sampling_params=params)
    ascii_pairs = [
        plain["text"][i : i + 2] for i in range(len(plain["text"]) - 2)
        if plain["text"][i : i + 2].isascii() and plain["text"][i : i + 2].isprintable()
    ]  # fmt: skip
    stop = ascii_pairs[-1]
    answer = await generate(http, sampling_params=params | {"stop": stop})
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    assert answer["text"] == plain["text"][: plain["text"].index(stop)]
    assert len(answer["output_ids"]) < 60


async def test_the_end_of_sequence_token_stops_unless_it_is_ignored(http) -> None:
    # A bias would be SGLang's way to force it; here the prompt is tried until it comes by itself.
    params = {"max_new_tokens": 200, "temperature": 3.0}
    for seed in range(40):
        answer = await generate(http, sampling_params=params | {"sampling_seed": seed})
        if answer["meta_info"]["finish_reason"]["type"] == "stop":
            break
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}
    assert answer["output_ids"].index(EOS) == len(answer["output_ids"]) - 1
    ignoring = params | {"sampling_seed": seed, "ignore_eos": True}
    longer = await generate(http, sampling_params=ignoring)
    count = len(answer["output_ids"])
    assert longer["output_ids"][:count] == answer["output_ids"]
    assert len(longer["output_ids"]) == 200


async def test_batches_text_prompts_and_several_samples_answer_lists(http) -> None:
    params = {"max_new_tokens": 3, "ignore_eos": True}
    batch = await generate(http, input_ids=[PROMPT, PROMPT[:5]], sampling_params=params)
    assert [a["meta_info"]["prompt_tokens"] for a in batch] == [20, 5]
    both = await generate(
        http, input_ids=[PROMPT, PROMPT], sampling_params=[params, {"max_new_tokens": 5}]
    )
    assert both[0]["meta_info"]["completion_tokens"] == 3
    many = await generate(http, rid="given", sampling_params=params | {"n": 3})
    assert len({a["meta_info"]["id"] for a in many} - {"given"}) == 3
    body = {"text": "hello", "sampling_params": params}
    status, said = await post(http, "/generate", body)
    assert status == 200 and said["meta_info"]["prompt_tokens"] == 5
    async with http.put("/generate", json=body) as response:
        assert response.status == 200


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"sampling_params": {"temprature": 1}}, "temprature"),
        ({"sampling_params": {"top_k": "many"}}, "top_k"),
        ({"input_ids": "abc"}, "input_ids"),
        ({"text": "both"}, "not both"),
    ],
)
async def test_a_body_that_breaks_the_contract_answers_an_error_string(http, body, message) -> None:
    status, answer = await post(http, "/generate", {"input_ids": PROMPT} | body)
    assert status == 400 and message in answer["error"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {"input_ids": [1] * 2000},
            "The input (2000 tokens) is longer than the model's context length (1024 tokens).",
        ),
        ({"sampling_params": {"max_new_tokens": 1020}}, "Requested token count exceeds"),
        ({"input_ids": [1, 264]}, "264"),
        ({"input_ids": [-1]}, "-1"),
        ({"sampling_params": {"top_p": 2}}, "top_p"),
        ({"sampling_params": {"regex": "a"}}, "needs SGLang"),
        ({"stream": True, "input_ids": [[1], [2]]}, "needs SGLang"),
        ({"sampling_params": {"n": 3_000_000}}, "asks for 3000000 generations"),
        ({"input_ids": [[1]] * 5000}, "asks for 5000 generations"),
        ({"input_ids": [[1], [2]], "sampling_params": {"n": 4000}}, "generations"),
        ({"input_ids": None, "text": "a" * 10**7}, "longer than the model's context"),
        ({"sampling_params": {"temperature": 1e300}}, "temperature"),
        ({"sampling_params": {"repetition_penalty": 1e-45}}, "repetition_penalty"),
        ({"sampling_params": {"min_new_tokens": 129}}, "max_new_tokens(128)"),
        (
            {"sampling_params": {"min_new_tokens": 1, "stop_token_ids": list(range(264))}},
            "Every token ends",
        ),
    ],
)
async def test_a_request_that_cannot_be_served_answers_an_error_object(http, body, message) -> None:
    status, answer = await post(http, "/generate", {"input_ids": PROMPT} | body)
    assert status == 400 and message in answer["error"]["message"]


@pytest.mark.parametrize(
    "params",
    [
        {"presence_penalty": 0.5, "frequency_penalty": -2},
        {"repetition_penalty": 0.01, "temperature": 1e4},
        {"top_k": 2**63},
        {"min_new_tokens": 8, "stop_token_ids": [-1, 10**8, 2**62]},
        {"min_new_tokens": 8, "stop_token_ids": list(range(263))},
    ],
    ids=["presence", "repetition", "top_k", "no_such_stop", "almost_all_stop"],
)
async def test_the_widest_values_are_served(http, params: dict[str, Any]) -> None:
    answer = await generate(http, sampling_params=params | {"max_new_tokens": 8})
    assert len(answer["output_ids"]) == 8


async def test_no_token_is_made_where_none_is_asked_for(http) -> None:
    params = {"max_new_tokens": 0}
    answer = await generate(http, sampling_params=params, return_logprob=True)
    assert answer["output_ids"] == [] and answer["text"] == ""
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert answer["meta_info"]["weight_versions"] == []
    (only,) = await events(http, sampling_params=params)
    assert only["output_ids"] == []


async def test_a_request_that_is_aborted_before_it_ran_is_answered(http) -> None:
    await post(http, "/pause_generation", {"mode": "in_place"})
    waiting = long(http, "waiting")
    while True:
        async with http.get("/v1/loads") as response:
            if (await response.json())["loads"][0]["num_waiting_reqs"]:
                break
    await post(http, "/abort_request", {"rid": "waiting"})
    answer = await waiting
    await post(http, "/continue_generation", {})
    assert answer["output_ids"] == []
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"


async def test_unknown_top_level_fields_are_ignored(http) -> None:
    assert (await generate(http, no_such_field=1))["output_ids"]


async def test_a_rid_in_use_is_refused_and_the_first_request_goes_on(http) -> None:
    first = long(http, "twice")
    await until_running(http, 25)
    status, answer = await post(http, "/generate", {"input_ids": PROMPT, "rid": "twice"})
    assert status == 400
    assert answer["error"]["message"] == "Duplicate request ID detected: twice"
    async with http.post("/abort_request", json={"rid": "twice"}) as response:
        assert response.status == 200 and await response.read() == b""
    assert (await first)["meta_info"]["finish_reason"]["type"] == "abort"


async def test_pause_abort_ends_what_runs_and_holds_what_comes(http) -> None:
    running = long(http, "ends")
    await until_running(http, 30)
    status, answer = await post(http, "/pause_generation", {})
    assert (status, answer["message"]) == (200, "Generation paused successfully.")
    ended = await running
    assert ended["meta_info"]["finish_reason"] == {
        "type": "abort", "message": "Aborted", "status_code": None, "err_type": None
    }  # fmt: skip
    assert len(ended["output_ids"]) >= 10
    held = asyncio.create_task(generate(http, sampling_params={"max_new_tokens": 2}))
    await asyncio.sleep(0.2)
    assert not held.done()
    await post(http, "/continue_generation", {})
    assert (await held)["output_ids"]


async def test_pause_in_place_freezes_and_refuses_to_flush(http) -> None:
    running = long(http, "frozen")
    await until_running(http, 30)
    await post(http, "/pause_generation", {"mode": "in_place"})
    assert await post(http, "/flush_cache", {}) == (400, "Flush cache failed.\n")
    await post(http, "/continue_generation", {})
    answer = await running
    assert len(answer["output_ids"]) == 900 and answer["meta_info"]["num_retractions"] == 0
    status, text = await post(http, "/flush_cache", {})
    assert status == 200 and text.startswith("Cache flushed.\n")


async def test_an_update_without_pause_waits_for_what_runs_and_holds_what_comes(
    http, folders
) -> None:
    running = long(http, "before-update")
    await until_running(http, 30)
    body = {"model_path": str(folders.second), "weight_version": "77"}
    update = asyncio.create_task(post(http, "/update_weights_from_disk", body))
    await asyncio.sleep(0.1)
    assert not running.done() and not update.done()
    later = asyncio.create_task(generate(http, sampling_params={"max_new_tokens": 3}))
    status, answer = await update
    assert (status, answer["success"]) == (200, True)
    assert answer["message"] == ("Succeeded to update model weights. Weight version updated to 77.")
    assert [s["version"] for s in (await running)["meta_info"]["weight_versions"]] != ["77"]
    assert (await later)["meta_info"]["weight_version"] == "77"
    async with http.get("/model_info") as response:
        info = await response.json()
    assert info["weight_version"] == "77" and info["model_path"] == str(folders.second)


async def test_an_unflushed_update_answers_400_although_the_weights_have_changed(
    http, folders
) -> None:
    running = long(http, "in-place-update")
    await until_running(http, 30)
    await post(http, "/pause_generation", {"mode": "in_place"})
    body = {"model_path": str(folders.first), "weight_version": "78"}
    status, answer = await post(http, "/update_weights_from_disk", body)
    await post(http, "/continue_generation", {})
    assert status == 400 and not answer["success"]
    assert answer["message"].startswith("Weights were updated, but the cache was not flushed")
    spans = (await running)["meta_info"]["weight_versions"]
    assert spans[-1]["version"] == "78" and spans[0]["end"] == spans[1]["start"]


@pytest.mark.parametrize("path", ["/continue_generation", "/pause_generation", "/abort_request"])
async def test_control_requests_need_a_json_object(http, path: str) -> None:
    async with http.post(path) as response:
        answer = await response.json()
    assert response.status == 400
    assert (answer["object"], answer["code"]) == ("error", 400)


async def test_a_client_that_hangs_up_ends_its_generation(http) -> None:
    running = long(http, "gone")
    await until_running(http, 30)
    running.cancel()
    began = time.monotonic()
    while True:
        async with http.get("/v1/loads") as response:
            (load,) = (await response.json())["loads"]
        if load["num_running_reqs"] == 0:
            break
        assert time.monotonic() - began < 5
        await asyncio.sleep(0.01)


async def test_sigterm_answers_running_requests_and_ends_with_status_zero(start_engine) -> None:
    engine = start_engine()
    async with aiohttp.ClientSession(base_url=engine.url) as http:
        running = long(http, "last")
        await until_running(http, 30)
        engine.process.terminate()
        answer = await running
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert engine.process.wait(timeout=10) == 0


async def events(http: aiohttp.ClientSession, **body: Any) -> list[Any]:
    """The events of a stream, but for the `[DONE]` that must be the last."""
    async with http.post("/generate", json={"input_ids": PROMPT, "stream": True} | body) as answer:
        assert answer.status == 200 and answer.content_type == "text/event-stream"
        *said, done, nothing = (await answer.text()).split("\n\n")
    assert (done, nothing) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in said]


async def test_a_stream_repeats_the_output_so_far_and_ends_with_all_that_is_known(http) -> None:
    params = {"max_new_tokens": 40, "temperature": 0, "ignore_eos": True, "stream_interval": 16}
    whole = await generate(http, sampling_params=params, return_logprob=True)
    *chunks, last = await events(http, sampling_params=params, return_logprob=True)
    # The first token at once, then whenever as many as the interval are new.
    assert [len(chunk["output_ids"]) for chunk in chunks] == [1, 17, 33]
    for chunk in chunks:
        meta = chunk["meta_info"]
        assert chunk["output_ids"] == whole["output_ids"][: meta["completion_tokens"]]
        assert len(meta["output_token_logprobs"]) == meta["completion_tokens"]
        assert meta["finish_reason"] is None and "weight_versions" not in meta
        assert meta["weight_version"] == whole["meta_info"]["weight_version"]
    assert last["output_ids"] == whole["output_ids"] and last["text"] == whole["text"]
    for field in ("finish_reason", "weight_versions", "completion_tokens"):
        assert last["meta_info"][field] == whole["meta_info"][field]


async def test_an_aborted_stream_ends_with_the_tokens_it_has(http) -> None:
    params = {"max_new_tokens": 900, "ignore_eos": True, "stream_interval": 1000}
    running = asyncio.create_task(events(http, rid="streamed", sampling_params=params))
    await until_running(http, 60)
    await post(http, "/abort_request", {"rid": "streamed"})
    last = (await running)[-1]
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(last["output_ids"]) >= 30


async def test_a_reader_that_leaves_its_stream_ends_the_generation(http) -> None:
    params = {"max_new_tokens": 900, "ignore_eos": True}
    body = {"input_ids": PROMPT, "stream": True, "sampling_params": params}
    async with http.post("/generate", json=body) as answer:
        await answer.content.readany()
    async with asyncio.timeout(10):
        while True:
            async with http.get("/v1/loads") as response:
                (load,) = (await response.json())["loads"]
            if load["num_running_reqs"] == 0:
                break
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/update_weights_from_tensor", {"serialized_named_tensors": ["x"]}),
        ("/update_weights_from_distributed", {"names": [], "dtypes": [], "shapes": []}),
        ("/end_weight_update", {}),
    ],
)
async def test_weights_from_memory_are_only_taken_within_a_session(http, path, body) -> None:
    status, answer = await post(http, path, body)
    assert status == 400 and "begin_weight_update()" in answer["message"]


async def test_a_session_is_open_once(http) -> None:
    assert (await post(http, "/begin_weight_update", {}))[0] == 200
    status, answer = await post(http, "/begin_weight_update", {})
    assert status == 400 and "already open" in answer["message"]
    assert (await post(http, "/end_weight_update", {}))[0] == 200


async def test_a_pickle_that_is_more_than_tensors_is_refused(http) -> None:
    evil = base64.b64encode(pickle.dumps([("w", os.system)])).decode()
    await post(http, "/begin_weight_update", {})
    status, answer = await post(
        http, "/update_weights_from_tensor", {"serialized_named_tensors": [evil]}
    )
    await post(http, "/end_weight_update", {})
    assert status == 400 and "is no part of tensors" in answer["message"]


async def test_a_group_that_was_never_met_sends_nothing(http) -> None:
    await post(http, "/begin_weight_update", {})
    body = {"names": ["w"], "dtypes": ["float32"], "shapes": [[1]], "group_name": "nobody"}
    status, answer = await post(http, "/update_weights_from_distributed", body)
    await post(http, "/end_weight_update", {})
    assert status == 400 and "Group nobody not in" in answer["message"]
    status, answer = await post(http, "/destroy_weights_update_group", {"group_name": "nobody"})
    assert status == 400 and "does not exist" in answer["message"]


async def test_readers_that_hang_up_in_the_middle_of_a_write_leave_no_traceback(
    start_engine, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = start_engine()
    params = {"max_new_tokens": 900, "ignore_eos": True, "stream_interval": 1}
    body = {"input_ids": PROMPT, "stream": True, "sampling_params": params}
    for _ in range(3):
        async with aiohttp.ClientSession(base_url=engine.url) as http:
            streams = await asyncio.gather(*(http.post("/generate", json=body) for _ in range(16)))
            await asyncio.gather(*(stream.content.readany() for stream in streams))
            for stream in streams:
                assert stream.connection is not None and stream.connection.transport is not None
                stream.connection.transport.abort()  # a reset: as from a sampler that is killed
    engine.process.terminate()
    assert engine.process.wait(timeout=10) == 0
    assert "Traceback" not in capfd.readouterr().err
