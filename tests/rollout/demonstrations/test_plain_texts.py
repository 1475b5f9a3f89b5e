"""Texts without a chat template have the tokens and the mask that TRL's trainers give them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from families import tokenizer_of

from agentrl.databases.pair_tree import pair_tree
from agentrl.databases.token_tree import TokenTree
from agentrl.rollout.demonstrations import read_demonstration
from agentrl.rollout.demonstrations.layouts import PlainText
from agentrl.rollout.demonstrations.preferences import read_preference
from agentrl.rollout.demonstrations.tokens import plain_trees

FAMILIES = ["mistral", "gemma3", "qwen2.5", "llama3.1"]
COMPLETIONS = [
    {"prompt": "2+2=", "completion": "4"},
    {"prompt": "2+2= ", "completion": "4"},
    {"prompt": "2+2=", "completion": " 4"},
    {"prompt": "How many parts are in bin ", "completion": "R5?\n46"},
    {"prompt": "Answer: th", "completion": "e stock of bin R5"},
]  # fmt: skip
PAIRS = [
    {"prompt": "Human: well?\n\nAssistant: ", "chosen": "I'm fine", "rejected": "I won't"},
    {"prompt": "Assistant: th", "chosen": "e stock", "rejected": "73"},
    {"chosen": "Human: hi\n\nAssistant: I'm fine", "rejected": "Human: hi\n\nAssistant: No"},
    {"chosen": "Human: hi\n\nAssistant: I'm fine", "rejected": "Human: hi\n\nAssistant: I won't"},
    {"chosen": "the stock", "rejected": "the bin"},
]  # fmt: skip


def made_by_trl(trainer: str, family: str, row: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """The row as a trainer of TRL's prepares it."""
    import trl  # takes seconds, which every worker would spend to collect this module
    from datasets import Dataset

    tokenizer = tokenizer_of(family)
    # What the methods read of their trainer, which would load a model.
    holder = SimpleNamespace(_tokenizer=tokenizer, chat_template=None, completion_only_loss=True)
    options = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "max_length": None}
    given = Dataset.from_list([row])
    if trainer == "sft":
        prepare, config = trl.SFTTrainer._prepare_dataset, trl.SFTConfig(**options)
        made = prepare(holder, given, tokenizer, config, False, None, "train")
    else:
        prepare, config = trl.DPOTrainer._prepare_dataset, trl.DPOConfig(**options)
        made = prepare(holder, given, tokenizer, config, "train")
    return dict(made[0])


def tree_of(family: str, row: dict[str, str], remarks: list[str]) -> TokenTree:
    shown = read_demonstration(row)
    assert isinstance(shown, PlainText)
    [tree] = plain_trees(tokenizer_of(family), [shown], remarks.append)
    return tree


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("row", COMPLETIONS)
def test_a_completion_has_trls_tokens_and_mask(
    family: str, row: dict[str, str], tmp_path: Path
) -> None:
    remarks: list[str] = []
    tree = tree_of(family, row, remarks)
    theirs = made_by_trl("sft", family, row, tmp_path)
    assert tree["ids"].tolist() == theirs["input_ids"]
    mask = [int(label != -100) for label in theirs["labels"]]
    assert tree["mask"].tolist() == mask
    # What of the prompt is trained is told.
    alone = tokenizer_of(family)(row["prompt"])["input_ids"]
    assert len(remarks) == int(mask.index(1) < len(alone))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("row", PAIRS)
def test_a_pair_has_trls_prompt_and_answers(
    family: str, row: dict[str, str], tmp_path: Path
) -> None:
    texts = [shown for shown in read_preference(row) if isinstance(shown, PlainText)]
    tree = pair_tree(*plain_trees(tokenizer_of(family), texts))
    theirs = made_by_trl("dpo", family, row, tmp_path)
    prompt, signs = tree["ids"][tree["advantages"] == 0], tree["advantages"]
    assert prompt.tolist() == theirs["prompt_ids"]
    for name, sign in (("chosen", 1.0), ("rejected", -1.0)):
        assert tree["ids"][signs == sign].tolist() == theirs[f"{name}_ids"]
    assert np.array_equal(tree["mask"] == 1, signs != 0)


def test_no_space_is_trained_that_the_text_has_not() -> None:
    tokenizer = tokenizer_of("mistral")
    tree = tree_of("mistral", {"prompt": "2+2=", "completion": "4"}, [])
    assert tokenizer.decode(tree["ids"][tree["mask"] == 1]) == "4</s>"
    assert "▁" not in tokenizer.convert_ids_to_tokens(tree["ids"][tree["mask"] == 1].tolist())
