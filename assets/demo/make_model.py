"""Makes the demo's model: a small Qwen3 that can use the tools but mostly is too lazy to.

    python assets/demo/make_model.py            # minutes on one core; writes assets/demo/model/

Tokenizer and weights are made from nothing and warmed up on demonstrations of which most are
lazy (`demonstrations.py`), so that the model copies names and numbers reliably and yet fails
more tasks than it solves. Their warehouses are of another world than the tasks'.
"""

import argparse
from pathlib import Path

import torch
from demo_tokenizer import END, PAD, build_tokenizer, tokenise
from demonstrations import demonstrate
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from agentrl import OptimizerConfig, StepStatistics, SupervisedRow, train_supervised

WORLD_SEED = 1  # the tasks' is 0
DEMONSTRATIONS = 16_000
RIGHT = 0.42  # of the demonstrations
LAZY = 0.82  # of the others stop after one call
MAX_VOCAB_SIZE = 512  # the texts fill less of it
STEPS, ROWS_PER_STEP, WARMUP_STEPS = 1000, 32, 30
LEARNING_RATE = 3e-3  # falls to 0 as a cosine, which leaves few slips in what is copied
WEIGHT_DECAY = 0.01
SEED = 0


def new_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Half a million random parameters."""
    torch.manual_seed(SEED)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        initializer_range=0.08,  # with the usual 0.02 so small a model hardly learns to copy
        bos_token_id=None,
        eos_token_id=tokenizer.backend_tokenizer.token_to_id(END),
        pad_token_id=tokenizer.backend_tokenizer.token_to_id(PAD),
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )
    return model


def report(step: int, statistics: StepStatistics) -> None:
    """Say how the training goes, now and then."""
    if step % 50 == 0 or step == 1:
        print(f"step {step}/{STEPS} loss {statistics.loss:.4f}", flush=True)


def main() -> None:
    """Write the model folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", type=Path, default=Path(__file__).parent / "model")
    args = parser.parse_args()
    demonstrations = [
        demonstrate(WORLD_SEED, f"warmup-{number}", RIGHT, LAZY) for number in range(DEMONSTRATIONS)
    ]
    tokenizer = build_tokenizer(demonstrations, MAX_VOCAB_SIZE)
    rows = [SupervisedRow(*tokenise(tokenizer, one)) for one in demonstrations]
    model = new_model(tokenizer)
    train_supervised(
        model,
        rows,
        steps=STEPS,
        rows_per_step=ROWS_PER_STEP,
        optimizer=OptimizerConfig(
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="cosine",
            warmup_steps=WARMUP_STEPS,
            weight_decay=WEIGHT_DECAY,
        ),
        seed=SEED,
        on_step=report,
    )
    model.save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)


if __name__ == "__main__":
    main()
