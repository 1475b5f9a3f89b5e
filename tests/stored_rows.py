"""Compares a run's stored rows with what others say: its turns, transformers, the chat template.

Of AgentRL only the layout of stored arrays is used.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pymongo.database import Database
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.databases.arrays import unpack_floats, unpack_ints, unpack_mask

Documents = Database[dict[str, Any]]


def turns_of(database: Documents, record_id: str) -> list[dict[str, Any]]:
    return list(
        database["dispatched_sampling_tasks"].find({"record_id": record_id}).sort("turn", 1)
    )


def assert_rows_are_their_turns(database: Documents) -> int:
    """Ids, masks and logprobs of a row are those of its record's turns, to the bit; returns the
    number of rows. None of their records has a second segment.
    """
    checked = 0
    for row in database["record_data"].find():
        ids: list[int] = []
        mask: list[int] = []
        logprobs: list[float] = []
        for turn in turns_of(database, row["_id"]):
            assert turn["segment"] == 0
            delta, output = unpack_ints(turn["prompt_delta_ids"]), unpack_ints(turn["output_ids"])
            ids += [*delta.tolist(), *output.tolist()]
            mask += [0] * len(delta) + [1] * len(output)
            logprobs += [0.0] * len(delta) + unpack_floats(turn["output_logprobs"]).tolist()
        assert unpack_ints(row["input_ids"]).tolist() == ids
        assert unpack_mask(row["loss_mask"]).tolist() == mask
        assert unpack_floats(row["logprobs"]).tolist() == logprobs
        checked += 1
    return checked


def assert_logprobs_are_the_models(database: Documents, model: Path) -> int:
    """The logprobs of rows that the start model sampled are those that transformers computes;
    returns the number of their tokens.
    """
    known = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokens = 0
    for row in database["record_data"].find({"policy_versions": [0]}):
        ids = torch.from_numpy(unpack_ints(row["input_ids"]).astype(np.int64))
        with torch.inference_mode():
            logprobs = known(ids[None]).logits[0, :-1].log_softmax(-1)
        computed = logprobs.gather(1, ids[1:, None])[:, 0].numpy()
        trained = unpack_mask(row["loss_mask"])[1:].astype(bool)
        np.testing.assert_allclose(
            unpack_floats(row["logprobs"])[1:][trained], computed[trained], atol=1e-4
        )
        tokens += int(trained.sum())
    return tokens


def assert_rows_are_their_conversations(database: Documents, model: Path) -> int:
    """A row reads as the model's chat template writes the conversation with the program; returns
    the number of rows.
    """
    tokenizer = AutoTokenizer.from_pretrained(model)
    checked = 0
    for row in database["record_data"].find():
        messages: list[dict[str, Any]] = []
        for turn in turns_of(database, row["_id"]):
            said = turn["output_text"].removesuffix(tokenizer.eos_token)
            messages += [*turn["messages"], {"role": "assistant", "content": said}]
        record = database["records"].find_one({"_id": row["_id"]})
        assert record is not None
        listed = database["tool_lists"].find_one({"_id": record.get("tool_list")}) or {}
        written = tokenizer.apply_chat_template(
            messages, tools=json.loads(listed.get("schemas", "null")), tokenize=False
        )
        written = written.rstrip("\n")
        if turn["finish_reason"] == "length":  # the last turn was cut before its end
            written = written.removesuffix(tokenizer.eos_token)
        assert tokenizer.decode(unpack_ints(row["input_ids"]).tolist()) == written
        checked += 1
    return checked
