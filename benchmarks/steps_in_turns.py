"""Steps side by side: the model, the rows, this project's step, and rounds that take turns."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from clock import clock
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from trl_step import Batch

from agentrl.configs import ComputeConfig, LearnerConfig, LossConfig, ModelConfig, OptimizerConfig
from agentrl.configs.preferences import PreferenceConfig
from agentrl.training.data.sequences import TrainingSequence
from agentrl.training.parallel import make_mesh
from agentrl.training.step.learner import Learner

LEARNING_RATE = 1e-5
TOKENS_OF_LOGITS = 4096  # at once, as many as in TRL's tiles
TOLERANCE = 1e-4  # of the largest gradient
TOLERANCE_BF16 = 5e-2  # computed in bfloat16
ROUNDS = 5


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
        sampled = logprobs(model, rows, self.completion) + noise.to(device)
        return Batch(prompts.to(device), completions.to(device), sampled, advantages.to(device))


@torch.no_grad()
def logprobs(model: PreTrainedModel, rows: torch.Tensor, completion: int) -> torch.Tensor:
    """Of the last `completion` tokens of each row."""
    found = []
    for row in rows:
        logits = model(input_ids=row[None], logits_to_keep=completion + 1).logits[0, :-1].float()
        found.append(logits.log_softmax(-1).gather(-1, row[-completion:, None])[:, 0])
    return torch.stack(found)


class OurStep:
    """A step of this project's learner on the same rows each time."""

    def __init__(
        self,
        model: PreTrainedModel,
        rows: Sequence[Sequence[TrainingSequence]],
        config: LearnerConfig,
        reference: ModelConfig | None = None,
        *,
        reference_in_rows: bool = False,
    ) -> None:
        self._rows = rows
        mesh = make_mesh(Accelerator(cpu=not torch.cuda.is_available()))
        self._learner = Learner(
            model,
            mesh,
            config,
            total_steps=1,
            reference=reference,
            reference_in_rows=reference_in_rows,
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


def learner_config(
    micro_batch_tokens: int,
    bf16: bool,
    loss: LossConfig,
    preference: PreferenceConfig | None = None,
) -> LearnerConfig:
    """What the steps of all losses have in common."""
    compute = ComputeConfig(
        bf16=bf16, micro_batch_tokens=micro_batch_tokens, loss_seq_chunk_size=TOKENS_OF_LOGITS
    )
    optimizer = OptimizerConfig(learning_rate=LEARNING_RATE)
    return LearnerConfig(compute, loss, optimizer, preference=preference)


def in_turns(name: str, sides: Mapping[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Medians of the seconds of each side, and of the ratio of `ours` to each other one."""
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for round_ in range(rounds):
        for side, step in sides.items():
            seconds[side].append(seconds_of(step))
        took = ", ".join(f"{side} {times[-1]:.2f} s" for side, times in seconds.items())
        print(f"{name} {round_ + 1}/{rounds}: {took}", flush=True)
    ratios = {
        f"{name}_ratio{side.removeprefix('trl')}": statistics.median(
            one / other for one, other in zip(seconds["ours"], times, strict=True)
        )
        for side, times in seconds.items()
        if side != "ours"
    }
    return ratios | {
        f"{name}_seconds_{side}": statistics.median(times) for side, times in seconds.items()
    }


def tolerance_of(model: PreTrainedModel) -> float:
    """How far gradients may differ: on a GPU steps compute in bfloat16."""
    return TOLERANCE_BF16 if model.device.type == "cuda" else TOLERANCE


def check_equal(
    ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float
) -> None:
    """Raises if gradients differ by more than `tolerance` of the largest."""
    largest = max(float(gradient.abs().max()) for gradient in ours.values())
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        off = float((gradient - theirs[name]).abs().max()) / largest
        assert off <= tolerance, f"gradients of {name} differ by {off:.1e} of the largest"


def seconds_of(step: Callable[[], None]) -> float:
    """Of one call, by the clock of `clock.py`."""
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
