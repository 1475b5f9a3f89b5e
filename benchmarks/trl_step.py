"""TRL's GRPO step on given rows: its own loss, its own optimizer, no sampling.

`GRPOTrainer._compute_loss` is called on ready batches, as its training loop does after sampling.
On a CPU TRL also scores the positions of the prompt, whose result it throws away; with Triton it
does not. `trained_only` makes it leave them out on any device.
"""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # it warns of functions that are not used here

import trl.trainer.utils
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer


@dataclass(frozen=True)
class Batch:
    """B rows: `prompts` [B, P] and `completions` [B, C] ids, all trained tokens in the latter."""

    prompts: Tensor
    completions: Tensor
    logprobs: Tensor  # [B, C]: the sampler's
    advantages: Tensor  # [B]

    @property
    def tokens(self) -> int:
        return self.prompts.numel() + self.completions.numel()


class TrlStep:
    """A model in TRL's GRPO trainer, in micro-batches of `rows` rows."""

    def __init__(
        self, model: PreTrainedModel, batch: Batch, rows: int, learning_rate: float, bf16: bool
    ) -> None:
        """`batch`: what every step trains."""
        self._micro_batches = _split(batch, rows)
        count = len(self._micro_batches)
        words = {f"w{index}": index for index in range(10)}
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(WordLevel(words, unk_token="w2")),
            pad_token="w0", eos_token="w1",
        )  # fmt: skip
        config = GRPOConfig(
            output_dir=tempfile.mkdtemp(), use_cpu=not torch.cuda.is_available(), bf16=bf16,
            per_device_train_batch_size=rows, gradient_accumulation_steps=count,
            num_generations=2, generation_batch_size=rows * count,
            max_completion_length=batch.completions.shape[1], loss_type="dapo", beta=0.0,
            epsilon=0.2, learning_rate=learning_rate, adam_beta2=0.95, weight_decay=0.0,
            max_grad_norm=1.0, gradient_checkpointing=False, report_to=[], save_strategy="no",
            dataloader_pin_memory=False,
        )  # fmt: skip
        self._trainer = GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=config,
            train_dataset=Dataset.from_dict({"prompt": ["w3"] * 8}),
            processing_class=tokenizer,
        )
        self._trainer.current_gradient_accumulation_steps = count
        self._model = self._trainer.model
        self._model.train()
        self._optimizer = self._trainer.create_optimizer()

    def step(self) -> None:
        """One optimizer step over the whole batch."""
        self._accumulate()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def gradients(self) -> dict[str, Tensor]:
        """Clipped gradients of one step, by parameter name. The weights do not change."""
        self._accumulate()
        found = {name: parameter.grad for name, parameter in self._model.named_parameters()}
        self._optimizer.zero_grad()
        return {name: gradient for name, gradient in found.items() if gradient is not None}

    def _accumulate(self) -> None:
        """The forward and backward passes of all micro-batches, and the clipping."""
        for inputs in self._micro_batches:
            with self._trainer.accelerator.autocast():
                loss = self._trainer._compute_loss(self._model, inputs)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)


@contextmanager
def trained_only() -> Iterator[None]:
    """TRL scores trained positions only, as it does with Triton; its arithmetic is the same."""
    asked = trl.trainer.utils._use_triton
    trl.trainer.utils._use_triton = lambda device: True
    try:
        yield
    finally:
        trl.trainer.utils._use_triton = asked


def _split(batch: Batch, rows: int) -> Sequence[dict[str, Tensor]]:
    count = torch.tensor(float(batch.completions.numel()), device=batch.prompts.device)
    return [
        {
            "prompt_ids": prompts,
            "prompt_mask": torch.ones_like(prompts),
            "completion_ids": completions,
            "completion_mask": torch.ones_like(completions),
            "old_per_token_logps": logprobs,
            "advantages": advantages,
            "num_items_in_batch": count,
        }
        for prompts, completions, logprobs, advantages in zip(
            batch.prompts.split(rows),
            batch.completions.split(rows),
            batch.logprobs.split(rows),
            batch.advantages.split(rows),
            strict=True,
        )
    ]
