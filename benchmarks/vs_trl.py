"""One optimizer step against TRL's on the same rows and model, gradients equal: GRPO, SFT and DPO.

GRPO: both train the same random Qwen3 with the same loss (clipped ratios to the sampler's logprobs,
mean over the batch's trained tokens), entropy measured, gradients clipped, fused AdamW. Two
workloads: "single_turn", rows of a prompt of their own; "siblings", a group on one long prompt,
which is computed once here and in every row by TRL. Rows are of equal length, so that TRL pads
nothing.

Each workload is measured against TRL as it is and ("valid") against TRL made to score trained
positions only, as it does with Triton; with all rows in one batch, and ("small") in micro-batches
of two rows, which a CPU likes better. This project's step is taken in the fastest of three sizes.

SFT and DPO are in `vs_trl_supervised.py`, with peak memory beside time.

    python benchmarks/vs_trl.py [--of grpo sft dpo dpo_once] [--quick] [--save]

One thread on a CPU, whose own seconds are measured; rounds of all sides are interleaved; the ratios
are medians of rounds. The last line is a JSON object; what is not measured again stays as saved.
`load` is the machine's load when a part began: other work slows both sides, and the rounds take
turns. On a GPU a model of 0.6 billion parameters
computes in bfloat16.
"""

import argparse
import copy
import datetime
import json
import os
import sys

import torch
from report import RESULTS, finish, parse_flags
from steps_in_turns import (
    LEARNING_RATE,
    ROUNDS,
    OurStep,
    Workload,
    check_equal,
    in_turns,
    learner_config,
    random_model,
    seconds_of,
    tolerance_of,
)
from transformers import PreTrainedModel
from trl_step import Batch, TrlStep, trained_only
from vs_trl_supervised import memory, supervised

from agentrl.configs import LossConfig
from agentrl.databases.documents import DBRecordData
from agentrl.databases.policies import Lineage
from agentrl.databases.token_tree import TokenTree
from agentrl.training.data.sequences import row_sequences
from agentrl.training.parallel import exit_process

PARTS = ("grpo", "sft", "dpo", "dpo_once")


def our_grpo_step(
    model: PreTrainedModel, batch: Batch, micro_batch_tokens: int, bf16: bool
) -> OurStep:
    """The step on rows as the database holds them."""
    rows = [_row(batch, index) for index in range(len(batch.prompts))]
    lineage = Lineage({0: 0})
    loss = LossConfig(loss_calculator="GRPO", token_level_loss=True, log_entropy=True)
    config = learner_config(micro_batch_tokens, bf16, loss)
    return OurStep(model, [row_sequences(row, lineage, 0) for row in rows], config)


def _row(batch: Batch, index: int) -> DBRecordData:
    prompt, completion = batch.prompts[index].tolist(), batch.completions[index].tolist()
    length, trained = len(prompt) + len(completion), len(completion)
    before = [0.0] * len(prompt)
    return DBRecordData(
        id=f"row-{index}",
        task="task",
        group_order=index,
        reward=0.0,
        n_train_tokens=trained,
        cost=float(length),
        policy_versions=[0],
        temperature=1.0,
        tree=TokenTree.line(
            prompt + completion,
            mask=[0] * len(prompt) + [1] * trained,
            advantages=float(batch.advantages[index]),
            logprobs=before + batch.logprobs[index].tolist(),
            versions=0,
        ),
        prefix_hash="prefix",
    )


def measure(name: str, workload: Workload, model: PreTrainedModel, rounds: int) -> dict[str, float]:
    """Check that all sides have the same gradients, then time them in turn."""
    batch = workload.batch(model)
    bf16 = model.device.type == "cuda"
    tolerance = tolerance_of(model)
    ours = [
        our_grpo_step(copy.deepcopy(model), batch, tokens, bf16)
        for tokens in {workload.rows * (workload.prompt + workload.completion), 2048, 1024}
    ]
    whole, small = (
        TrlStep(copy.deepcopy(model), batch, rows, LEARNING_RATE, bf16)
        for rows in (workload.rows, 2)
    )
    expected = ours[0].gradients()
    for step in (whole, small, *ours[1:]):
        check_equal(expected, step.gradients(), tolerance)
    with trained_only():
        check_equal(expected, whole.gradients(), tolerance)
    fastest = min(ours, key=lambda step: seconds_of(step.step))
    sides = {
        "ours": fastest.step,
        "trl": whole.step,
        "trl_valid": trained_only()(whole.step),
        "trl_small": small.step,
        "trl_small_valid": trained_only()(small.step),
    }
    result = in_turns(name, sides, rounds)
    result[f"{name}_tokens_per_second"] = batch.tokens / result[f"{name}_seconds_ours"]
    return {key: round(value, 3) for key, value in result.items()}


def grpo(quick: bool) -> dict[str, object]:
    """The figures of GRPO."""
    shorter = 4 if quick else 1
    workloads = {
        "single_turn": Workload(8 // shorter, 128, 384, siblings=False),
        "siblings": Workload(8, 1024 // shorter, 256 // shorter, siblings=True),
    }
    model = random_model()
    result: dict[str, object] = {}
    for name, workload in workloads.items():
        result |= measure(name, workload, model, 1 if quick else ROUNDS)
    return result


def main() -> None:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--of", nargs="+", choices=PARTS, default=PARTS)

    args = parse_flags(__doc__, add=add)
    torch.set_num_threads(1)
    measured: dict[str, object] = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "parameters": random_model().num_parameters(),
        "rounds": 1 if args.quick else ROUNDS,
    }
    for part in args.of:
        when = {"date": datetime.date.today().isoformat(), "load": round(os.getloadavg()[0], 1)}
        if part == "grpo":
            measured |= {**grpo(args.quick), "grpo_measured": when}
        else:
            measured[part] = {**supervised(part, args.quick), **when}
    saved = RESULTS / "vs_trl.json"
    before: dict[str, object] = json.loads(saved.read_text()) if saved.exists() else {}
    result = before | measured
    finish("vs_trl", result, ("torch", "transformers", "trl"), save=args.save)


if __name__ == "__main__":
    if "--memory" in sys.argv:
        print(memory(*sys.argv[2:]))
    else:
        main()
    exit_process(0)
