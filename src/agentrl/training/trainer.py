"""The trainer's process: `accelerate launch -m agentrl.training.trainer --flags`.

    resume -> publish the start weights -> [rows -> step -> commit -> publish -> checkpoint]* -> end

Order within a step, and why a crash anywhere neither loses nor doubles a row: rows are committed
to the ledger before the checkpoint that contains them is copied, and a start from the checkpoint of
step s makes every row of later steps ready again. A committed row without a newer checkpoint, or
whose checkpoint was still being written, is thus trained again, by weights that never saw it.

A trainer that was stopped or cut off for longer than its lease, and was replaced, may continue at
any line. It cannot publish, commit or lease in its successor's place (`databases.row_ledger`,
`databases.runs`), and a checkpoint that it still writes is not part of the run (`checkpoint`).
"""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator

from agentrl.configs import Config, ConfigError, parse_config
from agentrl.configs.run_flags import changed_flags, flat_flags, stored_flags
from agentrl.databases.connection import DatabaseUnreachable, RunDatabase, connect
from agentrl.databases.owners import process_name
from agentrl.databases.runs import (
    EVALUATING,
    FINISHED,
    TRAINING,
    RunHopeless,
    TrainerAlive,
    TrainerReplaced,
)
from agentrl.databases.task_file import TaskFileError
from agentrl.databases.trained_logprobs import MOST_TOKENS, KeptColumns
from agentrl.inference.protocol import ServiceUnreachable
from agentrl.stop_signals import stop_signals
from agentrl.tracebacks import log_to_stderr
from agentrl.training.background import BackgroundLoop
from agentrl.training.checkpoint.layout import (
    CheckpointError,
    TrainerState,
    checkpoint_path,
    clear_unfinished,
    recorded_config,
    supersede_others,
)
from agentrl.training.checkpoint.save import CheckpointSaver, load_checkpoint
from agentrl.training.data.flops import FlopsModel
from agentrl.training.data.stream import RowStream, StepRows
from agentrl.training.model.lora import add_adapter
from agentrl.training.model.model_folder import ModelFolderError
from agentrl.training.model.weight_gathering import GatherStalled, WeightGatherer
from agentrl.training.model.written_form import written_form
from agentrl.training.parallel import exit_process, make_mesh
from agentrl.training.parallel.agreement import (
    Agreement,
    FailedElsewhere,
    known_to_all,
    process_lost,
)
from agentrl.training.parallel.launch import join_processes
from agentrl.training.run.coordinator import HeldRun, RunCoordinator
from agentrl.training.run.drain import Drain, StepLeft
from agentrl.training.run.finite_steps import FiniteSteps, GradientKeepsFailing
from agentrl.training.run.metrics import MetricsWriter, StepTimes, step_metrics
from agentrl.training.run.publication import (
    TensorsSkipped,
    clear_unfinished_weights,
    make_publication,
)
from agentrl.training.run.startup import (
    check_input,
    check_same_flags,
    check_shared,
    learner_config,
    make_accelerator,
)
from agentrl.training.step.auxiliary import critic_start, reference_start
from agentrl.training.step.learner import Learner
from agentrl.training.step.statistics import StepStatistics

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from agentrl.training.run.trainer_figures import TrainerFigures

T = TypeVar("T")

_USER_ERRORS = (
    CheckpointError, ConfigError, DatabaseUnreachable, GatherStalled, GradientKeepsFailing,
    ModelFolderError, RunHopeless, ServiceUnreachable, TaskFileError, TensorsSkipped, TrainerAlive,
    TrainerReplaced,
)  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Train a run to its end, or until SIGTERM; returns the exit status.

    Bad input and unreachable services are one sentence on stderr and status 2.
    """
    rank = int(os.environ.get("RANK", "0"))
    log_to_stderr(
        f"%(asctime)s %(levelname)s train[{rank}] %(message)s",
        level=logging.INFO if rank == 0 else logging.WARNING,
    )
    transformers.utils.logging.disable_progress_bar()
    try:
        config = parse_config(argv, "agentrl train", os.environ)
        accelerator = make_accelerator(config)
    except ConfigError as error:  # on all processes
        return _refuse(error) if rank == 0 else 2
    try:
        with ExitStack() as stack:
            Trainer(config, accelerator, stack).run()
    except FailedElsewhere:
        return 2  # the failed process prints the error
    except _USER_ERRORS as error:
        return _refuse(error, "" if rank == 0 else f" (process {rank})")
    except RuntimeError as error:
        lost = process_lost(error)  # on all that are left, also in the middle of a step
        if lost is None:
            raise
        return _refuse(lost) if rank == 0 else 2
    return 0


def _refuse(error: Exception, where: str = "") -> int:
    print(f"agentrl train{where}: {error}", file=sys.stderr)
    return 2


def run_process(argv: Sequence[str]) -> NoReturn:
    """Run `main` as the whole process."""
    status = main(argv)
    logging.shutdown()
    exit_process(status)


class Trainer:
    """One process of the trainer.

    All processes make the same calls. Rank 0's own work (`RunCoordinator`) goes through an
    `Agreement`.
    """

    def __init__(self, config: Config, accelerator: Accelerator, stack: ExitStack) -> None:
        """Check the input, take the run, load and shard the model. `stack` undoes it."""
        self._config = config
        self._output = config.output
        self._stop = threading.Event()
        self._drain = Drain(config.sampling.drain_seconds)
        for number in stop_signals():
            signal.signal(number, self._on_signal)
        self._accelerator = accelerator
        self._database: RunDatabase | None = None
        self._coordinator: RunCoordinator | None = None
        self._background = stack.enter_context(BackgroundLoop())
        stack.callback(self._let_go)
        join_processes(accelerator)
        stack.callback(dist.destroy_process_group)
        self._agreement = Agreement()
        check_same_flags(config, accelerator.mixed_precision, self._agreement)
        torch.manual_seed(config.run.seed)
        self._tokenizer, model, sizes = self._agreement.on_all(
            lambda: check_input(config, accelerator)
        )
        check_shared(self._output, self._agreement)

        optimizer = config.optimizer
        rows_per_step = (
            optimizer.per_device_train_batch_size * optimizer.gradient_accumulation_steps * sizes.dp
        )
        self._database = database = self._agreement.on_all(self._connect)
        self._held = self._agreement.from_main(lambda: self._take_run(database, rows_per_step))
        self._figures = self._expose(stack)
        if config.services.inf_share_gpus:
            # Before anything is loaded: services have most of the memory.
            self._from_main(lambda coordinator: coordinator.release_gpus())
        learner = learner_config(config, accelerator)
        self._published_dtype = torch.bfloat16 if learner.compute.bf16 else torch.float32
        self._written_form = written_form(model)
        mesh = make_mesh(self._accelerator, config.parallel)
        if config.lora.lora_rank:
            # Frozen weights need no master weights.
            add_adapter(
                model,
                config.lora,
                frozen_dtype=self._published_dtype,
                float32=self._written_form.float32,
            )
        self._learner = Learner(
            model,
            mesh,
            learner,
            self._held.total_steps,
            reference=reference_start(config),
            value_start=critic_start(config),
            keeps_logprobs=config.run.store_trainer_logprobs,
        )
        self._gatherer = WeightGatherer(
            self._learner.model,
            self._written_form,
            self._published_dtype,
            self._learner.optimizer,
            sent_by_gpu=mesh.device.type == "cuda"
            and config.services.weight_update == "distributed",
        )
        self._saver = CheckpointSaver(
            self._output, config.checkpoint.save_total_limit, self._hold_run
        )
        stack.callback(self._saver.close)
        self._step = 0
        self._version = -1
        self._published_step = -1
        self._saved_step = -1
        self._publishing: Future[float] | None = None
        self._stall_seconds = 0.0

    def _take_run(self, database: RunDatabase, rows_per_step: int) -> HeldRun:
        """For rank 0."""
        self._coordinator = coordinator = RunCoordinator(
            database, self._config, self._output, process_name(), rows_per_step
        )
        held = self._background.run(coordinator.acquire())
        self._background.run(coordinator.enter())
        coordinator.run_beside(self._background)
        return held

    def _expose(self, stack: ExitStack) -> "TrainerFigures | None":
        """Serve figures, if `--metrics_port` asks for it. Rank 0 does."""
        if self._coordinator is None or self._config.run.metrics_port is None:
            return None
        # Here: without the flag nothing of it is loaded.
        from agentrl.training.run.trainer_figures import expose

        return expose(self._config, self._held.total_steps, self._background, stack)

    def run(self) -> None:
        """Train from the checkpoint or the start weights to the end of the run or to a signal."""
        self._resume()
        metrics = self._agreement.on_all(
            lambda: MetricsWriter(self._output, self._accelerator, self._config, self._step)
        )
        assert self._database is not None
        source = self._coordinator.source(self._stop) if self._coordinator else None
        learner = self._learner
        costs = FlopsModel.of(learner.model)
        vocab_size = learner.model.config.get_text_config().vocab_size
        stream = RowStream(
            self._background, self._database, source, learner.mesh, costs, vocab_size
        )
        # A policy that has not been evaluated on these tasks is evaluated before training.
        untried = self._step == 0 or bool(self._coordinator and self._coordinator.begins_data)
        self._publish(evaluate=untried)
        self._from_main(lambda coordinator: coordinator.report(self._step, self._version, TRAINING))
        if self._step == 0:
            self._finish_publishing()
            self._from_main(lambda coordinator: coordinator.await_evaluation(0, self._stop))
        if self._step < self._held.total_steps:
            stream.start(self._step + 1)
            try:
                self._train(stream, metrics)
            except RunHopeless as hopeless:  # raised on all ranks at once
                metrics.close()
                self._give_up(hopeless)
                raise known_to_all(hopeless) from None
        try:
            self._finish()
            self._track_evaluations(metrics)
        finally:
            metrics.close()

    def _track_evaluations(self, metrics: MetricsWriter) -> None:
        """Hand the evaluations over that ended with the run. For rank 0."""
        trackers = metrics.trackers()
        while self._coordinator and trackers:
            done = self._background.run(self._coordinator.evaluated())
            if done is None:
                return
            trackers.log_evaluation(done, None)

    def _train(self, stream: RowStream, metrics: MetricsWriter) -> None:
        """Steps until the last one, the last row, or a stop."""
        steps = FiniteSteps(self._learner, self._quarantine, self._config.run.run_name)
        ended = time.monotonic()
        while True:
            rows, wait_seconds = stream.take()
            self._agreement.meet()  # no rank begins a step that another one has left
            if rows is None:
                return
            trained_version = self._version
            last = self._step + 1 == self._held.total_steps
            if not last:
                stream.start(self._step + 2)
            began = time.monotonic()
            if self._config.services.inf_share_gpus:
                self._from_main(lambda coordinator: coordinator.release_gpus())
                self._learner.bring_back()
            try:
                statistics, rows = steps.take(self._step + 1, rows, self._between_passes)
            except StepLeft:
                self._leave_step(stream, last=last)
                return
            train_seconds = time.monotonic() - began
            self._step += 1
            began = time.monotonic()
            self._publish_due(last=last)
            if self._config.sampling.sync_sampling:
                # The commit lets samplers continue, so the services must have the new weights.
                self._finish_publishing()
            publish_seconds = time.monotonic() - began + self._gatherer.waited_seconds()
            kept = self._kept_tokens(rows)
            self._agreement.from_main(partial(self._commit, rows, kept))
            stopping = self._any_rank_stops()
            save_seconds = 0.0
            if last or stopping or self._config.checkpoint.is_due(self._step):
                save_seconds = self._save()
            times = StepTimes(
                step_seconds=time.monotonic() - ended,
                train_seconds=train_seconds,
                wait_seconds=wait_seconds,
                publish_seconds=publish_seconds,
                save_seconds=save_seconds,
                stall_seconds=self._stall_seconds,
            )
            ended = time.monotonic()
            self._agreement.from_main(
                partial(self._record, metrics, rows, trained_version, statistics, times)
            )
            if stopping and not last:
                stream.drop()
            if last or stopping:
                return

    def _quarantine(self, step: int, faults: Mapping[str, str]) -> None:
        """Collective; `faults` as all processes have found them."""
        self._from_main(lambda coordinator: coordinator.quarantine(step, faults))

    def _between_passes(self) -> None:
        """Raise `StepLeft` on all processes once one of them needs its remaining time to save."""
        (must_save,) = self._agreement.any(self._drain.must_save(self._saver.seconds))
        if must_save:
            raise StepLeft

    def _leave_step(self, stream: RowStream, *, last: bool) -> None:
        logger.info(
            "step %d is left, because it does not end within --drain_seconds %g: its rows are "
            "trained after the next start",
            self._step + 1, self._config.sampling.drain_seconds,
        )  # fmt: skip
        self._stop.set()
        self._learner.leave_step()
        if not last:
            stream.drop()

    def _kept_tokens(self, rows: StepRows) -> dict[str, KeptColumns]:
        """What is kept of the trained tokens of the step's rows, by row; on rank 0. Collective."""
        if not self._config.run.store_trainer_logprobs:
            return {}
        mine: dict[str, KeptColumns] = {}
        if self._learner.mesh.is_first_of_rows:
            kept = zip(rows.ids[rows.rank], self._learner.kept_tokens, strict=True)
            mine = {row: own.pack() for row, own in kept if len(own.logprobs) <= MOST_TOKENS}
        everywhere = self._agreement.to_main(mine)
        return {row: own for of_rank in everywhere for row, own in of_rank.items()}

    def _commit(self, rows: StepRows, kept: Mapping[str, KeptColumns]) -> None:
        """For rank 0."""
        assert self._coordinator is not None
        ids = [header.id for header in rows.headers]
        self._background.run(self._coordinator.commit(self._step, ids, kept))

    def _record(
        self,
        metrics: MetricsWriter,
        rows: StepRows,
        trained_version: int,
        statistics: StepStatistics | None,
        times: StepTimes,
    ) -> None:
        """Record a step in database, metrics and log; a skipped one has no metrics. For rank 0."""
        assert self._coordinator is not None
        step, total = self._step, self._held.total_steps
        self._background.run(self._coordinator.report(step, self._version, TRAINING))
        if statistics is None:
            if self._figures is not None:
                self._figures.skipped(step, self._version, times)
            logger.error("step %d of %d left the weights as they were", step, total)
            return
        counts = self._background.run(self._coordinator.counts(step))
        outages = self._background.run(self._coordinator.outages())
        line = step_metrics(
            step, trained_version, statistics, rows.headers, rows.balance, times, counts,
            len(outages),
        )  # fmt: skip
        metrics.write(line)
        if trackers := metrics.trackers(step):
            rollouts = self._background.run(
                self._coordinator.rollouts(rows.headers, trackers.pages)
            )
            trackers.log_rollouts(rollouts, step)
            if done := self._background.run(self._coordinator.evaluated()):
                trackers.log_evaluation(done, step)
        if self._figures is not None:
            self._figures.trained(line, self._version)
        self._background.run(self._coordinator.keep_metrics(step, asdict(line)))
        logger.info(
            "step %d of %d: reward %.3f, loss %.4g, gradient norm %.3g, %.2f s",
            step, total, line.reward_mean, line.loss, line.grad_norm, line.step_seconds,
        )  # fmt: skip

    def _resume(self) -> None:
        """Load the checkpoint to resume from, if any, and reset ledger and folder to its step."""
        checkpoint = self._held.checkpoint
        if checkpoint is not None:
            state = load_checkpoint(checkpoint, self._learner)
            self._step = self._saved_step = state.step
            logger.info("going on from %s", checkpoint)
            for change in changed_flags(flat_flags(state.config), stored_flags(self._config)):
                logger.info("%s (since step %d)", change, state.step)
        if self._figures is not None:
            self._figures.step = self._step
        # The first publication increments the version.
        self._version = self._agreement.from_main(self._start) - 1

    def _start(self) -> int:
        """Reset ledger and folder to the step. Returns the version to publish. For rank 0."""
        assert self._coordinator is not None
        version = self._background.run(self._coordinator.start(self._step))
        clear_unfinished(self._output)
        clear_unfinished_weights(self._output)
        supersede_others(self._output, self._step, self._coordinator.starts)
        return version

    def _publish_due(self, *, last: bool) -> None:
        """Publish the weights of a step if it is the turn of this step."""
        evaluated, every = self._config.data.eval_steps, self._config.services.publish_steps
        evaluate = bool(evaluated and self._step % evaluated == 0)
        if last or evaluate or self._step % every == 0:
            self._publish(evaluate=evaluate)

    def _publish(self, *, evaluate: bool) -> None:
        """Publish the present weights as the next version, in the background."""
        self._finish_publishing()
        staged = self._gatherer.stage()
        self._version += 1
        self._published_step = self._step
        if self._config.services.inf_share_gpus:
            # All processes release their memory before a service takes it.
            staged.copied.result()
            self._learner.offload()
            if self._accelerator.device.type == "cuda":
                torch.cuda.empty_cache()
            dist.barrier()
        if self._coordinator:
            publication = make_publication(
                self._output, self._version, self._step, staged, self._written_form,
                self._tokenizer, self._published_dtype,
            )  # fmt: skip
            # Watched, because a wait for rows never ends if no service has weights.
            self._publishing = self._background.watch(
                self._coordinator.publish(publication, evaluate)
            )

    def _finish_publishing(self) -> None:
        """Wait until the services have the last publication. Raises its error."""

        def finish() -> None:
            if self._publishing is not None:
                self._stall_seconds = self._background.result(self._publishing)
                self._publishing = None

        self._agreement.from_main(finish)

    def _save(self) -> float:
        """Begin to save a checkpoint in the background.

        Returns the seconds that training paused: for the copy, and for the previous save if it was
        still running.
        """
        began = time.monotonic()
        took, allowed = self._saver.seconds, self._config.sampling.drain_seconds
        if self._coordinator and took is not None and took > allowed:
            logger.warning(
                "the last checkpoint took %.0f s, longer than --drain_seconds %g: a run that is "
                "stopped may be ended before one is written; raise --drain_seconds", took, allowed,
            )  # fmt: skip
        state = TrainerState(
            step=self._step,
            version=self._version,
            run_name=self._config.run.run_name,
            config=recorded_config(self._config),
            fence=self._held.fence,
            processes=dist.get_world_size(),
        )
        self._saver.save(self._learner, state)
        self._saved_step = self._step
        return time.monotonic() - began

    def _hold_run(self) -> None:
        """Raise `TrainerReplaced` if another trainer has taken the run. For any thread."""
        if self._coordinator:
            self._background.submit(self._coordinator.hold()).result()

    def _finish(self) -> None:
        """Save the last checkpoint and, unless the run was stopped, evaluate it."""
        stopped = self._any_rank_stops()
        # A run that was stopped before its first step needs no checkpoint of the start weights.
        if self._saved_step < self._step and (self._step > 0 or not stopped):
            self._save()
        self._saver.wait()
        if self._published_step < self._step and not stopped:
            self._publish(evaluate=False)  # the rows ended before the last step
        self._finish_publishing()
        self._from_main(lambda coordinator: coordinator.close_publisher())
        self._from_main(lambda coordinator: coordinator.give_back_rows())
        dist.barrier()
        # The others leave; the evaluation needs no collective.
        if self._coordinator and not stopped:
            run, background = self._coordinator, self._background
            background.run(run.report(self._step, self._version, EVALUATING))
            background.run(run.evaluate(self._step, self._stop))
            if not self._stop.is_set():
                background.run(run.report(self._step, self._version, FINISHED))
        saved = "there is nothing to save yet"
        if self._saved_step >= 0:
            saved = f"saved {checkpoint_path(self._output, self._saved_step)}"
        logger.info(
            "%s after step %d of %d; %s", "stopped" if self._stop.is_set() else "finished",
            self._step, self._held.total_steps, saved,
        )  # fmt: skip

    def _give_up(self, hopeless: RunHopeless) -> None:
        """Save the trained weights and store why the run ends, for samplers and launcher."""
        self._stop.set()
        self._finish()
        self._from_main(lambda coordinator: coordinator.give_up(str(hopeless)))

    def _any_rank_stops(self) -> bool:
        """Whether any process got a signal; all then stop after the same step.

        Raises the error of a failed background save.
        """
        stopping, failed = self._agreement.any(self._stop.is_set(), self._saver.failed)
        if failed:
            self._saver.wait()
        if stopping:
            self._stop.set()
        return stopping  # not `_stop`, which a later signal may have set on this process only

    def _from_main(self, ask: Callable[[RunCoordinator], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine of rank 0's coordinator and return its result on all processes."""

        def here() -> T:
            assert self._coordinator is not None
            return self._background.run(ask(self._coordinator))

        return self._agreement.from_main(here)

    def _connect(self) -> RunDatabase:
        url = self._config.run.db_connection_string
        if url is None:
            raise ConfigError(
                "DB_URL or --db_connection_string is needed: the URL of the run's MongoDB "
                "(`agentrl launch` starts one and gives it)"
            )
        name, timeout = self._config.run.run_name, self._config.sampling.startup_timeout
        return self._background.run(connect(url, name, timeout))

    def _let_go(self) -> None:
        """Release the run's lease for the next trainer, and close the database."""
        try:
            if self._coordinator:
                self._background.submit(self._coordinator.release()).result()
        finally:
            if self._database:
                self._background.submit(self._database.close()).result()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Stop gracefully, after the current step if there is time for it."""
        self._drain.begin()
        self._stop.set()


if __name__ == "__main__":
    run_process(sys.argv[1:])
