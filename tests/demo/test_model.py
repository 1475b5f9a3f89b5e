"""The committed model folder: small, complete, and able to do what RL is to make it choose."""

import json
import re
from pathlib import Path

import pytest
import torch
from demo_tokenizer import END, TOOLS, tokenise
from demonstrations import demonstrate
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3ForCausalLM,
)

MAX_BYTES = 8 * 1024**2


@pytest.fixture(scope="module")
def model(demo_dir: Path) -> PreTrainedModel:
    loaded = AutoModelForCausalLM.from_pretrained(demo_dir / "model")
    assert isinstance(loaded, Qwen3ForCausalLM)
    return loaded.eval()


@pytest.fixture(scope="module")
def tokenizer(demo_dir: Path) -> PreTrainedTokenizerFast:
    loaded = AutoTokenizer.from_pretrained(demo_dir / "model")
    assert isinstance(loaded, PreTrainedTokenizerFast)
    return loaded


def test_the_folder_is_small_enough_for_a_repository(demo_dir: Path) -> None:
    sizes = [path.stat().st_size for path in (demo_dir / "model").rglob("*") if path.is_file()]
    assert 0 < sum(sizes) <= MAX_BYTES


def test_the_model_is_a_small_float32_qwen3_that_stops_at_the_end_of_a_turn(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    end = tokenizer.convert_tokens_to_ids(END)
    assert 300_000 <= model.num_parameters() <= 3_000_000
    assert model.dtype == torch.float32
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config is not None
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == end
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id != end


@torch.no_grad()
def test_the_first_call_names_what_the_question_names(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    heldout_tasks: list[dict[str, str]],
) -> None:
    tasks = heldout_tasks[:32]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": task["query"]}],
            tools=TOOLS,
            tokenize=False,
            add_generation_prompt=True,
        )
        for task in tasks
    ]
    inputs = tokenizer(prompts, padding=True, return_tensors="pt", add_special_tokens=False)
    output = model.generate(**inputs, do_sample=False, max_new_tokens=24)
    texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :])
    named = 0
    for task, text in zip(tasks, texts, strict=True):
        calls = re.findall(r"<tool_call>\n(.*?)\n</tool_call>", text)
        arguments = [json.loads(call)["arguments"] for call in calls]
        asked = re.findall(r'"(\w+)"|\b([A-Z]\d)\b', task["query"])
        subjects = [item or bin_name for item, bin_name in asked]
        named += bool(arguments) and [*arguments[0].values()] == subjects[:1]
    assert named >= 30


@torch.no_grad()
def test_every_step_of_the_right_way_is_within_reach_but_a_lazy_one_is_as_likely(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Probability of the right way for unseen warehouses, token by token: RL has work, and can."""
    right_ways, lowest = [], []
    for number in range(24):
        token_ids, loss_mask = tokenise(
            tokenizer, demonstrate(7, f"unseen-{number}", right=1.0, lazy=0.0)
        )
        logits = model(input_ids=torch.tensor([token_ids])).logits[0, :-1]
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0]
        generated = logprobs[torch.tensor(loss_mask[1:], dtype=torch.bool)]
        right_ways.append(generated.sum().exp().item())
        lowest.append(generated.min().exp().item())
    assert 0.2 <= sum(right_ways) / len(right_ways) <= 0.6
    assert min(lowest) > 0.05
