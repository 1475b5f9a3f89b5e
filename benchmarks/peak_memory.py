"""Peak memory of one optimizer step against TRL's GRPO and plain PyTorch, same rows, same model.

The rows, models and steps of `vs_trl.py`: "single_turn", rows of a prompt of their own, and
"siblings", a group on one long prompt. Sides, none of which recomputes activations:

    ours         all rows in one micro-batch
    ours_small   in micro-batches of at most 1,024 tokens
    trl          TRL's step, all rows in one batch
    trl_valid    TRL made to score trained positions only, as it does with Triton
    trl_small    TRL as it is, in micro-batches of two rows
    torch        the model's logits of the trained positions, whole, and cross entropy

What is measured is how far a step rises above what rests between steps: weights and AdamW's state
are the same for all. Each side is a process of its own and takes two steps, of which the second is
measured (`step_memory.py`).

    python benchmarks/peak_memory.py [--quick] [--save]

The last line is a JSON object: MiB of each, and ratios to TRL's.
"""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from report import finish, parse_flags
from step_memory import ENVIRONMENT, rise
from steps_in_turns import LEARNING_RATE, Workload, random_model
from torch.optim import AdamW
from transformers import PreTrainedModel
from trl_step import Batch, TrlStep, trained_only
from vs_trl import our_grpo_step

from agentrl.training.parallel import exit_process

SIDES = ("ours", "ours_small", "trl", "trl_valid", "trl_small", "torch")
ON_GPU = torch.cuda.is_available()


def workloads(rows: int) -> dict[str, Workload]:
    return {
        "single_turn": Workload(rows, 128, 384, siblings=False),
        "siblings": Workload(rows, 1024, 256, siblings=True),
    }


def make_step(side: str, model: PreTrainedModel, batch: Batch) -> Callable[[], None]:
    """The step of a side, and its state."""
    if side == "torch":
        return torch_step(model, batch)
    if side.startswith("ours"):
        tokens = 1024 if side == "ours_small" else batch.tokens
        return our_grpo_step(model, batch, tokens, bf16=ON_GPU).step
    rows = 2 if side == "trl_small" else len(batch.prompts)
    return TrlStep(model, batch, rows, LEARNING_RATE, bf16=ON_GPU).step


def torch_step(model: PreTrainedModel, batch: Batch) -> Callable[[], None]:
    """A step with clipped ratios in plain PyTorch."""
    optimizer = AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)
    rows = torch.cat([batch.prompts, batch.completions], dim=1)
    length = batch.completions.shape[1]
    advantages = batch.advantages[:, None]

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16) if ON_GPU else nullcontext():
            logits = model(input_ids=rows, use_cache=False, logits_to_keep=length + 1).logits
        logprobs = -F.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), batch.completions.flatten(), reduction="none"
        ).view_as(batch.completions)
        ratio = torch.exp(logprobs - batch.logprobs)
        terms = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        (-terms.mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(side: str, rows: int) -> dict[str, float]:
    """MiB by which a step of `side` rises above the memory between steps, by workload."""
    torch.set_num_threads(1)
    found = {}
    for name, workload in workloads(rows).items():
        model = random_model()
        step = make_step(side, model, workload.batch(model))
        with trained_only() if side == "trl_valid" else nullcontext():
            found[name] = round(rise(step), 1)
        del model, step
        gc.collect()
    return found


def in_own_process(side: str, rows: int) -> dict[str, float]:
    """`measure` in a separate process."""
    ended = subprocess.run(
        [sys.executable, __file__, "--measure", side, str(rows)],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if ended.returncode:
        raise RuntimeError(f"{side} failed: {ended.stderr[-2000:]}")
    found: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return found


def main() -> None:
    args = parse_flags(__doc__)
    rows = 2 if args.quick else 8
    sides = ("ours", "trl", "torch") if args.quick else SIDES
    result: dict[str, object] = {
        "device": torch.cuda.get_device_name() if ON_GPU else "cpu",
        "rows": rows,
    }
    peaks: dict[str, dict[str, float]] = {}
    for side in sides:
        peaks[side] = in_own_process(side, rows)
        took = ", ".join(f"{name} {mib:.0f} MiB" for name, mib in peaks[side].items())
        print(f"{side}: {took}", flush=True)
    for name in workloads(rows):
        result |= {f"{name}_{side}_mib": peaks[side][name] for side in sides}
        for against in sides:
            if not against.startswith("ours"):
                ours = "ours_small" if against == "trl_small" else "ours"
                ratio = peaks[ours][name] / peaks[against][name]
                result[f"{name}_ratio_{against}"] = round(ratio, 3)
    finish("peak_memory", result, ("torch", "transformers", "trl"), save=args.save)


if __name__ == "__main__":
    if "--measure" in sys.argv:
        print(json.dumps(measure(sys.argv[-2], int(sys.argv[-1]))))
        exit_process(0)
    main()
