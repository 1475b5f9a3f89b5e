"""A probe of a model at the start: does training compute the model's own logprobs and gradients?

The reference is the model's own forward, one sequence at a time, with its eager attention, on
random tokens. The passes of training are compared with it, in values and in gradients, in one form
of the micro-batches after the other, until one agrees:

    tree             siblings that share a prefix, as one tree and with the prefix in its own pass
    padded           all sequences padded, with each attention that the model supports
    equal lengths    sequences of one length only, for a model whose positions depend on the longest

A model that agrees in none is refused. So no list of architectures is needed.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.configs import ComputeConfig, ConfigError
from agentrl.databases.token_tree import TokenTree
from agentrl.training.attention import (
    IMPLEMENTATION,
    SHARED_IMPLEMENTATION,
    SharedPrefix,
    line_limit,
    recorded_windows,
    why_no_trees,
)
from agentrl.training.data.batch import MicroBatch
from agentrl.training.data.sequences import TrainingSequence
from agentrl.training.model.batch_form import BatchForm, use_batch_form
from agentrl.training.model.logprobs import token_logprobs
from agentrl.training.model.softmax import picked_logprobs
from agentrl.training.parallel import Mesh, grad_norms
from agentrl.training.parallel.agreement import process_lost
from agentrl.training.parallel.compilation import uncompiled
from agentrl.training.step.partial_gradients import sum_partial_gradients
from agentrl.training.step.schedule import Schedule, forget_passes, make_schedule, run_schedule

PREFIX, BRANCHES, SHORT = 40, (24, 20, 16), 12  # tokens of three siblings, and of another row
PROMPT = 4  # tokens of each row before those that it trains
_CHUNK = 64  # tokens whose logits exist at once, fewer than there are


@dataclass(frozen=True)
class Tolerance:
    """How far training may be from the reference, by rounding alone."""

    nats: float  # largest difference of a logprob
    gradient: float  # norm of the difference of a weight's gradient, relative


# Sums in another order. In bfloat16 a logit of 16 to 32 nats has steps of an eighth.
EXACT, ROUNDED = Tolerance(1e-3, 1e-2), Tolerance(0.5, 0.5)


@dataclass(frozen=True)
class Difference:
    """How far training is from the reference; NaN where a value is not finite."""

    nats: float  # largest difference of a logprob
    gradient: float  # as in `Tolerance`

    def within(self, tolerance: Tolerance) -> bool:
        """Whether rounding explains it."""
        return self.nats <= tolerance.nats and self.gradient <= tolerance.gradient

    def __str__(self) -> str:
        return (
            f"logprobs differ by {self.nats:.2g} nats at most, gradients by {self.gradient:.2g} of "
            "their norm"
        )


@dataclass(frozen=True)
class Trial:
    """A form of micro-batches that was tried, and why it is not used."""

    form: BatchForm
    attention: str
    reason: str


@dataclass(frozen=True)
class Verdict:
    """What a probe found. Without `difference` the model cannot be trained."""

    form: BatchForm
    attention: str
    difference: Difference | None
    failed: tuple[Trial, ...]  # before `form`, in order

    @property
    def sentence(self) -> str:
        """The verdict on one line."""
        by_reason: dict[str, list[str]] = {}
        for trial in self.failed:
            by_reason.setdefault(trial.reason, []).append(f"{trial.form} with {trial.attention}")
        failed = "; ".join(f"{', '.join(forms)}: {why}" for why, forms in by_reason.items())
        if self.difference is None:
            return f"no form of micro-batches gives the model's own logprobs ({failed})"
        found = f"trained as {self.form} with {self.attention}: {self.difference}"
        return f"{found} (not as {failed})" if failed else found


class Unfit(Exception):
    """A form of micro-batches, or the model itself, is not right. The message is the reason."""


def probe(
    model: PreTrainedModel, mesh: Mesh, compute: ComputeConfig, longest: int, *, trees: bool
) -> Verdict:
    """Find the form in which `model` is trained right, and make the model use it.

    `model`: prepared by `prepare_model`, with its weights. `longest`: tokens of the longest row
    that may come. `trees`: try trees, and every attention that the model supports; otherwise only
    the attention that the model has. Gradients are reset. Collective, with the same verdict on all
    ranks. Raises `ConfigError` as `sum_partial_gradients` does, which is called.
    """
    return _Probe(model, mesh, compute, longest).verdict(trees=trees)


class _Probe:
    def __init__(
        self, model: PreTrainedModel, mesh: Mesh, compute: ComputeConfig, longest: int
    ) -> None:
        self._model = model
        self._mesh = mesh
        self._compute = compute
        self._longest = longest
        self._tolerance = ROUNDED if compute.bf16 else EXACT
        self._own_attention = str(model.config._attn_implementation)
        self._can_choose = model._can_set_attn_implementation()
        self._trains = any(parameter.requires_grad for parameter in model.parameters())
        self._rows = _rows(model.config.get_text_config().vocab_size)
        self._counts = [row.row_tokens for row in self._rows]
        weights = np.random.default_rng(1).standard_normal(sum(self._counts)) / sum(self._counts)
        # Of each logprob, in the sum that is differentiated.
        self._weights = torch.from_numpy(weights).float().to(mesh.device)

    def verdict(self, *, trees: bool) -> Verdict:
        failed: list[Trial] = []
        form, attention = BatchForm.PADDED, self._own_attention
        difference: Difference | None = None
        training = self._model.training
        with nullcontext() if self._trains else torch.no_grad():
            for form, attention in self._choices(trees=trees):
                try:
                    with _reasons():
                        difference = self._try(form, attention)
                        forget_passes(self._model)
                    break
                except Unfit as reason:
                    failed.append(Trial(form, attention, str(reason)))
        self._model.train(training)
        return Verdict(form, attention, difference, tuple(failed))

    def _choices(self, *, trees: bool) -> Iterator[tuple[BatchForm, str]]:
        """The forms to try, each with an attention, the cheapest first."""
        shares_lines = self._mesh.sizes.cp > 1
        if trees:
            yield BatchForm.TREE, SHARED_IMPLEMENTATION if shares_lines else IMPLEMENTATION
        if shares_lines:
            return  # lines are shared as trees only
        plain = [self._own_attention]
        if trees and self._can_choose:
            plain = ["sdpa", "eager"] if self._model._supports_sdpa else ["eager"]
        for form in (BatchForm.PADDED, BatchForm.EQUAL_LENGTHS):
            yield from ((form, attention) for attention in plain)

    def _try(self, form: BatchForm, attention: str) -> Difference:
        """Compare a form with the reference. Raises `Unfit`."""
        model = self._model
        if form is BatchForm.TREE:
            self._check_trees()
        forget_passes(model)  # of the form before
        reference = "eager" if self._can_choose else self._own_attention
        use_batch_form(model, BatchForm.PADDED, reference)
        with uncompiled(self._compute):
            # The reference is divided over the processes too: it would not show their differences.
            sum_partial_gradients(model, self._mesh)
            own = self._add_reference_gradient()
            # Before forwards without a gradient, after which FSDP keeps whole parameters, which
            # have none.
            norms = self._gradient_norms()
            self._check_lengths(mixed=form is not BatchForm.EQUAL_LENGTHS)
        use_batch_form(model, form, attention)
        with recorded_windows() as windows:
            nats = self._subtract_gradient(own, form)
        if short := [window for window in windows if window < self._longest]:
            raise Unfit(
                f"some layers see {min(short)} tokens at most, and a row may have {self._longest} "
                "(--max_tokens)"
            )
        # A weight with hardly any gradient has a large relative difference by rounding alone.
        whole = norms + 1e-2 * norms.max()
        relative = self._gradient_norms() / whole.where(whole > 0, 1.0)
        difference = Difference(nats, float(relative.max()))
        if not difference.within(self._tolerance):
            raise Unfit(str(difference))
        return difference

    def _check_trees(self) -> None:
        """Raise `Unfit` if the model can have no trees, or no lines as long as they may be."""
        if reason := why_no_trees(self._model):
            raise Unfit(reason)
        longest = max(self._longest, self._compute.micro_batch_tokens or 0)
        most = line_limit(self._model)
        if most is not None and longest > most:
            raise Unfit(
                f"some layers scale queries by their place in the line beyond {most} tokens, and a "
                f"line may have {longest} (--max_tokens, --micro_batch_tokens)"
            )

    def _add_reference_gradient(self) -> Tensor:
        """Logprobs [N] of all rows, each by the model's own forward. Adds their gradient."""
        self._model.eval()
        found: list[Tensor] = []
        for row, weights in zip(self._rows, self._weights.split(self._counts), strict=True):
            logprobs = self._own(row, 0)[0, PROMPT - 1 :]
            if self._trains:
                (logprobs * weights).sum().backward()
            found.append(logprobs.detach())
        shared = torch.stack([logprobs[: PREFIX - PROMPT] for logprobs in found[: len(BRANCHES)]])
        nats = self._largest(shared - shared[:1])
        if not nats <= self._tolerance.nats:
            raise Unfit(f"its logprobs depend on later tokens, by {nats:.2g} nats")
        return torch.cat(found)

    @torch.no_grad()
    def _check_lengths(self, *, mixed: bool) -> None:
        """Raise `Unfit` if a row's logprobs depend on earlier rows or, with `mixed`, neighbours.

        Rotary frequencies may depend on the longest row of a pass, or of all passes so far. Rows
        at late positions stand for long ones.
        """
        row, late = self._rows[-1], self._latest_start()
        starts = sorted({0, late // 2, late})
        alone = torch.cat([self._own(row, start) for start in starts])
        again = torch.cat([self._own(row, start) for start in reversed(starts)]).flip(0)
        nats = self._largest(alone - again)
        if not nats <= self._tolerance.nats:
            raise Unfit(
                f"a row's logprobs depend on the rows before it, by {nats:.2g} nats, if a row may "
                f"have {self._longest} tokens (--max_tokens)"
            )
        if mixed and late:
            nats = self._largest(self._own(row, *starts) - alone)
            if not nats <= self._tolerance.nats:
                raise Unfit(
                    f"a row's logprobs depend on the length of others in its pass, by {nats:.2g} "
                    f"nats, if one may have {self._longest} tokens (--max_tokens)"
                )

    def _latest_start(self) -> int:
        """The position at which a row of `SHORT` tokens ends the longest row; 0 without rotary."""
        rotary = any(name.endswith("inv_freq") for name, _ in self._model.named_buffers())
        return max(self._longest - SHORT, 0) if rotary else 0

    def _subtract_gradient(self, own: Tensor, form: BatchForm) -> float:
        """The largest difference of training's logprobs to `own`. Subtracts their gradient."""
        self._model.train()
        longest = PREFIX + max(BRANCHES)
        # All rows in one pass; and one branch a pass, so that the prefix gets a pass of its own.
        budgets = [len(self._rows) * longest, *([longest] if form is BatchForm.TREE else [])]
        pad = self._compute.pad_to_multiple_of
        rows = [[row] for row in self._rows]
        return max(
            self._run(make_schedule(self._model, rows, budget, pad, self._mesh), own, -1 / parts)
            for budget in budgets
            for parts in [len(budgets)]
        )

    def _run(self, schedule: Schedule, own: Tensor, factor: float) -> float:
        """Run training's passes. Adds `factor` times their gradient. Returns the difference."""
        starts = torch.tensor([0, *np.cumsum(self._counts)[:-1]], device=own.device)
        differences: list[Tensor] = []

        def forward(batch: MicroBatch, prefix: SharedPrefix | None) -> Tensor:
            return token_logprobs(self._model, batch, _CHUNK, prefix=prefix)[0]

        def consume(number: int, batch: MicroBatch, logprobs: Tensor) -> Tensor | None:
            places = starts[batch.sequence] + batch.place
            found = logprobs[batch.prediction]
            differences.append((found.detach() - own[places])[batch.mask])
            if not self._trains:
                return None
            total = (found * self._weights[places])[batch.mask].sum() * factor
            # Each process of context parallelism has the gradient of its own tokens only.
            return total * self._mesh.sizes.cp

        run_schedule(self._model, schedule, forward, consume)
        return self._largest(torch.cat(differences))

    def _own(self, row: TrainingSequence, *starts: int) -> Tensor:
        """Logprobs [len(starts), L - 1] of a row by the model's own forward.

        Line n has positions from `starts[n]` on; a single line from 0 has the model's own.
        """
        ids = torch.from_numpy(row.tokens["ids"].astype(np.int64)).to(self._mesh.device)
        lines = ids.expand(len(starts), -1)
        positions = {}
        if any(starts):
            counted = torch.arange(len(ids) - 1, device=ids.device)
            positions["position_ids"] = torch.stack([counted + start for start in starts])
        output = self._model(input_ids=lines[:, :-1], use_cache=False, **positions)
        logits: Tensor = output.logits
        targets = lines[:, 1:]
        if self._mesh.sizes.tp == 1:
            return logits.float().log_softmax(-1).gather(-1, targets[..., None])[..., 0]
        found, _ = picked_logprobs(
            logits.flatten(0, 1).clone(), targets.flatten(), ids.new_ones(targets.numel()).float(),
            entropy=False, entropy_gradient=False, vocabulary=self._mesh.tp_group,
        )  # fmt: skip
        return found.view(targets.shape)

    def _gradient_norms(self) -> Tensor:
        """The norm of each parameter's gradient, [parameters] float64 on the CPU. Collective."""
        return grad_norms([[parameter] for parameter in self._model.parameters()])

    def _largest(self, differences: Tensor) -> float:
        """The largest absolute difference on any rank; infinite if one is NaN. Collective."""
        largest = differences.abs().max().double().nan_to_num(nan=torch.inf)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return float(largest)


@contextmanager
def _reasons() -> Iterator[None]:
    """Convert what a model raises in the block, on all ranks alike, to `Unfit`."""
    try:
        yield
    except (Unfit, ConfigError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if isinstance(error, RuntimeError) and process_lost(error):
            raise
        first_line = str(error).strip().partition("\n")[0]
        raise Unfit(f"{type(error).__name__}: {first_line}") from error


def _rows(vocabulary: int) -> list[TrainingSequence]:
    """Three rows that begin with the same tokens, and a short one."""
    tokens = np.random.default_rng(0).integers(min(3, vocabulary - 1), vocabulary, 256)
    prefix, *others = np.split(tokens, np.cumsum([PREFIX, *BRANCHES, SHORT]))[:-1]
    branches, short = others[:-1], others[-1]
    return [_row(ids) for ids in (*(np.concatenate([prefix, own]) for own in branches), short)]


def _row(ids: NDArray[np.int64]) -> TrainingSequence:
    """A row that trains all of its tokens but those of its prompt."""
    mask = np.arange(len(ids)) >= PROMPT
    return TrainingSequence(
        TokenTree.line(ids, mask=mask, advantages=1.0),
        temperature=1.0,
        row_tokens=len(ids) - PROMPT,
    )
