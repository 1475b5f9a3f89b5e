"""What `agentrl sft` and `agentrl dpo` share: rows, then the trainer's processes, then a folder.

Rows of a file or of a run become token trees first, in this process; then the trainer's processes
are launched as for a run, without services, samplers and a database. What is in the run's folder:
`rows/` (the trees), `checkpoint-N`, `metrics.jsonl` and, at the end, `model/`.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console

from agentrl.configs import Config, ConfigError, model_folder
from agentrl.configs.command_line import Given
from agentrl.configs.parsing import Layer, as_words, config_of, handed_on, merged
from agentrl.databases.tree_file import TreeFile, remove_unfinished
from agentrl.launcher.console import TerminalConsole
from agentrl.launcher.deployment import (
    REPOSITORY,
    Deployment,
    count_gpus,
    read_deployment,
    usable_cores,
)
from agentrl.launcher.ending import FAILED, REFUSED, way_on_from
from agentrl.launcher.presets import GRPO
from agentrl.launcher.processes import signal_name
from agentrl.launcher.receiver_checks import check_trackers
from agentrl.launcher.record_filter import read_conditions
from agentrl.launcher.report import from_here, print_lines
from agentrl.launcher.run_folder import RunLock, last_checkpoint
from agentrl.launcher.stack import trainer_command
from agentrl.rollout.demonstrations.prepare import (
    Preparation,
    PreparedRows,
    UnusableRows,
    prepare_rows,
)
from agentrl.stop_signals import stop_signals
from agentrl.subreaper import SUBREAPER, descendants
from agentrl.training.checkpoint.layout import list_checkpoints, read_state
from agentrl.training.model.export import export_checkpoint

_SHOWN = 5  # rows that are left out
_GRACE_S = 600  # in which a trainer that is told to stop ends its step and saves a checkpoint
_EVERY_S = 5.0  # between two lines of progress
_BEFORE_TRAINING = {"launch.lock", "rows"}  # what is in a folder before its trainer writes there

# Makes the rows of a run: its name, the folder for them, how, and what reports the number so far.
RunRows = Callable[[str, Path, Preparation, Callable[[int], None]], PreparedRows]


def supervised_config(given: Given, preset: Layer) -> tuple[list[Layer], Config]:
    """The flags of a command and their configuration. Raises `ConfigError`."""
    model = model_folder(given.own.model, "--model")
    layers = [
        preset,
        Layer("--model", {"model_name_or_path": str(model)}),
        Layer("command line", given.values),
    ]
    if given.own.where and given.own.from_run is None:
        raise ConfigError("--where chooses trajectories of --from_run, which is not given")
    read_conditions(given.own.where)  # else it would be refused behind the start of a database
    return layers, config_of(merged(layers))


def run_supervised(
    given: Given,
    layers: Sequence[Layer],
    config: Config,
    *,
    of_run: RunRows,
    pairs: bool = False,
    objective: Sequence[str] = (),
) -> int:
    """Prepare, train, export; returns the exit status. Raises `ConfigError` for bad input.

    `of_run`: makes the rows of `--from_run`. `pairs`: whether rows of a file are pairs.
    `objective`: further words of the processes' command line.
    """
    model = Path(config.model.model_name_or_path or "")
    deployment = read_deployment(os.environ)
    console = TerminalConsole()
    processes, gpus = _processes(config, deployment)
    if deployment.machine_rank == 0:
        check_trackers(config, lambda told: print_lines(console, [told]))
    files = {"train_file": given.own.train_file, "eval_file": given.own.eval_file}
    for flag, file in files.items():
        _check_readable(flag, file)
    with (
        _removed_if_refused(config.output) as remove,
        RunLock(config.output, deployment.machine_rank) as lock,
    ):
        if deployment.num_machines == 1:  # another one may be writing there under its own lock
            remove_unfinished(config.output / "rows")
        source = _Source(
            config,
            Preparation(model, config.chat_template_options, config.sampling.max_tokens, pairs),
            console,
        )
        rows = {flag: source.file(flag, Path(file)) for flag, file in files.items() if file}
        if given.own.from_run is not None:
            rows["train_file"] = source.run(given.own.from_run, of_run)
        flags, secrets = handed_on(as_words([*layers, Layer("rows", rows)]))
        command = trainer_command(
            "agentrl.training.supervised.process", [*flags, *objective], deployment, processes,
            deployment.meeting_port, on_gpus=gpus > 0,
        )  # fmt: skip
        started = f"starting {processes} trainer process{'es' * (processes > 1)}"
        print_lines(console, [f"{started} with {model}"])
        status = _run(command, {**_threads(processes, deployment), **secrets}, lock)
        if status == FAILED or status > 128:
            print_lines(console, [_failed(status, config.output)])
        if (
            status == REFUSED
            and {each.name for each in config.output.iterdir()} <= _BEFORE_TRAINING
        ):
            remove()
        if status != 0 or deployment.machine_rank > 0:
            return status
        if _is_exported(config):
            return 0  # the trainer had nothing to do
        return _export(config, model, console)


def _check_readable(flag: str, file: str | None) -> None:
    """Raise `ConfigError` if a given file cannot be read."""
    try:
        if file is not None:
            Path(file).open("rb").close()
    except OSError as error:
        raise ConfigError(f"--{flag} {file} cannot be read: {error.strerror}") from None


@contextmanager
def _removed_if_refused(folder: Path) -> Iterator[Callable[[], None]]:
    """Remove the folder of a run that was refused before it began, with its new parents.

    Yields what removes it, for a run that the trainer refused.
    """
    made = [place for place in (folder, *folder.parents) if not place.exists()]

    def remove() -> None:
        if folder in made:
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):  # another run is there by now
                for parent in made[1:]:
                    parent.rmdir()

    try:
        yield remove
    except ConfigError:
        remove()
        raise


class _Source:
    """Where rows come from. Each method returns the folder of their token trees, told in lines.

    Raises `ConfigError` if there is nothing to train.
    """

    def __init__(self, config: Config, preparation: Preparation, console: Console) -> None:
        self._out, self._console = config.output / "rows", console
        self._preparation = preparation
        self._unit = "pairs" if preparation.pairs else "rows"

    def file(self, flag: str, file: Path) -> str:
        """The rows of a file."""
        try:
            rows = prepare_rows(
                file, self._out, self._preparation, workers=usable_cores(),
                report=self._reporter(str(file)),
            )  # fmt: skip
        except UnusableRows as error:
            raise ConfigError(f"--{flag} {error}") from None
        return self._told(str(file), rows)

    def run(self, run: str, of_run: RunRows) -> str:
        """The rows of a run."""
        try:
            rows = of_run(run, self._out, self._preparation, self._reporter(run))
        except UnusableRows as error:
            raise ConfigError(f"--from_run {error}") from None
        return self._told(f"run {run}", rows)

    def _reporter(self, source: str) -> Callable[[int], None]:
        told = time.monotonic()

        def report(n_rows: int) -> None:
            nonlocal told
            if time.monotonic() - told > _EVERY_S:
                told = time.monotonic()
                print_lines(self._console, [f"{source}: {n_rows:,} {self._unit}"])

        return report

    def _told(self, source: str, rows: PreparedRows) -> str:
        trees = TreeFile(rows.folder)
        tokens, trained = int(trees.n_tokens.sum()), int(trees.n_trained.sum())
        lines = [
            f"{source}: {len(trees):,} {self._unit}, {tokens:,} tokens, of which {trained:,} are "
            "trained"
        ]
        if rows.left_out:
            lines.append(
                f"{len(rows.left_out):,} {self._unit} are left out ({rows.folder}.json has all):"
            )
            lines += [f"  {place} {why}" for place, why in [*rows.left_out.items()][:_SHOWN]]
        if rows.unread:
            named = [f"{name} ({n:,} {self._unit})" for name, n in rows.unread.items()]
            lines.append(f"fields of messages that are not read: {', '.join(sorted(named))}")
        lines += [f"{said} ({n:,} {self._unit})" for said, n in sorted(rows.remarks.items())]
        print_lines(self._console, lines)
        return str(rows.folder)


def _processes(config: Config, deployment: Deployment) -> tuple[int, int]:
    """Number of trainer processes on all machines, and of GPUs here. Raises `ConfigError`."""
    gpus = 0 if config.parallel.use_cpu else count_gpus(os.environ)
    processes = deployment.trainer_processes(gpus)
    multiple = config.parallel.processes_per_rank * config.parallel.dp_replicate_size
    if processes % multiple:
        raise ConfigError(
            f"--tp_size x --cp_size x --dp_replicate_size is {multiple}: set NUM_PROCESSES to a "
            f"multiple of it, it is {processes}"
        )
    return processes, gpus


def _threads(processes: int, deployment: Deployment) -> dict[str, str]:
    if "OMP_NUM_THREADS" in os.environ:
        return {}
    here = max(1, processes // deployment.num_machines)
    return {"OMP_NUM_THREADS": str(max(1, usable_cores() // here))}


def _run(command: Sequence[str], environment: dict[str, str], lock: RunLock) -> int:
    """Run the trainer in front, hand it the signals that stop a run, and return its status.

    The status is that of a shell: 128 + n for signal n. The trainer stops with this process, also
    if that is killed, and holds the run's folder until it has.
    """
    trainer = subprocess.Popen(
        [sys.executable, "-I", "-S", SUBREAPER, str(_GRACE_S), *command],
        stdin=subprocess.PIPE,  # closed by our end, however we end: the subreaper's notice
        env={**os.environ, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(_GRACE_S), **environment},
        start_new_session=True,
        pass_fds=[lock.fileno()],
    )
    before = {
        # The subreaper hands on SIGTERM, whatever came.
        number: signal.signal(number, lambda got, frame: trainer.terminate())
        for number in stop_signals()
    }
    try:
        status = trainer.wait()
        return status if status >= 0 else 128 - status
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if trainer.poll() is None:
            for pid in [*descendants(trainer.pid), trainer.pid]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            trainer.wait()


def _failed(status: int, folder: Path) -> str:
    """One sentence on how a trainer failed, and on the way on.

    One that a signal ended could say nothing itself; of several, torch's launcher reports it.
    """
    way_on = way_on_from(last_checkpoint(folder))
    if status == FAILED:
        return f"the trainer failed, as said above; {way_on}"
    number = status - 128
    cause = ", as the system does when memory runs out" if number == signal.SIGKILL else ""
    return f"the trainer was ended by {signal_name(number)}{cause}; {way_on}"


def _is_exported(config: Config) -> bool:
    """Whether the model folder is newer than the last checkpoint.

    An older one is of a training that was stopped, and a later command was killed before its end.
    """
    checkpoints, out = list_checkpoints(config.output), config.output / "model"
    if not checkpoints or not out.is_dir():
        return False
    return checkpoints[-1].stat().st_mtime <= out.stat().st_mtime


def _export(config: Config, model: Path, console: Console) -> int:
    """Write the last checkpoint as a model folder, if the training is at its end."""
    checkpoints = list_checkpoints(config.output)
    if not checkpoints:
        print_lines(console, ["stopped before the first checkpoint"])
        return 1
    last, out = checkpoints[-1], config.output / "model"
    made = out.with_name(".model.partial")
    shutil.rmtree(made, ignore_errors=True)
    export_checkpoint(last, model, made)
    shutil.rmtree(out, ignore_errors=True)
    made.rename(out)
    step = read_state(last).step
    lines = [f"wrote {out}, the weights of step {step}"]
    script, given = from_here(REPOSITORY / GRPO.script), shlex.quote(str(out))
    print_lines(console, [*lines, f"train it on tasks: MODEL={given} {script} RUN"])
    return 0
