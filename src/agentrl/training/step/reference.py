"""The reference policy of the KL penalty and of preference losses.

It never changes, also not by a resume. With an adapter it is the policy with the adapter switched
off and costs no memory. Without an adapter it is a second model.
"""

from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.training.attention import SharedPrefix
from agentrl.training.data.batch import MicroBatch
from agentrl.training.model.logprobs import token_logprobs
from agentrl.training.model.lora import adapter_off
from agentrl.training.step.schedule import Schedule, run_schedule


class ReferenceLogprobs(Protocol):
    """What a step asks."""

    def logprobs(self, schedule: Schedule) -> list[Tensor]:
        """Logprobs [N] of the trained tokens, for each micro-batch. Collective."""
        ...


class StoredReference:
    """Of rows that bring the reference's logprobs in their column `reference`."""

    def logprobs(self, schedule: Schedule) -> list[Tensor]:
        """Logprobs [N] of the trained tokens, for each micro-batch."""
        return [batch.columns["reference"] for batch in schedule.batches]


class Reference:
    """The reference policy, which computes its logprobs."""

    def __init__(self, model: PreTrainedModel, chunk_size: int) -> None:
        """`model`: prepared by `prepare_model`; its adapter, if any, is switched off.

        `chunk_size`: largest number of tokens whose logits exist at once.
        """
        self.model = model
        self._chunk_size = chunk_size

    @torch.no_grad()
    def logprobs(self, schedule: Schedule) -> list[Tensor]:
        """Logprobs [N] of the trained tokens, for each micro-batch. Collective."""
        self.model.eval()
        logprobs: list[Tensor] = []

        def collect(number: int, batch: MicroBatch, output: tuple[Tensor, Tensor | None]) -> None:
            logprobs.append(output[0][batch.prediction])

        with adapter_off(self.model):
            run_schedule(self.model, schedule, self._forward, collect)
        return logprobs

    def _forward(
        self, batch: MicroBatch, prefix: SharedPrefix | None
    ) -> tuple[Tensor, Tensor | None]:
        return token_logprobs(self.model, batch, self._chunk_size, prefix=prefix)
