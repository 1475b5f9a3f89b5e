"""One optimizer step against TRL's GRPO on the same rows and model, gradients equal.

Both train the same random Qwen3 with the same loss (clipped ratios to the sampler's logprobs, mean
over the batch's trained tokens), entropy measured, gradients clipped, fused AdamW. Two workloads:
"single_turn", rows of a prompt of their own; "siblings", a group on one long prompt, which is
computed once here and in every row by TRL. Rows are of equal length, so that TRL pads nothing.

Each workload is measured against TRL as it is and ("valid") against TRL made to score trained
positions only, as it does with Triton; with all rows in one batch, and ("small") in micro-batches
of two rows, which a CPU likes better. This project's step is taken in the fastest of three sizes.

    python benchmarks/vs_trl.py [--quick] [--save]

One thread on a CPU, whose own seconds are measured; rounds of all sides are interleaved; the ratios
are medians of rounds. The last line is a JSON object. On a GPU a model of 0.6 billion parameters
computes in bfloat16.
"""

import copy
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from clock import clock
from report import finish, parse_flags
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from trl_step import Batch, TrlStep, trained_only

from agentrl.configs import ComputeConfig, LearnerConfig, LossConfig, OptimizerConfig
from agentrl.databases.documents import DBRecordData
from agentrl.databases.policies import Lineage
from agentrl.databases.token_tree import TokenTree
from agentrl.training.data.sequences import row_sequences
from agentrl.training.parallel import exit_process, make_mesh
from agentrl.training.step.learner import Learner

LEARNING_RATE = 1e-5
TOKENS_OF_LOGITS = 4096  # at once, as many as in TRL's tiles
TOLERANCE = 1e-4  # of the largest gradient
TOLERANCE_BF16 = 5e-2  # computed in bfloat16


@dataclass(frozen=True)
class Workload:
    """`rows` rows of a prompt and a completion; with `siblings` all on the same prompt."""

    rows: int
    prompt: int
    completion: int
    siblings: bool

    def batch(self, model: PreTrainedModel) -> Batch:
        """Random rows with advantages, and logprobs of a sampler that differs a little."""
        generator = torch.Generator().manual_seed(self.prompt)

        def ids(rows: int, length: int) -> torch.Tensor:
            return torch.randint(3, model.config.vocab_size, (rows, length), generator=generator)

        prompts = ids(1 if self.siblings else self.rows, self.prompt).expand(self.rows, -1)
        completions = ids(self.rows, self.completion)
        noise = 0.15 * torch.randn(completions.shape, generator=generator)
        advantages = torch.randn(self.rows, generator=generator)
        device = model.device
        rows = torch.cat([prompts, completions], dim=1).to(device)
        sampled = _logprobs(model, rows, self.completion) + noise.to(device)
        return Batch(prompts.to(device), completions.to(device), sampled, advantages.to(device))


@torch.no_grad()
def _logprobs(model: PreTrainedModel, rows: torch.Tensor, completion: int) -> torch.Tensor:
    """Of the last `completion` tokens of each row."""
    found = []
    for row in rows:
        logits = model(input_ids=row[None], logits_to_keep=completion + 1).logits[0, :-1].float()
        found.append(logits.log_softmax(-1).gather(-1, row[-completion:, None])[:, 0])
    return torch.stack(found)


class OurStep:
    """The same in this project's learner, fed with rows as the database holds them."""

    def __init__(
        self, model: PreTrainedModel, batch: Batch, micro_batch_tokens: int, bf16: bool
    ) -> None:
        """`batch`: what every step trains."""
        rows = [_row(batch, index) for index in range(len(batch.prompts))]
        lineage = Lineage({0: 0})
        self._rows = [row_sequences(row, lineage, 0) for row in rows]
        self._learner = Learner(
            model,
            make_mesh(Accelerator(cpu=not torch.cuda.is_available())),
            LearnerConfig(
                ComputeConfig(
                    bf16=bf16,
                    micro_batch_tokens=micro_batch_tokens,
                    loss_seq_chunk_size=TOKENS_OF_LOGITS,
                ),
                LossConfig(loss_calculator="GRPO", token_level_loss=True, log_entropy=True),
                OptimizerConfig(learning_rate=LEARNING_RATE),
            ),
            total_steps=1,
        )

    def step(self) -> None:
        """One optimizer step."""
        self._learner.step(self._rows)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Clipped gradients of one step, by parameter name. The step is taken."""
        found: dict[str, torch.Tensor] = {}

        def keep(*_: object) -> None:
            for name, parameter in self._learner.model.named_parameters():
                if parameter.grad is not None:
                    found[name] = parameter.grad.full_tensor().clone()

        hook = self._learner.optimizer.register_step_pre_hook(keep)
        self.step()
        hook.remove()
        return found


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
    tolerance = TOLERANCE_BF16 if bf16 else TOLERANCE
    ours = [
        OurStep(copy.deepcopy(model), batch, tokens, bf16)
        for tokens in {workload.rows * (workload.prompt + workload.completion), 2048, 1024}
    ]
    whole, small = (
        TrlStep(copy.deepcopy(model), batch, rows, LEARNING_RATE, bf16)
        for rows in (workload.rows, 2)
    )
    expected = ours[0].gradients()
    for step in (whole, small, *ours[1:]):
        _check_equal(expected, step.gradients(), tolerance)
    with trained_only():
        _check_equal(expected, whole.gradients(), tolerance)
    fastest = min(ours, key=lambda step: _seconds(step.step))
    sides = {
        "ours": fastest.step,
        "trl": whole.step,
        "trl_valid": trained_only()(whole.step),
        "trl_small": small.step,
        "trl_small_valid": trained_only()(small.step),
    }
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for round_ in range(rounds):
        for side, step in sides.items():
            seconds[side].append(_seconds(step))
        took = ", ".join(f"{side} {times[-1]:.2f} s" for side, times in seconds.items())
        print(f"{name} {round_ + 1}/{rounds}: {took}", flush=True)
    result = {
        f"{name}_ratio{side.removeprefix('trl')}": statistics.median(
            one / other for one, other in zip(seconds["ours"], times, strict=True)
        )
        for side, times in seconds.items()
        if side != "ours"
    }
    result |= {
        f"{name}_seconds_{side}": statistics.median(times) for side, times in seconds.items()
    }
    result[f"{name}_tokens_per_second"] = batch.tokens / result[f"{name}_seconds_ours"]
    return {key: round(value, 3) for key, value in result.items()}


def _check_equal(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float
) -> None:
    """Raises if gradients differ by more than `tolerance` of the largest."""
    largest = max(float(gradient.abs().max()) for gradient in ours.values())
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        off = float((gradient - theirs[name]).abs().max()) / largest
        assert off <= tolerance, f"gradients of {name} differ by {off:.1e} of the largest"


def _seconds(step: Callable[[], None]) -> float:
    began = clock()
    step()
    return clock() - began


def random_model() -> PreTrainedModel:
    """12.6 million parameters; on a GPU 0.6 billion."""
    torch.manual_seed(0)
    on_gpu = torch.cuda.is_available()
    config = Qwen3Config(
        hidden_size=1024 if on_gpu else 384,
        intermediate_size=3072 if on_gpu else 1024,
        num_hidden_layers=28 if on_gpu else 6,
        num_attention_heads=16 if on_gpu else 6,
        num_key_value_heads=8 if on_gpu else 2,
        head_dim=128 if on_gpu else 64,
        vocab_size=151_936 if on_gpu else 8192,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
    )
    return Qwen3ForCausalLM(config).to("cuda" if on_gpu else "cpu")


def main() -> None:
    args = parse_flags(__doc__)
    torch.set_num_threads(1)
    shorter = 4 if args.quick else 1
    workloads = {
        "single_turn": Workload(8 // shorter, 128, 384, siblings=False),
        "siblings": Workload(8, 1024 // shorter, 256 // shorter, siblings=True),
    }
    rounds = 1 if args.quick else 3
    model = random_model()
    result: dict[str, object] = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "parameters": model.num_parameters(),
        "rounds": rounds,
    }
    for name, workload in workloads.items():
        result |= measure(name, workload, model, rounds)
    finish("vs_trl", result, ("torch", "transformers", "trl"), save=args.save)


if __name__ == "__main__":
    main()
    exit_process(0)
