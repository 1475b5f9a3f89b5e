"""The process of supervised training: `accelerate launch -m agentrl.training.supervised.process`.

    resume -> [rows -> step -> held-out loss -> checkpoint]* -> end

`--train_file` and `--eval_file` are folders of token trees (`databases.tree_file`), which
`agentrl sft` makes of conversations and `agentrl dpo` of pairs of answers. With `--loss_type` rows
are pairs, and otherwise demonstrations; all else is the same. Which rows a step has follows from
the seed and the step, so that a checkpoint needs no more than its step. Nothing here needs a
database.
"""

import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator

from agentrl.configs import Config, ConfigError
from agentrl.configs.digests import model_digest
from agentrl.configs.flags import FLAGS
from agentrl.configs.preferences import PreferenceConfig
from agentrl.configs.run_flags import changed_flags, flat_flags, refuse_fixed, stored_flags
from agentrl.configs.supervised_verbs import parse_supervised
from agentrl.databases.tree_file import TreeFile, TreeFileError
from agentrl.stop_signals import stop_signals
from agentrl.tracebacks import log_to_stderr
from agentrl.training.checkpoint.layout import (
    CheckpointError,
    TrainerState,
    checkpoint_path,
    clear_unfinished,
    list_checkpoints,
    read_state,
    recorded_config,
)
from agentrl.training.checkpoint.save import CheckpointSaver, load_checkpoint
from agentrl.training.data.flops import FlopsModel
from agentrl.training.data.stream import StepRows
from agentrl.training.model.lora import add_adapter
from agentrl.training.model.model_folder import ModelFolderError
from agentrl.training.model.written_form import written_form
from agentrl.training.parallel import exit_process, make_mesh
from agentrl.training.parallel.agreement import Agreement, FailedElsewhere, process_lost
from agentrl.training.parallel.launch import join_processes
from agentrl.training.run.finite_steps import FiniteSteps, GradientKeepsFailing
from agentrl.training.run.metrics import MetricsWriter
from agentrl.training.run.startup import (
    check_input,
    check_same_flags,
    check_shared,
    learner_config,
    make_accelerator,
)
from agentrl.training.step.auxiliary import reference_start
from agentrl.training.step.held_out import HeldOut, held_out
from agentrl.training.step.learner import Learner
from agentrl.training.step.statistics import StepStatistics
from agentrl.training.supervised.file_rows import FileRows, place_of
from agentrl.training.supervised.metrics import (
    StepSize,
    SupervisedMetrics,
    held_out_sentence,
    metrics_line,
    sentence,
)
from agentrl.training.supervised.order import RowOrder
from agentrl.training.supervised.reference_once import answer_means, kept_means

logger = logging.getLogger(__name__)

_PREFERENCE = "preference"  # of a checkpoint's flags: those of `PreferenceConfig`
_USER_ERRORS = (
    CheckpointError, ConfigError, GradientKeepsFailing, ModelFolderError, TreeFileError,
)  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Train to the end, or until SIGTERM; returns the exit status.

    Bad input is one sentence on stderr and status 2.
    """
    rank = int(os.environ.get("RANK", "0"))
    verb = "dpo" if "--loss_type" in argv else "sft"
    log_to_stderr(
        f"%(asctime)s %(levelname)s {verb}[{rank}] %(message)s",
        level=logging.INFO if rank == 0 else logging.WARNING,
    )
    transformers.utils.logging.disable_progress_bar()
    try:
        config, preference = parse_supervised(argv, f"agentrl {verb}", os.environ)
        accelerator = make_accelerator(config)
    except ConfigError as error:  # on all processes
        return _refuse(verb, error) if rank == 0 else 2
    try:
        with ExitStack() as stack:
            SupervisedTrainer(config, preference, accelerator, stack).run()
    except FailedElsewhere:
        return 2  # the failed process prints the error
    except _USER_ERRORS as error:
        return _refuse(verb, error)
    except RuntimeError as error:
        lost = process_lost(error)
        if lost is None:
            raise
        return _refuse(verb, lost) if rank == 0 else 2
    return 0


def _refuse(verb: str, error: Exception) -> int:
    print(f"agentrl {verb}: {error}", file=sys.stderr)
    return 2


def run_process(argv: Sequence[str]) -> NoReturn:
    """Run `main` as the whole process."""
    status = main(argv)
    logging.shutdown()
    exit_process(status)


class SupervisedTrainer:
    """One process of supervised training. All processes make the same calls."""

    def __init__(
        self,
        config: Config,
        preference: PreferenceConfig | None,
        accelerator: Accelerator,
        stack: ExitStack,
    ) -> None:
        """Check the input, load and shard the models. `stack` undoes it.

        `preference`: the loss if rows are pairs.
        """
        self._config = config
        self._preference = preference
        self._output = config.output
        self._accelerator = accelerator
        self._stop = threading.Event()
        for number in stop_signals():
            signal.signal(number, self._on_signal)
        join_processes(accelerator)
        stack.callback(dist.destroy_process_group)
        self._agreement = agreement = Agreement()
        check_same_flags(config, accelerator.mixed_precision, agreement)
        torch.manual_seed(config.run.seed)
        _, model, sizes = agreement.on_all(lambda: check_input(config, accelerator))
        reference = agreement.on_all(lambda: reference_start(config))
        check_shared(self._output, agreement)
        train, held_out_rows = agreement.on_all(self._open_rows)

        optimizer = config.optimizer
        self._rows_per_step = (
            optimizer.per_device_train_batch_size * optimizer.gradient_accumulation_steps * sizes.dp
        )
        epochs = config.data.num_train_epochs
        by_epochs = math.ceil(epochs * len(train) / self._rows_per_step)
        self._total = optimizer.max_steps if optimizer.max_steps > 0 else by_epochs
        self._checkpoint = agreement.from_main(lambda: self._find_checkpoint(train))
        self._done = agreement.from_main(self._nothing_to_do)
        self._once = preference is not None and self._takes_reference_once(preference, len(train))
        learner = replace(learner_config(config, accelerator), preference=preference)
        mesh = make_mesh(accelerator, config.parallel)
        if config.lora.lora_rank:
            frozen = torch.bfloat16 if learner.compute.bf16 else torch.float32
            kept = written_form(model).float32
            add_adapter(model, config.lora, frozen_dtype=frozen, float32=kept)
        self._reference, self._compute = reference, learner.compute
        self._learner = Learner(
            model, mesh, learner, self._total,
            reference=None if self._once else reference, reference_in_rows=self._once,
        )  # fmt: skip
        costs = FlopsModel.of(self._learner.model)
        self._train = FileRows(train, costs, mesh)
        self._held_out = None if held_out_rows is None else FileRows(held_out_rows, costs, mesh)
        self._order = RowOrder(len(train), config.run.seed)
        self._saver = CheckpointSaver(self._output, config.checkpoint.save_total_limit, _nothing)
        stack.callback(self._saver.close)
        self._step = self._saved_step = 0

    def run(self) -> None:
        """Train from the checkpoint or the start weights to the last step or to a signal."""
        if self._done is not None:
            logger.info("%s; another --run_name trains anew", self._done)
            return
        # Before the optimizer's state is there, so that the reference's model costs no memory.
        if self._once and not self._compute_reference():
            logger.info("stopped before the first step")
            return
        if self._checkpoint is not None:
            state = load_checkpoint(self._checkpoint, self._learner)
            self._step = self._saved_step = state.step
            logger.info("going on from %s", self._checkpoint)
            for change in self._changes(state.config):
                logger.info("%s (since step %d)", change, state.step)
        self._agreement.from_main(lambda: clear_unfinished(self._output))
        metrics = self._agreement.on_all(
            lambda: MetricsWriter(self._output, self._accelerator, self._config, self._step)
        )
        if self._held_out and self._step == 0:
            logger.info("step 0 of %d: %s", self._total, held_out_sentence(self._evaluate()))
        steps = FiniteSteps(self._learner, self._leave_out, self._config.run.run_name)
        stopping = self._stops()
        while self._step < self._total and not stopping:
            began = time.monotonic()
            rows = self._train.of(self._order.step(self._step + 1, self._rows_per_step))
            training = time.monotonic()
            statistics, rows = steps.take(self._step + 1, rows, _nothing)
            trained = time.monotonic() - training
            self._step += 1
            last = self._step == self._total
            looked = self._evaluate() if self._is_evaluated(last=last) else None
            stopping = self._stops()
            if last or stopping or self._config.checkpoint.is_due(self._step):
                self._save()
            if statistics is not None:
                size = self._size(statistics, rows, time.monotonic() - began, trained)
                line = metrics_line(self._step, time.time(), statistics, looked, size)
                metrics.write(line)
                self._log(line, looked)
        if self._saved_step < self._step:
            self._save()
        self._saver.wait()
        metrics.close()
        saved = f"; saved {checkpoint_path(self._output, self._step)}" if self._step else ""
        logger.info(
            "%s after step %d of %d%s", "stopped" if self._step < self._total else "finished",
            self._step, self._total, saved,
        )  # fmt: skip

    def _open_rows(self) -> tuple[TreeFile, TreeFile | None]:
        files = self._config.data
        if files.train_file is None:
            raise ConfigError(
                "--train_file is needed: `agentrl sft` and `agentrl dpo` prepare it and give it"
            )
        held_out = None if files.eval_file is None else TreeFile(Path(files.eval_file))
        return TreeFile(Path(files.train_file)), held_out

    def _takes_reference_once(self, preference: PreferenceConfig, n_pairs: int) -> bool:
        """Whether the reference is computed before the first step, and not in each."""
        if preference.precompute_ref_log_probs is not None:
            return preference.precompute_ref_log_probs
        return (self._total - 1) * self._rows_per_step >= n_pairs  # a step begins a second epoch

    def _compute_reference(self) -> bool:
        """Give the rows that are still to come the reference's logprobs. Collective.

        Returns False if it was stopped.
        """
        begun = 0 if self._checkpoint is None else read_state(self._checkpoint).step
        steps = range(begun + 1, self._total + 1)
        to_come = {row for step in steps for row in self._order.step(step, self._rows_per_step)}
        wanted: dict[FileRows, Sequence[int]] = {self._train: sorted(to_come)}
        if self._held_out is not None:
            wanted[self._held_out] = range(len(self._held_out))
        start = self._reference or self._config.model
        load = cache(lambda: self._learner.load_reference(self._reference))
        for rows, which in wanted.items():
            rows.reference = answer_means(
                rows, which, load, self._compute,
                kept_means(rows.file.folder, start, self._compute), self._rows_per_step,
                self._agreement, self._stops,
            )  # fmt: skip
            if rows.reference is None:
                return False
        return True

    def _find_checkpoint(self, train: TreeFile) -> Path | None:
        """The checkpoint to go on from, of the same rows and model. For rank 0.

        Raises `CheckpointError` or `ConfigError`.
        """
        wanted = (self._config.checkpoint.resume_from_checkpoint or "true").lower()
        found = list_checkpoints(self._output)
        if wanted == "false":
            if found:
                raise ConfigError(
                    f"--resume_from_checkpoint false: {self._output} has {found[-1].name}; give "
                    "another --run_name, or delete it"
                )
            return None
        if wanted != "true":
            found = [Path(self._config.checkpoint.resume_from_checkpoint or "")]
        if not found:
            return None
        saved = read_state(found[-1]).config
        refuse_fixed(flat_flags(saved), stored_flags(self._config), str(found[-1]))
        if not self._config.run.change_data:
            self._refuse_other_data(found[-1], saved, train)
        return found[-1]

    def _refuse_other_data(
        self, checkpoint: Path, saved: Mapping[str, Any], train: TreeFile
    ) -> None:
        """Raise `ConfigError` if a checkpoint is of another model or of other rows."""
        was, now = Path(saved["model"]["model_name_or_path"]), self._config.model
        model = Path(now.model_name_or_path or "")
        if not _is_same_model(was, model):
            raise ConfigError(
                f"--model {model}: {checkpoint} was trained from another model, {was}; give "
                "another --run_name, or --change_data true to go on with this one"
            )
        before, rows = Path(saved["data"]["train_file"]), self._config.data.train_file
        if before.name != Path(rows or "").name:
            raise ConfigError(
                f"{_source(train)}: {checkpoint} was trained on other rows"
                f"{_source_of(before)}; give another --run_name, or --change_data true to go on "
                "with these"
            )

    def _nothing_to_do(self) -> str | None:
        """Why nothing is left to train; None if something is. For rank 0.

        Raises `ConfigError` if flags have changed, which would have no effect.
        """
        state = None if self._checkpoint is None else read_state(self._checkpoint)
        if state is None or state.step < self._total:
            return None
        done = f"nothing to do: {self._output} is finished after step {state.step}"
        if changes := self._changes(state.config):
            raise ConfigError(
                f"{done}, and flags differ ({', '.join(changes)}); another --run_name trains anew"
            )
        return done

    def _changes(self, saved: Mapping[str, Any]) -> list[str]:
        """The flags that differ from those of a checkpoint."""
        changes = changed_flags(flat_flags(saved), stored_flags(self._config))
        return [*changes, *self._changed_preference(saved)]

    def _is_evaluated(self, *, last: bool) -> bool:
        every = self._config.data.eval_steps
        if self._held_out is None or every == 0:
            return False
        return last or bool(every and self._step % every == 0)

    def _evaluate(self) -> HeldOut:
        """The held-out rows with the present weights. Collective."""
        rows, size = self._held_out, self._rows_per_step
        assert rows is not None, "there are held-out rows"
        parts = (
            rows.of(range(first, min(first + size, len(rows)))).mine
            for first in range(0, len(rows), size)
        )
        return held_out(self._learner, parts)

    def _leave_out(self, step: int, faults: Mapping[str, str]) -> None:
        for row, reason in faults.items():
            logger.error("step %d: %s is left out: %s", step, row, reason)

    def _save(self) -> None:
        """Begin to save a checkpoint in the background. Collective."""
        state = TrainerState(
            step=self._step,
            version=self._step,
            run_name=self._config.run.run_name,
            config=self._recorded(),
            fence=0,
            processes=dist.get_world_size(),
        )
        self._saver.save(self._learner, state)
        self._saved_step = self._step

    def _recorded(self) -> dict[str, dict[str, Any]]:
        recorded = recorded_config(self._config)
        if self._preference is not None:
            recorded[_PREFERENCE] = asdict(self._preference)
        return recorded

    def _changed_preference(self, saved: Mapping[str, Any]) -> list[str]:
        before = saved.get(_PREFERENCE, {})
        now = self._recorded().get(_PREFERENCE, {})
        return [
            f"--{name} {before[name]} → {value}"
            for name, value in now.items()
            if name in before and name not in FLAGS and before[name] != value
        ]

    def _stops(self) -> bool:
        """Whether any process got a signal. Raises the error of a failed save. Collective."""
        stopping, failed = self._agreement.any(self._stop.is_set(), self._saver.failed)
        if failed:
            self._saver.wait()
        return stopping

    def _size(
        self, statistics: StepStatistics, rows: StepRows, seconds: float, trained: float
    ) -> StepSize:
        order = self._order.step(self._step, self._rows_per_step)
        trained_rows = [order[place_of(row)] for of_rank in rows.ids for row in of_rank]
        n_tokens = int(self._train.file.n_tokens[trained_rows].sum())
        return StepSize(
            epoch=self._step * self._rows_per_step / len(self._train),
            n_rows=len(trained_rows),
            n_tokens=n_tokens,
            n_train_tokens=statistics.n_train_tokens,
            step_seconds=seconds,
            train_seconds=trained,
            tokens_per_second=n_tokens / trained,
        )

    def _log(self, line: SupervisedMetrics, looked: HeldOut | None) -> None:
        if line.step % self._config.run.logging_steps and looked is None:
            return
        logger.info("step %d of %d: %s", line.step, self._total, sentence(line, looked))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Stop after the current step."""
        self._stop.set()


def _is_same_model(was: Path, now: Path) -> bool:
    """Whether both folders have one model, by its content; by its name if one is gone."""
    digests = model_digest(was), model_digest(now)
    return was.name == now.name if None in digests else digests[0] == digests[1]


def _source(rows: TreeFile) -> str:
    """Where rows come from, by the flag that gave them."""
    first, _, _ = rows.place(0).partition(":")
    if first.startswith(("record ", "group ")):
        return "--from_run"
    return f"--train_file {first.partition(' row ')[0]}"


def _source_of(folder: Path) -> str:
    """The same in brackets, of the folder of rows; empty if it is gone."""
    try:
        return f" ({_source(TreeFile(folder))})"
    except TreeFileError:
        return ""


def _nothing() -> None:
    """What `CheckpointSaver` and `FiniteSteps` ask between their parts: nobody takes a run away."""


if __name__ == "__main__":
    run_process(sys.argv[1:])
