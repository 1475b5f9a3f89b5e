"""TRL's GRPO step on given rows: its own loss, its own optimizer, no sampling; and the base of
`trl_supervised_step.py`.

`GRPOTrainer._compute_loss` is called on ready batches, as its training loop does after sampling.
On a CPU TRL also scores the positions of the prompt, whose result it throws away; with Triton it
does not. `trained_only` makes it leave them out on any device.
"""

import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

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


class TrainerStep(ABC):
    """An optimizer step in one of TRL's trainers, on the same micro-batches each time."""

    def __init__(self, trainer: Any, micro_batches: Sequence[dict[str, Tensor]]) -> None:
        self._trainer = trainer
        self._micro_batches = micro_batches
        trainer.current_gradient_accumulation_steps = len(micro_batches)
        self._model = trainer.model
        self._model.train()
        self._optimizer = trainer.create_optimizer()

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

    @abstractmethod
    def _loss(self, inputs: dict[str, Tensor]) -> Tensor:
        """The share of a micro-batch in the loss of the batch."""

    def _accumulate(self) -> None:
        """The forward and backward passes of all micro-batches, and the clipping."""
        for inputs in self._micro_batches:
            with self._trainer.accelerator.autocast():
                loss = self._loss(inputs)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)


class TrlStep(TrainerStep):
    """A model in TRL's GRPO trainer, in micro-batches of `rows` rows."""

    def __init__(
        self, model: PreTrainedModel, batch: Batch, rows: int, learning_rate: float, bf16: bool
    ) -> None:
        """`batch`: what every step trains."""
        micro_batches = _split(batch, rows)
        count = len(micro_batches)
        config = GRPOConfig(
            output_dir=tempfile.mkdtemp(), use_cpu=not torch.cuda.is_available(), bf16=bf16,
            per_device_train_batch_size=rows, gradient_accumulation_steps=count,
            num_generations=2, generation_batch_size=rows * count,
            max_completion_length=batch.completions.shape[1], loss_type="dapo", beta=0.0,
            epsilon=0.2, learning_rate=learning_rate, adam_beta2=0.95, weight_decay=0.0,
            max_grad_norm=1.0, gradient_checkpointing=False, report_to=[], save_strategy="no",
            dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=config,
            train_dataset=Dataset.from_dict({"prompt": ["w3"] * 8}),
            processing_class=word_tokenizer(),
        )
        super().__init__(trainer, micro_batches)

    def _loss(self, inputs: dict[str, Tensor]) -> Tensor:
        loss: Tensor = self._trainer._compute_loss(self._model, inputs)
        return loss


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of few words, which TRL's trainers want and ready batches do not use."""
    words = {f"w{index}": index for index in range(10)}
    model = WordLevel(words, unk_token="w2")
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(model), pad_token="w0", eos_token="w1"
    )


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
