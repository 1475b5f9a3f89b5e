"""`agentrl eval`: evaluates models with fixed weights on tasks; trajectories stay in a database.

    agentrl eval RUN [--checkpoint STEP]           a run's checkpoint, in the run's own database
    agentrl eval --model A --model B --tasks F     any models side by side, in a run of their own
    agentrl eval --endpoint URL --endpoint_model N --tasks F     also a model behind an API

All models of one command have the same tasks, tools and limits. `evaluations.py` does the work.
"""

import asyncio
import logging
import os
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from agentrl.configs import Config, ConfigError
from agentrl.configs.command_line import Given
from agentrl.configs.parsing import (
    Layer,
    as_words,
    config_of,
    layers_given,
    merged,
    read_flags,
    recorded,
)
from agentrl.configs.verbs import eval_parser
from agentrl.launcher.comparison import (
    compare_all,
    comparison_lines,
    print_table,
    write_comparison,
)
from agentrl.launcher.console import TerminalConsole
from agentrl.launcher.deployment import read_deployment
from agentrl.launcher.endpoint import endpoint_of, look_at_endpoint
from agentrl.launcher.evaluation import EvaluationReport, HeldOutFile, print_report, write_report
from agentrl.launcher.evaluation_setup import set_up_of
from agentrl.launcher.evaluations import Entrant, EvaluationFailed, Evaluations, TaskFileOf
from agentrl.launcher.model_source import ModelSource, find_model
from agentrl.launcher.preflight import (
    agent_of,
    check_database,
    check_lengths,
    check_model,
    check_output,
    check_task_file,
    check_tools,
)
from agentrl.launcher.presets import DEMO_TOOLS, EVALUATIONS
from agentrl.launcher.report import agentrl_command, print_lines, run_arguments
from agentrl.launcher.run_folder import (
    LaunchRecord,
    RunLock,
    read_launch,
    refuse_withheld,
    write_launch,
)
from agentrl.launcher.run_parts import LOGS
from agentrl.launcher.service_checks import check_services
from agentrl.rollout.agents.endpoint import can_evaluate
from agentrl.rollout.llm.models import AgentModel
from agentrl.tracebacks import log_to_stderr
from agentrl.training.checkpoint.layout import list_checkpoints, read_state

_INTERRUPTED = 130


@dataclass(frozen=True)
class _Asked:
    """What a command asks for. `layers`: flags of the run that holds the evaluations. `own_run`:
    whether that run is one of evaluations only. `notes`: to tell the user first."""

    layers: Sequence[Layer]
    entrants: Sequence[Entrant]
    tasks: Sequence[str]
    own_run: bool
    notes: Sequence[str] = ()


def main(argv: Sequence[str]) -> int:
    """`agentrl eval [RUN] [--model ...] [flags]`; returns the exit status.

    Raises for bad input, before anything is started.
    """
    given = eval_parser().parse(argv)
    if (group := given.values.get("num_generations")) is not None:
        raise ConfigError(
            f"--num_generations {group}: counts rollouts in training; an evaluation makes "
            f"--eval_rollouts of each task, so give --eval_rollouts {group}"
        )
    asked = _asked(given)
    config = config_of(merged(asked.layers))
    if not asked.tasks:
        wanted = "--tasks" if asked.own_run else "EVAL_FILE or --eval_file"
        raise ConfigError(f"no tasks to evaluate on: set {wanted} to a task file")
    # Before tools are imported, which may set up a log of their own.
    log_to_stderr("%(asctime)s %(levelname)s %(message)s", logging.WARNING)
    console = TerminalConsole()
    print_lines(console, asked.notes)
    set_up = set_up_of(config)
    files = _check(config, asked, console)
    with RunLock(config.output) as lock:
        (config.output / "eval").mkdir(exist_ok=True)
        if asked.own_run:
            _keep_launch(config, asked.layers, None)
        words = as_words(asked.layers)
        work = Evaluations(
            words, asked.own_run, set_up, asked.entrants, files, given.own.again, console
        )
        try:
            reports = asyncio.run(work.run(lock))
        except KeyboardInterrupt:
            reports = None
        except EvaluationFailed as error:
            console.print(str(error), markup=False, highlight=False, soft_wrap=True)
            return 1
        if asked.own_run and reports is not None:
            _keep_launch(config, asked.layers, 0)
    if reports is None:
        console.print("stopped before the end: the same command goes on from here")
        return _INTERRUPTED
    return _tell(config, reports, console)


def _asked(given: Given) -> _Asked:
    own = given.own
    layers = layers_given(given.values, given.files, read_deployment(os.environ).layers)
    if own.run is not None and (own.model or own.endpoint):
        raise ConfigError(
            f"{own.run} and {'--model' if own.model else '--endpoint'}: give a run's name alone, "
            f"or --model {own.run} beside the others"
        )
    if own.run is not None:
        asked = _of_run(own, layers)
        if asked is not None:
            return asked
    return _of_models(own, layers)


def _of_run(own: Namespace, given: Sequence[Layer]) -> _Asked | None:
    """A checkpoint of a run, evaluated as the run was launched; None for a new name with a model.

    Raises `ConfigError` if it is no run.
    """
    _refuse_checkpoint_as_run(own.run)
    layers = [*given, Layer("command line", {"run_name": own.run})]
    output = config_of(merged(layers)).output
    launch = read_launch(output)
    if launch is None or launch.preset == EVALUATIONS:
        if own.checkpoint is None and "model_name_or_path" in merged(given):
            return None
        raise ConfigError(
            f"run {own.run!r} was never launched in {output}: is the name right, and is this the "
            "folder that it was launched in? (a model as it is: --model DIR)"
        )
    refuse_withheld(launch, merged(layers), launch.withheld)
    layers = [read_flags(launch.flags, "the run's launch"), *layers]
    if launch.demo_tools and "mcp_manager_url" not in merged(layers):
        layers.append(Layer("demo", {"mcp_manager_url": DEMO_TOOLS}))
    config = config_of(merged(layers))
    checkpoint = _find_checkpoint(config, own.checkpoint)
    model = check_model(config.model.model_name_or_path)
    source = ModelSource(
        str(checkpoint), model, checkpoint, read_state(checkpoint).step, config.output
    )
    tasks = own.tasks or ([config.data.eval_file] if config.data.eval_file else [])
    return _Asked(layers, [Entrant(checkpoint.name, source)], tasks, own_run=False)


def _refuse_checkpoint_as_run(run: str) -> None:
    if list_checkpoints(Path(run).parent).count(Path(run)):
        name = read_state(Path(run)).run_name
        raise ConfigError(
            f"{run} is a checkpoint of run {name}: `agentrl eval {name} --checkpoint {run}` "
            "evaluates it"
        )


def _find_checkpoint(config: Config, wanted: str | None) -> Path:
    checkpoints = list_checkpoints(config.output)
    if wanted is None:
        if not checkpoints:
            raise ConfigError(f"{config.output} holds no checkpoint yet: train the run first")
        return checkpoints[-1]
    for checkpoint in checkpoints:
        if wanted in (checkpoint.name, checkpoint.name.removeprefix("checkpoint-")):
            return checkpoint
    if Path(wanted).is_dir():
        read_state(Path(wanted))  # says what it is, if it is no checkpoint
        return Path(wanted)
    known = ", ".join(checkpoint.name for checkpoint in checkpoints) or "none"
    raise ConfigError(f"--checkpoint {wanted}: no such checkpoint; {config.output} holds {known}")


def _of_models(own: Namespace, given: Sequence[Layer]) -> _Asked:
    """Any models, in a run of evaluations. Raises `ConfigError`."""
    if own.checkpoint is not None:
        raise ConfigError("--checkpoint belongs to a RUN; give the checkpoint's folder as --model")
    values = merged(given)
    models = own.model or ([] if own.endpoint else [values.get("model_name_or_path")])
    if models == [None]:
        raise ConfigError(
            "what is to be evaluated? Give a RUN, --model (a folder, a checkpoint or a run), or "
            "--endpoint with --endpoint_model"
        )
    sources = [find_model(str(model)) for model in models]
    entrants = _named(sources)
    endpoint = endpoint_of(own, config_of(values))
    if endpoint is not None:
        entrants.append(Entrant(endpoint.model, endpoint))
    name = {"run_name": own.run} if own.run is not None else {}
    below, notes = _flags_of_runs(sources)
    layers = [Layer("eval", {"run_name": EVALUATIONS}), *below, *given, Layer("", name)]
    config = config_of(merged(layers))
    launch = read_launch(config.output)
    if launch is not None and launch.preset != EVALUATIONS:
        raise ConfigError(
            f"{config.output} is the folder of a run: give the evaluations another --run_name"
        )
    file = config.data.eval_file or config.data.train_file
    tasks = own.tasks or ([file] if file else [])
    return _Asked(layers, entrants, tasks, own_run=True, notes=notes)


def _named(sources: Sequence[ModelSource]) -> list[Entrant]:
    """The models by their names, or by their whole paths where two have one name."""
    names = [source.name for source in sources]
    found: dict[str, Entrant] = {}
    for source in sources:
        unique = source.name if names.count(source.name) == 1 else str(source.path)
        if unique in found:
            raise ConfigError(f"--model {source.given}: is given twice")
        found[unique] = Entrant(unique, source)
    return list(found.values())


def _flags_of_runs(sources: Sequence[ModelSource]) -> tuple[list[Layer], list[str]]:
    """The flags by which the first run among the models makes trajectories, for all of them."""
    of_runs = [flags for source in sources if (flags := source.flags()) is not None]
    if not of_runs:
        return [], []
    first, *others = of_runs
    notes = [f"all models are evaluated with the agent, tools and limits of the {first.origin}"]
    for other in others:
        differing = sorted(
            name
            for name in {*first.values, *other.values}
            if first.values.get(name) != other.values.get(name)
        )
        if differing:
            names = ", ".join(f"--{name}" for name in differing)
            notes.append(f"the {other.origin} had other values of {names}")
    return [first], notes


def _check(config: Config, asked: _Asked, console: Console) -> list[TaskFileOf]:
    """Check models, tasks, services and folders; returns the task files. Raises for bad input."""
    check_database(config)
    check_tools(config)
    folder = config.output / "eval"
    doubts: list[str] = []
    needed = 0
    for entrant in asked.entrants:
        if isinstance(entrant.model, AgentModel):
            doubt = look_at_endpoint(entrant.model, config.sampling.startup_timeout)
            doubts += [doubt] if doubt else []
            continue
        model = check_model(str(entrant.model.folder))
        doubts += check_lengths(config, model)
        if entrant.model.checkpoint is not None:
            sizes = [file.stat().st_size for file in model.glob("*.safetensors")]
            needed = max(needed, 2 * sum(sizes))
    files = []
    for file in asked.tasks:
        checked = check_task_file(file, config)
        doubts += checked.doubts
        agents = {agent_of(kind.first, config) for kind in checked.kinds}
        unfit = sorted(agent for agent in agents if not can_evaluate(agent))
        if unfit and any(isinstance(entrant.model, AgentModel) for entrant in asked.entrants):
            raise ConfigError(
                f"--endpoint: agent {unfit[0]} of {file} asks for tokens, which an API does not "
                "take; the agents mcp, single_turn and math can be evaluated with it"
            )
        files.append(TaskFileOf(HeldOutFile.of(Path(file)), checked.tasks))
    check_services(config, lambda told: print_lines(console, [told]))
    check_output(LOGS, 0)
    check_output(folder, needed)
    print_lines(console, list(dict.fromkeys(doubts)))
    return files


def _keep_launch(config: Config, layers: Sequence[Layer], status: int | None) -> None:
    """Store the flags, for `agentrl show` and `agentrl runs`."""
    flags, withheld = recorded(as_words(layers))
    launch = LaunchRecord(EVALUATIONS, flags, withheld=withheld, status=status)
    write_launch(config.output, launch)


def _tell(config: Config, reports: Sequence[EvaluationReport], console: Console) -> int:
    folder = config.output / "eval"
    paths = [write_report(folder, report) for report in reports]
    if len(reports) == 1:
        print_report(console, reports[0])
    else:
        comparisons = compare_all(reports)
        print_table(console, reports)
        print_lines(console, comparison_lines(comparisons))
        paths = [write_comparison(folder, reports, comparisons)]
    show = f"{agentrl_command()} show {run_arguments(config)}"
    lines = [f"written to {paths[0]}", f"look at a trajectory: {show} --split eval"]
    if any(report.failed_rollouts for report in reports):
        lines.append(f"look at what failed: {show} --failed")
    most_failed = any(report.most_failed for report in reports)
    if most_failed:
        lines.append("most rollouts failed: the exit status is 1")
    print_lines(console, lines)
    return 1 if most_failed else 0
