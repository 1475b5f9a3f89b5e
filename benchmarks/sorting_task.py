"""A small verifiable task, and a start model that solves less than half of it: for `staleness.py`.

A prompt names a direction and some digits; the answer is the digits in that order. As the demo's
(`assets/demo/demonstrations.py`), the start model is warmed up on demonstrations of which most are
wrong, so that it knows the steps and its habits are what reinforcement learning has to repair.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Literal

import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from agentrl import OptimizerConfig, SupervisedRow, train_supervised

PAD, END, UP, DOWN, EQUALS, ZERO = range(6)  # ids; the ten digits follow from ZERO
VOCAB = ZERO + 10
DIGITS = 4  # of a prompt
ANSWER_TOKENS = DIGITS + 1  # with the end
PROMPT_TOKENS = DIGITS + 2
HELD_OUT = 128  # prompts

RIGHT = 0.45  # of the demonstrations
LAZY = 0.5  # of the others: the digits as they came
DEMONSTRATIONS = 32_000
WARM_UP_STEPS, WARM_UP_ROWS = 500, 64
WARM_UP_RATE = 3e-3

Habit = Literal["right", "unsorted", "other_direction"]
Prompt = tuple[int, ...]


def prompts(seed: str) -> Iterator[Prompt]:
    """Random prompts without end: direction, digits, equals sign, as ids."""
    rng = Random(seed)
    while True:
        digits = [ZERO + rng.randrange(10) for _ in range(DIGITS)]
        yield (rng.choice((UP, DOWN)), *digits, EQUALS)


def held_out() -> list[Prompt]:
    """The prompts of evaluations."""
    drawn = prompts("held out")
    return [next(drawn) for _ in range(HELD_OUT)]


def training_prompts(seed: str) -> Iterator[Prompt]:
    """Random prompts that are not held out."""
    kept_out = set(held_out())
    return (prompt for prompt in prompts(seed) if prompt not in kept_out)


def answer(prompt: Prompt, habit: Habit = "right") -> list[int]:
    """The answer as ids, with its end."""
    direction, digits = prompt[0], list(prompt[1:-1])
    if habit != "unsorted":
        digits.sort(reverse=(direction == DOWN) != (habit == "other_direction"))
    return [*digits, END]


def score(prompt: Prompt, completion: list[int]) -> float:
    """1 for the right answer and nothing else, else 0."""
    return float(completion == answer(prompt))


def make_start_model(folder: Path, steps: int = WARM_UP_STEPS) -> str:
    """Write the start model, 0.1 million parameters. Returns the SHA-256 of its weights.

    It takes ten seconds on one thread, and gives the same weights on the same machine.
    """
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=64,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            tie_word_embeddings=True,
            initializer_range=0.08,  # as the demo's model
            bos_token_id=None,
            eos_token_id=END,
            pad_token_id=PAD,
        )
    )
    model.generation_config = GenerationConfig(eos_token_id=END, pad_token_id=PAD)
    train_supervised(
        model,
        list(_demonstrations()),
        steps=steps,
        rows_per_step=WARM_UP_ROWS,
        optimizer=OptimizerConfig(
            learning_rate=WARM_UP_RATE, lr_scheduler_type="cosine", warmup_steps=30
        ),
    )
    model.save_pretrained(folder)
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def _demonstrations() -> Iterator[SupervisedRow]:
    rng = Random("habits")
    drawn = training_prompts("warm-up")
    for _ in range(DEMONSTRATIONS):
        prompt, habit = next(drawn), _habit(rng)
        said = answer(prompt, habit)
        yield SupervisedRow([*prompt, *said], [0] * len(prompt) + [1] * len(said))


def _habit(rng: Random) -> Habit:
    if rng.random() < RIGHT:
        return "right"
    return "unsorted" if rng.random() < LAZY else "other_direction"
