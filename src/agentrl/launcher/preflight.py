"""Checks of a run before anything is started or written.

Each check raises `ConfigError` with a sentence for the user, or `TaskFileError` with one sentence
for each mistake in a task file.
"""

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from agentrl.configs import Config, ConfigError, model_folder
from agentrl.configs.flag import is_function
from agentrl.configs.user_module import load_user_function
from agentrl.databases.scorer_notation import parse_scorer
from agentrl.databases.task_file import (
    TaskCheck,
    TaskFile,
    TaskFileError,
    TaskKind,
    TaskLine,
    TaskLook,
    checked_by,
    go_on,
    keep_check,
    known_check,
    scan_tasks,
)
from agentrl.rollout.agents import find_agent, known_agents, load_agents, may_score_itself
from agentrl.rollout.agents.answers import KNOWN_SCHEMAS
from agentrl.rollout.agents.limits import check_model_context
from agentrl.rollout.groups.advantages import find_estimator
from agentrl.rollout.llm.models import AgentModels, load_agent_models
from agentrl.rollout.scorers import known_scorers
from agentrl.rollout.scorers.scorer_registry import (
    find_scorer,
    load_scorers,
    missing_for,
    unfit_answer,
)
from agentrl.rollout.tools.server_list import read_servers
from agentrl.training.run.entry import TASKS

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
_WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
_MONGOD_BYTES = 150 << 20  # oplog and journal of an embedded mongod, and the run's own documents
_KEPT_WEIGHTS = 3
_PROBE_BYTES = 1 << 20
_SHOWN_TASKS = 5  # as many as a `TaskKind` remembers
_FIRST_CHECK_S = 3.0  # of each task file, before anything is started


def check_model(name: str | None, given_with: str = "MODEL or --model_name_or_path") -> Path:
    """The model's folder, if it holds weights, a configuration, a tokenizer and a chat template."""
    if not name:
        raise ConfigError(
            "no model to train: set MODEL or --model_name_or_path to a Hugging Face model folder"
        )
    folder = model_folder(name, given_with)
    if not any(any(folder.glob(pattern)) for pattern in _WEIGHT_PATTERNS):
        raise ConfigError(f"model folder {name} holds no weights (*.safetensors)")
    if not any((folder / file).is_file() for file in _TOKENIZER_FILES):
        raise ConfigError(
            f"model folder {name} holds no tokenizer (tokenizer.json): copy the tokenizer's files "
            "there from the model it was trained from"
        )
    if not _has_chat_template(folder):
        raise ConfigError(
            f"model folder {name} has no chat template (chat_template.jinja, or `chat_template` in "
            "tokenizer_config.json): copy one there from a model of the same family"
        )
    return folder


def check_lengths(config: Config, model: Path) -> list[str]:
    """The model is long enough for what the flags ask for. Returns what is hardly meant."""
    doubt = check_model_context(config.sampling, model)
    return [doubt] if doubt else []


def _has_chat_template(folder: Path) -> bool:
    if any((folder / file).is_file() for file in _TEMPLATE_FILES):
        return True
    file = folder / "tokenizer_config.json"
    if not file.is_file():
        return False
    try:
        return bool(json.loads(file.read_text(encoding="utf-8")).get("chat_template"))
    except ValueError:
        raise ConfigError(f"{file} is not JSON: copy it again from its model") from None


def check_tools(config: Config) -> None:
    """The flags name tool servers as they can be; whether these answer: `probes.py`."""
    read_servers(config.agent)


def check_task_file(file: str, config: Config) -> TaskFile:
    """A task file which the agents, scorers and agent config of the flags can work on, as a whole.

    Raises `TaskFileError` with all that is wrong in it, `AgentModelsError`, or `ConfigError` for
    flags that it needs.
    """
    models = _load_names(config)
    names = known_scorers(), KNOWN_SCHEMAS, known_agents()
    found = scan_tasks(Path(file), *names, _answers_fit(config))
    _refuse_mistakes(found, config, models)
    return found


class TaskFileCheck:
    """`check_task_file`, a piece at a time, for a file of any size. What it finds is kept in the
    run's folder, and a run that goes on reads the file no more."""

    def __init__(self, file: str, config: Config) -> None:
        """Raises `AgentModelsError`, or `ConfigError` for flags that it needs."""
        self._config = config
        self._models = _load_names(config)
        names = known_scorers(), KNOWN_SCHEMAS, known_agents()
        # Whether answers are looked at depends on the agent.
        by = checked_by(*names, [config.agent.agent_name])
        self._by, self._folder = by, config.output / TASKS
        self._check: TaskCheck | None = None
        known = known_check(Path(file), self._folder, self._by)
        if known is None:
            self._check = TaskCheck(Path(file), *names, _answers_fit(config))
        self.found = known or TaskFile(Path(file))

    def advance(self, seconds: float) -> None:
        """Read on for so long. Raises `TaskFileError` with what is wrong so far."""
        if self._check is not None and not self._check.complete:
            self._check.advance(seconds)
            self._see(self._check.found)

    async def go_on(self) -> None:
        """Read the file to its end, beside others. Raises `TaskFileError`."""
        if self._check is not None:
            self._see(await go_on(self._check))

    def _see(self, found: TaskFile) -> None:
        assert self._check is not None
        self.found = found
        _refuse_mistakes(found, self._config, self._models)
        if self._check.complete:
            keep_check(found, self._folder, self._by)


def check_tasks(config: Config) -> list[TaskFileCheck]:
    """Both task files can be read, and their rows are tasks, as far as they are read by now.

    A large file is read to its end while the run begins: `TaskFileCheck.go_on`. Raises
    `TaskFileError` with the mistakes of both.
    """
    if not config.data.train_file and config.sampling.enable_sampling:
        raise ConfigError(
            "no tasks to train on: set TRAIN_FILE or --train_file to a task file (the demo's are "
            "used where no model is given, neither by MODEL nor by --model_name_or_path)"
        )
    given = dict.fromkeys(f for f in (config.data.train_file, config.data.eval_file) if f)
    checks: list[TaskFileCheck] = []
    mistakes: list[str] = []
    for file in given:
        try:
            checks.append(TaskFileCheck(file, config))
            checks[-1].advance(_FIRST_CHECK_S)
        except TaskFileError as error:
            mistakes.append(str(error))
    if mistakes:
        raise TaskFileError("\n".join(mistakes))
    return checks


def _load_names(config: Config) -> AgentModels:
    """Load what task lines may name."""
    load_scorers(config)
    load_agents(config)
    find_estimator(config.reward.estimator)
    if is_function(config.loss.loss_calculator):
        load_user_function(config.loss.loss_calculator, "loss_calculator")
    return load_agent_models(config.agent.agent_config_path)


def _refuse_mistakes(found: TaskFile, config: Config, models: AgentModels) -> None:
    """Raises `TaskFileError` for the mistakes of a file, those of its scoring among them."""
    mistakes = [*found.mistakes, *_scoring_mistakes(found, config, models)]
    replace(found, mistakes=mistakes).without_mistakes()


def _answers_fit(config: Config) -> TaskLook:
    """Says what is wrong with a task whose right answer its scorer cannot use."""

    def look(task: TaskLine) -> str | None:
        if task.answer is None or not _by_scorers(task, config):
            return None
        return unfit_answer(task.scorer, task.answer)

    return look


def _scoring_mistakes(found: TaskFile, config: Config, models: AgentModels) -> Iterator[str]:
    """Why tasks of a file could never be scored."""
    by_scorer = [kind for kind in found.kinds if _by_scorers(kind.first, config)]
    used = {scorer: parse_scorer(scorer) for scorer in {kind.first.scorer for kind in by_scorer}}
    needing = {s for s, names in used.items() if any(find_scorer(n).needs_answer for n in names)}
    unanswered = [
        kind for kind in by_scorer if kind.first.answer is None and kind.first.scorer in needing
    ]
    if unanswered:
        rows = sum(kind.rows for kind in unanswered)
        places = sorted(place for kind in unanswered for place in kind.places)
        shown = ", ".join(place for _, place in places[:_SHOWN_TASKS])
        more = ", ..." if rows > _SHOWN_TASKS else ""
        yield (
            f"task file {found.path}: {rows} of {found.n_tasks} tasks have no "
            f"`answer` to score against: {shown}{more}"
        )
    for name in sorted({name for names in used.values() for name in names}):
        missing = missing_for(name, models)
        if missing is not None:
            yield (
                f"task file {found.path} uses scorer {name}, which {missing} of "
                f"{agent_config_of(config)}, or give the tasks another scorer"
            )


def agent_config_of(config: Config) -> str:
    """The run's file of auxiliary models as a sentence names it, or where one would come from."""
    given = config.agent.agent_config_path
    if given is not None:
        return f"--agent_config_path {given}"
    return "a file given with --agent_config_path (assets/agent_config_example.yml)"


def scorers_in_use(kinds: Iterable[TaskKind], config: Config) -> dict[str, TaskLine]:
    """The scorers that tasks of these kinds need, each with a task that does."""
    first: dict[str, TaskLine] = {}
    for kind in kinds:
        for name in parse_scorer(kind.first.scorer) if _by_scorers(kind.first, config) else ():
            first.setdefault(name, kind.first)
    return first


def _by_scorers(task: TaskLine, config: Config) -> bool:
    """Whether the agent of a task leaves scoring to scorers."""
    return not may_score_itself(find_agent(agent_of(task, config)))


def agent_of(task: TaskLine, config: Config) -> str:
    """The name of the agent that works on a task."""
    return task.agent_name or config.agent.agent_name


def bytes_needed(model: Path, checkpoints: int | None) -> int:
    """A low estimate of what a run writes: published weights, and checkpoints of weights and two
    moments in float32."""
    weights = sum(f.stat().st_size for pattern in _WEIGHT_PATTERNS for f in model.glob(pattern))
    return _MONGOD_BYTES + weights * (_KEPT_WEIGHTS + 3 * (checkpoints or 3))


def check_output(folder: Path, needed: int) -> None:
    """The folder can be made and written, and its disk has `needed` bytes free.

    Leaves nothing behind: what it makes to find out, it takes away again.
    """
    existing = folder
    while not existing.exists():
        existing = existing.parent
    made: Path | None = None
    try:
        if existing != folder:
            # A folder with another name, so that a failed check does not leave the run's own.
            made = Path(tempfile.mkdtemp(prefix=".agentrl-", dir=existing))
        with tempfile.NamedTemporaryFile(dir=made or folder) as probe:
            probe.write(os.urandom(_PROBE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ConfigError(
                f"output folder {folder}: its disk is full; free some space, or choose another "
                "place with --output_dir"
            ) from None
        raise ConfigError(
            f"output folder {folder} cannot be written ({error.strerror}): choose another place "
            "with --output_dir"
        ) from None
    finally:
        if made is not None:
            made.rmdir()
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise ConfigError(
            f"output folder {folder}: its disk has {free / 2**30:.1f} GiB free and this run needs "
            f"{needed / 2**30:.1f} GiB at least; free some space, or choose another place with "
            "--output_dir"
        )
