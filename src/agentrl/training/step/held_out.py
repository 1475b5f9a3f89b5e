"""The loss of rows that are not trained: -log pi, the mean over their trained tokens."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.configs import ComputeConfig
from agentrl.training.attention import SharedPrefix
from agentrl.training.data.batch import MicroBatch
from agentrl.training.data.sequences import TrainingSequence
from agentrl.training.model.logprobs import token_logprobs
from agentrl.training.parallel import Mesh
from agentrl.training.step.schedule import make_schedule, run_schedule


@torch.no_grad()
def held_out_loss(
    model: PreTrainedModel,
    parts: Iterable[Sequence[Sequence[TrainingSequence]]],
    compute: ComputeConfig,
    mesh: Mesh,
) -> float:
    """The cross entropy of rows, in nats a token. Collective; all ranks get the same.

    `parts`: this rank's rows, each as its sequences, in parts of which one after the other is held
    in memory; all ranks have equally many parts. `model`: prepared by `prepare_model`.
    """
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)  # of -log pi, and of tokens

    def forward(batch: MicroBatch, prefix: SharedPrefix | None) -> Tensor:
        logprobs, _ = token_logprobs(model, batch, compute.loss_seq_chunk_size, prefix=prefix)
        return logprobs[batch.prediction]

    def add(number: int, batch: MicroBatch, logprobs: Tensor) -> None:
        del number
        sums[0] -= torch.where(batch.mask, logprobs, 0.0).sum(dtype=torch.float64)
        sums[1] += batch.mask.sum()

    for rows in parts:
        schedule = make_schedule(
            model, rows, compute.token_budget, compute.pad_to_multiple_of, mesh
        )
        run_schedule(model, schedule, forward, add)
    dist.all_reduce(sums, group=mesh.dp_group)
    total, tokens = sums.tolist()
    return float(total / tokens)
