"""From a step's schedule to gradients: in one pass where the loss allows it, in two otherwise.

The loss of a token may depend on its whole sequence (GSPO) or on the whole batch (Clip-Cov), which
no micro-batch may contain. The loss is a function of logprobs and entropies only, one or two
numbers per token, so the chain rule is split there:

    first pass, without gradient    logprobs and entropies of all micro-batches
    the objective, on all of them   its derivative by each: `Coefficients`
    second pass, with gradient      sum(coefficient * logprob) of each micro-batch -> backward

The gradient of the second pass is that of the objective, for any division into micro-batches. The
additional cost is one forward pass. A loss whose terms depend on their own token takes one pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.training.attention import SharedPrefix
from agentrl.training.data.batch import MicroBatch
from agentrl.training.losses import BatchTotals, LossInputs, Scope
from agentrl.training.model.logprobs import token_logprobs
from agentrl.training.parallel import Mesh
from agentrl.training.step.objective import StepObjective, TokenLosses
from agentrl.training.step.schedule import Schedule, run_schedule
from agentrl.training.step.statistics import RunningStatistics

PerToken = TypeVar("PerToken", TokenLosses, "Coefficients")
Output = tuple[Tensor, Tensor | None]  # of a pass: logprobs and entropy, each [M]


@dataclass(frozen=True)
class AuxiliaryOutputs:
    """Outputs of reference and critic for a step's tokens: [N] float32 for each micro-batch."""

    reference_logprobs: Sequence[Tensor] | None = None
    advantages: Sequence[Tensor] | None = None  # replace those of the rows
    policy_waits: bool = False  # whether this step does not train the policy

    def added_to(self, inputs: LossInputs, number: int) -> LossInputs:
        """Add these outputs to the inputs of micro-batch `number`."""
        if self.reference_logprobs is not None:
            inputs = replace(inputs, reference_logprobs=self.reference_logprobs[number])
        if self.advantages is not None:
            inputs = replace(inputs, advantages=self.advantages[number])
        return inputs


NO_AUXILIARY_OUTPUTS = AuxiliaryOutputs()


@dataclass(frozen=True)
class Coefficients:
    """Derivatives of the loss with respect to logprobs and entropies of N tokens, each [N]."""

    logprobs: Tensor
    entropy: Tensor | None  # None where the loss does not train it

    def split(self, sizes: Sequence[int]) -> list["Coefficients"]:
        """Split into micro-batches with these numbers of tokens."""
        logprobs = self.logprobs.split(list(sizes))
        entropies = [None] * len(sizes) if self.entropy is None else self.entropy.split(list(sizes))
        return [Coefficients(*pair) for pair in zip(logprobs, entropies, strict=True)]

    def surrogate(self, inputs: LossInputs) -> Tensor:
        """A scalar with the gradient of the loss; its value has no meaning."""
        total = (self.logprobs * inputs.logprobs).sum()
        if self.entropy is not None:
            assert inputs.entropy is not None, "a loss that trains the entropy is given it"
            total = total + (self.entropy * inputs.entropy).sum()
        return total


class PolicyPasses:
    """The policy's passes over the schedule of one step."""

    def __init__(
        self,
        model: PreTrainedModel,
        schedule: Schedule,
        objective: StepObjective,
        chunk_size: int,
        mesh: Mesh,
        auxiliary: AuxiliaryOutputs,
    ) -> None:
        """`chunk_size`: tokens whose logits exist at once."""
        self._model = model
        self._schedule = schedule
        self._objective = objective
        self._chunk_size = chunk_size
        self._mesh = mesh
        self._auxiliary = auxiliary

    def add_gradients(self, running: RunningStatistics) -> None:
        """Add the gradient of the objective to the model's, and its statistics to `running`.

        Collective.
        """
        if not self._takes_two():
            run_schedule(
                self._model,
                self._schedule,
                self._forward,
                lambda number, batch, output: self._share(
                    self._inputs(number, batch, output), running
                ),
            )
            return
        coefficients = self.look(running)

        def surrogate(number: int, batch: MicroBatch, output: Output) -> Tensor:
            share = coefficients[number].surrogate(batch.loss_inputs(*output))
            return self._mesh.scale_for_mean_reduction(share)

        run_schedule(self._model, self._schedule, self._forward, surrogate)

    def look(self, running: RunningStatistics) -> list[Coefficients]:
        """Run the first of two passes: add statistics to `running` and differentiate the objective.

        Returns the derivatives by micro-batch. The model's gradients do not change. Collective.
        """
        parts: list[LossInputs] = []

        def collect(number: int, batch: MicroBatch, output: Output) -> None:
            parts.append(self._inputs(number, batch, output))

        with torch.no_grad():
            run_schedule(self._model, self._schedule, self._forward, collect)
        inputs = concat(parts)
        totals = self._schedule.totals
        if self._objective.scope is Scope.BATCH:
            whole, mine = over_ranks(inputs, self._schedule.n_rows, self._mesh.dp_group)
            share, token_losses, derivative = differentiate(self._objective, whole, totals)
            # Each rank has computed the whole loss and counts the share of its own tokens.
            share = share * (inputs.mask.sum() / totals.tokens)
            token_losses, derivative = _part(token_losses, mine), _part(derivative, mine)
        else:
            share, token_losses, derivative = differentiate(self._objective, inputs, totals)
        running.add(share, token_losses, inputs)
        return derivative.split([len(part.mask) for part in parts])

    def _takes_two(self) -> bool:
        """Whether a micro-batch of some rank has less than the scope of the loss."""
        scope = self._objective.scope
        if scope is Scope.BATCH:
            return len(self._schedule.batches) > 1 or self._mesh.dp_size > 1
        return scope is Scope.SEQUENCE and self._schedule.divides_rows

    def _forward(self, batch: MicroBatch, prefix: SharedPrefix | None) -> Output:
        objective = self._objective
        return token_logprobs(
            self._model, batch, self._chunk_size, objective.with_entropy, prefix,
            entropy_gradient=objective.entropy_gradient,
        )  # fmt: skip

    def _inputs(self, number: int, batch: MicroBatch, output: Output) -> LossInputs:
        return self._auxiliary.added_to(batch.loss_inputs(*output), number)

    def _share(self, inputs: LossInputs, running: RunningStatistics) -> Tensor:
        share, token_losses = self._objective.share(inputs, self._schedule.totals)
        running.add(share.detach(), token_losses, inputs)
        return self._mesh.scale_for_mean_reduction(share)


def differentiate(
    objective: StepObjective, inputs: LossInputs, totals: BatchTotals
) -> tuple[Tensor, TokenLosses, Coefficients]:
    """Return the loss of `inputs`, its token losses, and its `Coefficients`."""
    logprobs = inputs.logprobs.detach().requires_grad_()
    entropy = None if inputs.entropy is None else inputs.entropy.detach()
    leaves = [logprobs]
    if entropy is not None and objective.entropy_gradient:
        leaves.append(entropy.requires_grad_())
    with torch.enable_grad():
        share, token_losses = objective.share(
            replace(inputs, logprobs=logprobs, entropy=entropy), totals
        )
    by_logprob, *by_entropy = torch.autograd.grad(share, leaves)
    return share.detach(), token_losses, Coefficients(by_logprob, next(iter(by_entropy), None))


def concat(parts: Sequence[LossInputs]) -> LossInputs:
    """Concatenate the tokens of several micro-batches of one rank, without gradients."""
    return _each_field(parts, lambda tensors: torch.cat([tensor.detach() for tensor in tensors]))


def over_ranks(inputs: LossInputs, rows: int, group: dist.ProcessGroup) -> tuple[LossInputs, slice]:
    """Gather the tokens of all ranks of `group`. Returns them and the slice of this rank's.

    `rows`: this rank's number of rows, which makes `sequence` unique over ranks. Ranks may have
    different numbers of tokens. Collective.
    """
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    device = inputs.logprobs.device
    sizes = torch.zeros((ranks, 2), dtype=torch.int64, device=device)
    sizes[rank] = torch.tensor([len(inputs.logprobs), rows])
    dist.all_reduce(sizes, group=group)
    counts, row_counts = sizes[:, 0].tolist(), sizes[:, 1].tolist()
    start = sum(counts[:rank])
    mine = slice(start, start + counts[rank])

    def gathered(tensors: Sequence[Tensor]) -> Tensor:
        (own,) = tensors
        dtype = torch.int64 if own.dtype == torch.bool else own.dtype
        whole = torch.zeros(sum(counts), dtype=dtype, device=device)
        whole[mine] = own.to(dtype)
        dist.all_reduce(whole, group=group)  # a token is 0 on all ranks except its own
        return whole.to(own.dtype)

    numbered = replace(inputs, sequence=inputs.sequence + sum(row_counts[:rank]))
    return _each_field([numbered], gathered), mine


def _each_field(
    parts: Sequence[LossInputs], join: Callable[[Sequence[Tensor]], Tensor]
) -> LossInputs:
    """`join` applied to each tensor over all parts; what the loss is not given stays None."""
    values: dict[str, Any] = {}  # of each field: a tensor, or None where it may be
    for field in fields(LossInputs):
        tensors = [getattr(part, field.name) for part in parts]
        values[field.name] = None if tensors[0] is None else join(tensors)
    return LossInputs(**values)


def _part(whole: PerToken, part: slice) -> PerToken:
    """Some of the tokens of what is said of each."""
    values: dict[str, Any] = {}
    for field in fields(whole):
        tensor = getattr(whole, field.name)
        values[field.name] = None if tensor is None else tensor[part]
    return type(whole)(**values)
