"""The SFT and the DPO step beside TRL's: time and peak memory, on the same rows and model.

    sft   "single": rows of a prompt of their own; "siblings": two rows on one long prompt
    dpo   "single": two pairs on short prompts; "siblings": a pair on a prompt of four times an
          answer's length, which it shares; "long": of eight times
    dpo_once   the same with the reference's logprobs known before the steps, on both sides

Sides: this project's step, TRL's with all rows in one batch, and ("small") in micro-batches of two
rows, which for DPO are a pair. All train the completions only, with gradients that are checked to
be equal. In `dpo` the reference is computed in each step. The peak memory is that
of a step above what rests between steps, of each side in a process of its own that is started
behind the rounds; the sides take turns there, too.
"""

import copy
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from step_memory import ENVIRONMENT, rise
from steps_in_turns import (
    LEARNING_RATE,
    ROUNDS,
    OurStep,
    Workload,
    check_equal,
    in_turns,
    learner_config,
    logprobs,
    random_model,
    seconds_of,
    tolerance_of,
)
from transformers import PreTrainedModel
from trl_step import Batch, TrainerStep
from trl_supervised_step import TrlDpoStep, TrlSftStep

from agentrl.configs import LossConfig, ModelConfig
from agentrl.configs.preferences import PreferenceConfig
from agentrl.databases.pair_tree import pair_tree
from agentrl.databases.token_tree import TokenTree
from agentrl.training.data.sequences import tree_sequences

BETA = 0.1
ROWS = {"single": 4, "siblings": 2, "long": 2}  # a pair is two rows


def workload_of(part: str, name: str, quick: bool) -> Workload:
    """The rows of a workload; for DPO the second half are the rejected answers."""
    shorter = 4 if quick else 1
    if name == "single":
        return Workload(ROWS[name], 128, 384 // shorter, siblings=False)
    prompt = 2048 if name == "long" else 1024
    return Workload(ROWS[name], prompt // shorter, 256 // shorter, siblings=part == "sft")


def batch_of(part: str, workload: Workload, model: PreTrainedModel) -> Batch:
    """The rows; both answers of a pair have one prompt."""
    batch = workload.batch(model)
    if part == "sft":
        return batch
    prompts = batch.prompts[: len(batch.prompts) // 2].repeat(2, 1)
    return Batch(prompts, batch.completions, batch.logprobs, batch.advantages)


def our_step(part: str, model: PreTrainedModel, batch: Batch, tokens: int, bf16: bool) -> OurStep:
    """The step on rows as `agentrl sft` and `agentrl dpo` prepare them."""
    trees = [
        TokenTree.line(
            [*prompt, *completion],
            mask=[0] * len(prompt) + [1] * len(completion),
            advantages=1.0,
        )
        for prompt, completion in zip(
            batch.prompts.tolist(), batch.completions.tolist(), strict=True
        )
    ]
    if part == "sft":
        config = learner_config(tokens, bf16, LossConfig(loss_calculator="CrossEntropy"))
        return OurStep(model, [tree_sequences(tree) for tree in trees], config)
    half = len(trees) // 2
    config = learner_config(tokens, bf16, LossConfig(beta=BETA), PreferenceConfig(beta=BETA))
    if part == "dpo_once":
        before = [0.0] * batch.prompts.shape[1]
        trees = [
            tree.with_columns(reference=[*before, *known])
            for tree, known in zip(trees, _reference(model, batch).tolist(), strict=True)
        ]
    pairs = [pair_tree(*sides) for sides in zip(trees[:half], trees[half:], strict=True)]
    rows = [tree_sequences(tree) for tree in pairs]
    if part == "dpo_once":
        return OurStep(model, rows, config, reference_in_rows=True)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)  # the reference is the model before training
        return OurStep(model, rows, config, ModelConfig(model_name_or_path=folder))


def _reference(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """Logprobs [B, C] of the model before training."""
    return logprobs(
        model, torch.cat([batch.prompts, batch.completions], 1), batch.completions.shape[1]
    )


def trl_step(part: str, model: PreTrainedModel, batch: Batch, rows: int, bf16: bool) -> TrainerStep:
    """TRL's step in micro-batches of `rows` rows."""
    if part == "sft":
        return TrlSftStep(model, batch, rows, LEARNING_RATE, bf16)
    known = _reference(model, batch).sum(1) if part == "dpo_once" else None
    return TrlDpoStep(model, batch, rows // 2, LEARNING_RATE, bf16, known)


def supervised(part: str, quick: bool) -> dict[str, float]:
    """The figures of `part`, of `vs_trl.PARTS`."""
    names = ("single", "siblings") if part == "sft" else ("single", "siblings", "long")
    found: dict[str, float] = {}
    for name in names:
        found |= measure(part, name, quick)
    return found


def measure(part: str, name: str, quick: bool) -> dict[str, float]:
    """The figures of one workload, whose keys begin with its name."""
    model, rounds = random_model(), 1 if quick else ROUNDS
    bf16 = model.device.type == "cuda"
    batch = batch_of(part, workload_of(part, name, quick), model)
    ours = {
        tokens: our_step(part, copy.deepcopy(model), batch, tokens, bf16)
        for tokens in {batch.tokens, 1024}
    }
    # Two rows are TRL's smallest micro-batch already.
    sizes = {"trl": len(batch.prompts), **({"trl_small": 2} if len(batch.prompts) > 2 else {})}
    theirs = {
        side: trl_step(part, copy.deepcopy(model), batch, rows, bf16)
        for side, rows in sizes.items()
    }
    expected = theirs["trl"].gradients()
    for step in (*ours.values(), *[one for side, one in theirs.items() if side != "trl"]):
        check_equal(expected, step.gradients(), tolerance_of(model))
    tokens = min(ours, key=lambda tokens: seconds_of(ours[tokens].step))
    sides = {"ours": ours[tokens].step, **{side: step.step for side, step in theirs.items()}}
    result = {
        f"{name}_rows": len(batch.prompts),
        f"{name}_micro_batch_tokens": tokens,
        **in_turns(name, sides, rounds),
        **_memory(part, name, tokens, quick, [*sides]),
    }
    return {key: round(value, 3) for key, value in result.items()}


def _memory(
    part: str, name: str, tokens: int, quick: bool, sides: Sequence[str]
) -> dict[str, float]:
    """The peak of each side in MiB, and the ratios to TRL's. One step is as large as another."""
    peaks = {side: _in_own_process(part, name, side, tokens, quick) for side in sides}
    print(
        f"{name}: " + ", ".join(f"{side} {mib:.0f} MiB" for side, mib in peaks.items()), flush=True
    )
    found = {f"{name}_mib_{side}": mib for side, mib in peaks.items()}
    for side in sides[1:]:
        found[f"{name}_memory_ratio{side.removeprefix('trl')}"] = peaks["ours"] / peaks[side]
    return found


def _in_own_process(part: str, name: str, side: str, tokens: int, quick: bool) -> float:
    main = str(Path(__file__).with_name("vs_trl.py"))
    words = ["--memory", part, name, side, str(tokens), str(int(quick))]
    ended = subprocess.run(
        [sys.executable, main, *words], env={**os.environ, **ENVIRONMENT}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    if ended.returncode:
        raise RuntimeError(f"{' '.join(words)} failed: {ended.stderr[-2000:]}")
    return float(ended.stdout.splitlines()[-1])


def memory(part: str, name: str, side: str, tokens: str, quick: str) -> float:
    """The peak of a side's step in MiB, in this process."""
    torch.set_num_threads(1)
    model = random_model()
    batch = batch_of(part, workload_of(part, name, bool(int(quick))), model)
    bf16 = model.device.type == "cuda"
    step: Callable[[], None]
    if side == "ours":
        step = our_step(part, model, batch, int(tokens), bf16).step
    else:
        rows = 2 if side == "trl_small" else len(batch.prompts)
        step = trl_step(part, model, batch, rows, bf16).step
    return rise(step)
