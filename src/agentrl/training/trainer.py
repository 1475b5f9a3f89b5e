"""The trainer's process: `accelerate launch -m agentrl.training.trainer --flags`.

    resume -> publish the start weights -> [rows -> step -> commit -> publish -> checkpoint]* -> end

Order within a step, and why a crash anywhere neither loses nor doubles a row: rows are committed
to the ledger before the checkpoint that contains them is copied, and a start from the checkpoint of
step s makes every row of later steps ready again. A committed row without a newer checkpoint, or
whose checkpoint was still being written, is thus trained again, by weights that never saw it.

A trainer that was stopped for longer than its lease, or cut off, and is replaced meanwhile, may
wake at any line. It cannot publish, commit or lease in its successor's place (`databases.rows`,
`databases.runs`), and a checkpoint that it still writes is no part of the run (`checkpoint`).
"""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch
import torch.distributed as dist
import transformers

from agentrl.configs import TREE_ATTENTION, Config, ConfigError, check_tracker, parse_config
from agentrl.databases.connection import DatabaseUnreachable, RunDatabase, connect
from agentrl.databases.owners import process_name
from agentrl.databases.runs import EVALUATING, FINISHED, TRAINING, TrainerAlive, TrainerReplaced
from agentrl.databases.task_file import TaskFileError
from agentrl.inference.protocol import ServiceUnreachable
from agentrl.training.background import BackgroundLoop
from agentrl.training.checkpoint import (
    CheckpointError,
    TrainerState,
    clear_unfinished,
    recorded_config,
    supersede_others,
)
from agentrl.training.checkpoint_io import CheckpointSaver, load_checkpoint
from agentrl.training.compilation import check_compiler
from agentrl.training.costs import CostModel
from agentrl.training.duties import RunDuties
from agentrl.training.learner import Learner
from agentrl.training.loading import empty_model
from agentrl.training.lora import add_adapter
from agentrl.training.metrics import MetricsWriter, StepTimes, step_metrics
from agentrl.training.model_folder import ModelFolderError, load_tokenizer
from agentrl.training.models_beside import critic_start, reference_start
from agentrl.training.parallel import ParallelSizes, check_model, exit_process, make_mesh
from agentrl.training.publication import gather_publication
from agentrl.training.startup import check_writable, checkpoint_to_resume, make_accelerator
from agentrl.training.step import StepOptions
from agentrl.training.stream import RowStream, StepRows

logger = logging.getLogger(__name__)

_USER_ERRORS = (
    CheckpointError, ConfigError, DatabaseUnreachable, ModelFolderError, ServiceUnreachable,
    TaskFileError, TrainerAlive, TrainerReplaced,
)  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Train a run to its end, or until SIGTERM; returns the exit status.

    Bad input and unreachable services are one sentence on stderr and status 2.
    """
    rank = int(os.environ.get("RANK", "0"))
    logging.basicConfig(
        level=logging.INFO if rank == 0 else logging.WARNING,
        format=f"%(asctime)s %(levelname)s train[{rank}] %(message)s",
    )
    transformers.utils.logging.disable_progress_bar()
    try:
        config = parse_config(argv, prog="agentrl train")
        with ExitStack() as stack:
            Trainer(config, stack).run()
    except _USER_ERRORS as error:
        if rank == 0:
            print(f"agentrl train: {error}", file=sys.stderr)
        return 2
    return 0


def run_process(argv: Sequence[str]) -> NoReturn:
    """`main` as a whole process, which ends with it."""
    status = main(argv)
    logging.shutdown()
    exit_process(status)


class Trainer:
    """One process of the trainer. All processes do the same, but for what `RunDuties` does."""

    def __init__(self, config: Config, stack: ExitStack) -> None:
        """Check the input, take the run, load and shard the model. `stack` undoes it."""
        self._config = config
        self._output = config.output
        self._stop = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        check_tracker(config.run.report_to)
        self._tokenizer = load_tokenizer(config.model.model_name_or_path)
        check_writable(self._output)
        checkpoint_to_resume(config, [])  # refused here, if it cannot be, and chosen later
        self._accelerator = make_accelerator(config)
        if config.parallel.compile:
            check_compiler(self._accelerator.device)
        torch.manual_seed(config.run.seed)
        sizes = ParallelSizes.of(config.parallel, self._accelerator.num_processes)
        model = empty_model(config.model)
        check_model(model, sizes, config.parallel.cp_mode)

        optimizer = config.optimizer
        rows_per_step = (
            optimizer.per_device_train_batch_size * optimizer.gradient_accumulation_steps * sizes.dp
        )
        self._background = stack.enter_context(BackgroundLoop())
        self._database = self._connect()
        stack.callback(lambda: self._background.submit(self._database.close()).result())
        self._duties: RunDuties | None = None
        if self._accelerator.is_main_process:
            duties = RunDuties(self._database, config, self._output, process_name(), rows_per_step)
            self._background.run(duties.acquire())
            stack.callback(lambda: self._background.submit(duties.release()).result())
            duties.run_beside(self._background)
            self._duties = duties

        bf16 = config.model.bf16 or self._accelerator.mixed_precision == "bf16"
        self._published_dtype = torch.bfloat16 if bf16 else torch.float32
        mesh = make_mesh(self._accelerator, config.parallel)
        stack.callback(dist.destroy_process_group)
        self._total_steps = self._from_main(
            lambda duties: self._background.run(duties.count_steps())
        )
        if config.lora.lora_rank:
            # What is not trained needs no master weights.
            add_adapter(model, config.lora, frozen_dtype=self._published_dtype)
        self._learner = Learner(
            model,
            mesh,
            config.loss,
            optimizer,
            StepOptions(
                micro_batch_tokens=config.micro_batch_tokens,
                pad_to_multiple_of=config.parallel.pad_to_multiple_of,
                loss_seq_chunk_size=config.parallel.loss_seq_chunk_size,
                max_grad_norm=optimizer.max_grad_norm,
                log_grad_norms=config.optimizer.log_grad_norms,
            ),
            self._total_steps,
            start=config.model,
            bf16=bf16,
            gradient_checkpointing=config.model.gradient_checkpointing,
            activation_offloading=config.parallel.activation_offloading,
            param_offload=config.parallel.param_offload,
            compiled=config.parallel.compile,
            trees=config.model.attention_implementation == TREE_ATTENTION,
            reference=reference_start(config),
            value_start=critic_start(config),
            critic=config.critic,
        )
        self._saver = CheckpointSaver(
            self._output, config.checkpoint.save_total_limit, self._hold_run
        )
        stack.callback(self._saver.close)
        self._step = 0
        self._version = -1
        self._saved_step = -1
        self._publishing: Future[float] | None = None
        self._stall_seconds = 0.0

    def run(self) -> None:
        """From the checkpoint, or the start weights, to the end of the run or to SIGTERM."""
        self._resume()
        metrics = MetricsWriter(self._output, self._accelerator, self._config, self._step)
        source = self._duties.source(self._stop) if self._duties else None
        learner = self._learner
        costs = CostModel.of(learner.model)
        stream = RowStream(self._background, self._database, source, learner.mesh, costs)
        self._publish(evaluate=self._step == 0)
        self._report(TRAINING)
        if self._duties and self._step == 0:
            self._finish_publishing()
            self._background.run(self._duties.await_evaluation(0, self._stop))
        if self._step < self._total_steps:
            stream.start(self._step + 1)
            self._train(stream, metrics)
        metrics.close()
        self._finish()

    def _train(self, stream: RowStream, metrics: MetricsWriter) -> None:
        """Steps until the last one, the last row, or a stop."""
        ended = time.monotonic()
        while True:
            rows, wait_seconds = stream.take()
            if rows is None:
                return
            trained_version = self._version
            last = self._step + 1 == self._total_steps
            if not last:
                stream.start(self._step + 2)
            began = time.monotonic()
            if self._config.services.inf_share_gpus:
                self._from_main(lambda duties: self._background.run(duties.release_gpus()))
            statistics = self._learner.step(rows.mine)
            train_seconds = time.monotonic() - began
            self._step += 1
            began = time.monotonic()
            eval_steps = self._config.data.eval_steps
            self._publish(evaluate=bool(eval_steps) and self._step % eval_steps == 0)
            if self._config.sampling.sync_sampling:
                # The commit lets samplers go on: by then the services must have the new weights.
                self._finish_publishing()
            publish_seconds = time.monotonic() - began
            self._commit(rows)
            stopping = self._any_rank_stops()
            save_seconds = 0.0
            if last or stopping or self._step % self._config.checkpoint.save_steps == 0:
                save_seconds = self._save()
            self._report(TRAINING)
            times = StepTimes(
                step_seconds=time.monotonic() - ended,
                train_seconds=train_seconds,
                wait_seconds=wait_seconds,
                publish_seconds=publish_seconds,
                save_seconds=save_seconds,
                stall_seconds=self._stall_seconds,
            )
            ended = time.monotonic()
            if self._duties:
                counts = self._background.run(self._duties.counts())
                line = step_metrics(
                    self._step,
                    trained_version,
                    statistics,
                    rows.headers,
                    rows.balance,
                    times,
                    counts,
                )
                metrics.write(line)
                logger.info(
                    "step %d of %d: reward %.3f, loss %.4g, gradient norm %.3g, %.2f s",
                    self._step, self._total_steps, line.reward_mean, line.loss, line.grad_norm,
                    line.step_seconds,
                )  # fmt: skip
            if stopping and not last:
                stream.drop()
            if last or stopping:
                return

    def _resume(self) -> None:
        """Load the checkpoint, if there is one to go on from, and bring ledger and folder to it."""
        checkpoint = self._agree_on_checkpoint()
        if checkpoint is not None:
            state = load_checkpoint(checkpoint, self._learner)
            self._step = self._saved_step = state.step
            logger.info("going on from %s", checkpoint)
        self._version = self._from_main(
            lambda duties: self._background.run(duties.start(self._step))
        )
        if self._duties:
            clear_unfinished(self._output)
            supersede_others(self._output, self._step, self._duties.starts)
        self._version -= 1  # the version of the first publication is the next one

    def _publish(self, *, evaluate: bool) -> None:
        """Gather the weights as the next version; services get them while training goes on."""
        self._finish_publishing()
        publication = gather_publication(
            self._output, self._version + 1, self._step, self._learner.model, self._tokenizer,
            self._published_dtype,
        )  # fmt: skip
        self._version += 1
        if self._config.services.inf_share_gpus:
            # All processes give back what they cached before a service takes it.
            if self._accelerator.device.type == "cuda":
                torch.cuda.empty_cache()
            dist.barrier()
        if self._duties:
            self._publishing = self._background.submit(self._duties.publish(publication, evaluate))

    def _finish_publishing(self) -> None:
        """Wait for the services to have the last publication, and raise its error."""
        if self._publishing is not None:
            self._stall_seconds = self._background.result(self._publishing)
            self._publishing = None

    def _commit(self, rows: StepRows) -> None:
        if self._duties:
            ids = [header.id for header in rows.headers]
            self._background.run(self._duties.commit(self._step, ids))

    def _save(self) -> float:
        """Begin to save a checkpoint, which is written while training goes on.

        Returns the seconds that training stood still: for the copy, and for the save before it if
        that still ran.
        """
        began = time.monotonic()
        state = TrainerState(
            step=self._step,
            version=self._version,
            run_name=self._config.run.run_name,
            config=recorded_config(self._config),
            fence=self._duties.fence if self._duties else 0,  # rank 0 writes it
            processes=dist.get_world_size(),
        )
        self._saver.save(self._learner, state)
        self._saved_step = self._step
        return time.monotonic() - began

    def _hold_run(self) -> None:
        """Raises `TrainerReplaced` if another trainer has taken the run. For any thread."""
        if self._duties:
            self._background.submit(self._duties.hold()).result()

    def _finish(self) -> None:
        """The last checkpoint and evaluation; or, after a stop, the checkpoint only."""
        stopped = self._any_rank_stops()
        if self._saved_step < self._step:
            self._save()
        self._saver.wait()
        if self._duties:
            self._finish_publishing()
            self._background.run(self._duties.close_publisher())
            self._background.run(self._duties.give_back_rows())
        # The others leave; the evaluation needs no collective.
        dist.barrier()
        if self._duties and not stopped:
            self._report(EVALUATING)
            self._background.run(self._duties.evaluate(self._step, self._stop))
            if not self._stop.is_set():
                self._report(FINISHED)
        logger.info(
            "%s after step %d of %d",
            "stopped" if self._stop.is_set() else "finished", self._step, self._total_steps,
        )  # fmt: skip

    def _report(self, status: str) -> None:
        if self._duties:
            self._background.run(self._duties.report(self._step, self._version, status))

    def _any_rank_stops(self) -> bool:
        """Whether any process got a signal; then all of them stop after the same step.

        Raises `CheckpointError` on all processes once the save that ran has failed.
        """
        flags = torch.tensor(
            [int(self._stop.is_set()), int(self._saver.failed)], device=self._accelerator.device
        )
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        stopping, failed = flags.tolist()
        if failed:
            self._saver.wait()
        if stopping:
            self._stop.set()
        return self._stop.is_set()

    def _from_main(self, ask: Callable[[RunDuties], int]) -> int:
        """A number that rank 0 finds out, on all ranks."""
        value = ask(self._duties) if self._duties else 0
        number = torch.tensor(value, dtype=torch.int64, device=self._accelerator.device)
        dist.broadcast(number, src=0)
        return int(number.item())

    def _agree_on_checkpoint(self) -> Path | None:
        """The checkpoint to go on from, as rank 0 finds it."""
        found: list[Path | None] = [None]
        if self._duties:
            found = [checkpoint_to_resume(self._config, self._duties.starts)]
        dist.broadcast_object_list(found, src=0)
        return found[0]

    def _connect(self) -> RunDatabase:
        url = self._config.run.db_connection_string
        if url is None:
            raise ConfigError(
                "--db_connection_string is needed: the URL of the run's MongoDB "
                "(`agentrl launch` starts one and gives it)"
            )
        name, timeout = self._config.run.run_name, self._config.sampling.startup_timeout
        return self._background.run(connect(url, name, timeout))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Finish the step that runs, then leave in order."""
        self._stop.set()


if __name__ == "__main__":
    run_process(sys.argv[1:])
