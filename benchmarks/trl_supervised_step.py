"""TRL's SFT and DPO steps on given rows: its own losses, its own optimizer.

`SFTTrainer.compute_loss` and `DPOTrainer._compute_loss` are called on ready batches, as the
training loop does after collation.
"""

import copy
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from trl_step import Batch, TrainerStep, word_tokenizer


class TrlSftStep(TrainerStep):
    """A model in TRL's SFT trainer, in micro-batches of `rows` rows."""

    def __init__(
        self, model: PreTrainedModel, batch: Batch, rows: int, learning_rate: float, bf16: bool
    ) -> None:
        """`batch`: what every step trains; its completions."""
        count = -(-len(batch.prompts) // rows)
        trainer = SFTTrainer(
            model=model,
            args=SFTConfig(**_arguments(rows, count, learning_rate, bf16)),
            train_dataset=Dataset.from_dict({"text": ["w3 w4"] * 8}),
            processing_class=word_tokenizer(),
        )
        ids, mask = _rows(batch)
        labels = ids.masked_fill(mask == 0, -100)
        super().__init__(
            trainer,
            [
                {"input_ids": part, "attention_mask": torch.ones_like(part), "labels": of_part}
                for part, of_part in zip(ids.split(rows), labels.split(rows), strict=True)
            ],
        )
        self._trained = mask.sum()

    def _loss(self, inputs: dict[str, Tensor]) -> Tensor:
        loss: Tensor = self._trainer.compute_loss(
            self._model, dict(inputs), num_items_in_batch=self._trained
        )
        return loss


class TrlDpoStep(TrainerStep):
    """A model in TRL's DPO trainer, in micro-batches of `pairs` pairs; the reference is its start.

    The second half of a batch's rows are the rejected answers to the prompts of the first half.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        batch: Batch,
        pairs: int,
        learning_rate: float,
        bf16: bool,
        reference: Tensor | None = None,
    ) -> None:
        """`batch`: what every step trains. `reference`: sums of each row's logprobs [B], which are
        known before the steps; None: the reference is computed in each.
        """
        count = -(-len(batch.prompts) // 2 // pairs)
        example = {"prompt": "w3", "chosen": " w4", "rejected": " w5"}
        trainer = DPOTrainer(
            model=model,
            ref_model=copy.deepcopy(model),
            args=DPOConfig(**_arguments(pairs, count, learning_rate, bf16), beta=0.1),
            train_dataset=Dataset.from_list([example] * 8),
            processing_class=word_tokenizer(),
        )
        # What its flag does is done: the trainer's own rows are not those of the step.
        trainer.precompute_ref_logps = reference is not None
        known = torch.zeros(len(batch.prompts)) if reference is None else reference
        ids, mask = (values.chunk(2) for values in _rows(batch))
        super().__init__(
            trainer,
            [
                {
                    "input_ids": torch.cat([chosen, rejected]),
                    "attention_mask": torch.ones_like(torch.cat([chosen, rejected])),
                    "completion_mask": torch.cat([of_chosen, of_rejected]),
                    "ref_chosen_logps": ref_chosen,
                    "ref_rejected_logps": ref_rejected,
                }
                for chosen, rejected, of_chosen, of_rejected, ref_chosen, ref_rejected in zip(
                    *(half.split(pairs) for half in (*ids, *mask, *known.chunk(2))), strict=True
                )
            ],
        )

    def _loss(self, inputs: dict[str, Tensor]) -> Tensor:
        loss: Tensor = self._trainer._compute_loss(self._model, inputs, return_outputs=False)
        return loss / len(self._micro_batches)


def _rows(batch: Batch) -> Sequence[Tensor]:
    """Ids and trained tokens of whole rows, each [B, P + C]."""
    ids = torch.cat([batch.prompts, batch.completions], dim=1)
    mask = torch.zeros_like(ids)
    mask[:, batch.prompts.shape[1] :] = 1
    return ids, mask


def _arguments(rows: int, count: int, learning_rate: float, bf16: bool) -> dict[str, Any]:
    return {
        "output_dir": tempfile.mkdtemp(), "use_cpu": not torch.cuda.is_available(), "bf16": bf16,
        "per_device_train_batch_size": rows, "gradient_accumulation_steps": count,
        "learning_rate": learning_rate, "adam_beta2": 0.95, "weight_decay": 0.0,
        "max_grad_norm": 1.0, "gradient_checkpointing": False, "report_to": [],
        "save_strategy": "no", "max_length": None, "dataloader_pin_memory": False,
    }  # fmt: skip
