"""A model, a tokenizer and rows small enough for any test of the trainer."""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from agentrl.databases.documents import DBRecordData
from agentrl.databases.policies import Lineage
from agentrl.databases.token_tree import Node, TokenTree
from agentrl.training.data.sequences import TrainingSequence, row_sequences

VOCABULARY = 64
LINEAGE = Lineage({version: version for version in range(20)})  # each version by the step so named


def random_model(config: PreTrainedConfig, seed: int = 3) -> PreTrainedModel:
    """A model of `config` whose norms and biases are not all alike."""
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def tiny_model(*, tied: bool = True, seed: int = 0) -> PreTrainedModel:
    """A random Qwen3 of some 20k parameters."""
    config = Qwen3Config(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=VOCABULARY,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=tied,
    )
    return random_model(config, seed)


def write_tiny_folder(folder: Path, *, tied: bool = True) -> Path:
    """The model with a tokenizer and a chat template, as `from_pretrained` loads it."""
    tiny_model(tied=tied).save_pretrained(folder)
    words = {f"w{index}": index for index in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")), unk_token="w0", eos_token="w1"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


def make_row(
    row_id: str,
    seq: int,
    nodes: Sequence[tuple[int, int, int]],
    *,
    seed: int = 0,
    reward: float = 1.0,
    version: int = 0,
    temperature: float = 1.0,
    trained_nodes: Sequence[int] | None = None,
    prompt: int = 0,
) -> DBRecordData:
    """A row with the tree `nodes` of (start, end, parent), random but for what is given.

    The last two thirds of each node are trained, or only those of `trained_nodes`. The first
    `prompt` tokens are those of every row of the same `seq`.
    """
    generator = random.Random(f"{seed}:{row_id}")
    n_tokens = nodes[-1][1]
    shared = random.Random(f"{seed}:prompt-{seq}")
    ids = [shared.randrange(2, VOCABULARY) for _ in range(prompt)]
    ids += [generator.randrange(2, VOCABULARY) for _ in range(n_tokens - prompt)]
    mask = np.zeros(n_tokens, dtype=np.uint8)
    for index, (start, end, _) in enumerate(nodes):
        if trained_nodes is None or index in trained_nodes:
            mask[start + (end - start) // 3 + 1 : end] = 1
    return DBRecordData(
        id=row_id,
        task=f"task-{seq}",
        group_order=seq,
        reward=reward,
        n_train_tokens=int(mask.sum()),
        cost=float(n_tokens),
        policy_versions=[version],
        temperature=temperature,
        tree=TokenTree(
            tuple(Node(*node) for node in nodes),
            {
                "ids": ids,
                "mask": mask,
                "advantages": generator.choice((-1.0, 0.5, 1.0)),
                "logprobs": [-generator.uniform(2.0, 6.0) for _ in range(n_tokens)],
                "versions": version,
            },
        ),
        prefix_hash="prefix",
    )


def pair_row(row_id: str, seq: int, prompt: int, chosen: int, rejected: int) -> DBRecordData:
    """A row that is a pair of answers of so many tokens to a prompt of so many."""
    answers = [(prompt, prompt + chosen, 0), (prompt + chosen, prompt + chosen + rejected, 0)]
    row = make_row(row_id, seq, [(0, prompt, -1), *answers], prompt=prompt, trained_nodes=(1, 2))
    sides = np.repeat([0.0, 1.0, -1.0], [prompt, chosen, rejected])
    return row.model_copy(update={"tree": row.tree.with_columns(advantages=sides)})


def sequences_of(row: DBRecordData, step: int = 0) -> list[TrainingSequence]:
    """The row's sequences for weights of `step`."""
    return row_sequences(row, LINEAGE, step)


def linear_rows(count: int, *, version: int = 0) -> list[DBRecordData]:
    """Rows of one node each, of different lengths."""
    generator = random.Random(7)
    return [
        make_row(
            f"row-{index:03d}",
            index,
            [(0, generator.randrange(8, 40), -1)],
            reward=float(index % 2),
            version=version,
        )
        for index in range(count)
    ]
