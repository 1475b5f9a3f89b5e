"""Checks the model, task files, tools and output folder of a run before anything is started.

A check raises `ConfigError` with one sentence, or `TaskFileError` with one sentence for each
mistake in a task file.
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
from agentrl.databases.mongodb_url import why_no_url
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
_SHOWN_TASKS = 5  # number of places that a `TaskKind` keeps
_FIRST_CHECK_S = 3.0  # time for each task file before anything is started


def check_model(name: str | None, given_with: str = "MODEL or --model_name_or_path") -> Path:
    """Return the model folder `name`. `given_with`: the flags that name it, for the message.

    Raises `ConfigError` if it has no config.json, weights, tokenizer or chat template.
    """
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
    """Check the flags' token limits against the model's context. Returns warnings.

    Raises `ConfigError` if `--max_prompt_tokens` leaves no room for an answer.
    """
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


def check_database(config: Config) -> None:
    """Raise `ConfigError` for a `--db_connection_string` that no MongoDB could have."""
    url = config.run.db_connection_string
    if url is not None and (fault := why_no_url(url)) is not None:
        raise ConfigError(fault)


def check_tools(config: Config) -> None:
    """Raise `ConfigError` for invalid tool flags. `probes.py` checks that the servers answer."""
    read_servers(config.agent)


def check_task_file(file: str, config: Config) -> TaskFile:
    """Read a whole task file, and check it against the agents, scorers and agent config in use.

    Raises `TaskFileError` with all mistakes of the file, `AgentModelsError` for a bad agent config,
    and `ConfigError` for bad flags.
    """
    models = _load_names(config)
    names = known_scorers(), KNOWN_SCHEMAS, known_agents()
    found = scan_tasks(Path(file), *names, _answers_fit(config))
    _refuse_mistakes(found, config, models)
    return found


class TaskFileCheck:
    """An incremental `check_task_file`, for files of any size.

    A complete check is stored in the run's folder, so that a resumed run does not read the file
    again. `found`: the result so far.
    """

    def __init__(self, file: str, config: Config) -> None:
        """Raises `AgentModelsError` for a bad agent config, and `ConfigError` for bad flags."""
        self._config = config
        self._models = _load_names(config)
        names = known_scorers(), KNOWN_SCHEMAS, known_agents()
        # The default agent is part of the identifier: it decides whether answers are checked.
        by = checked_by(*names, [config.agent.agent_name])
        self._by, self._folder = by, config.output / TASKS
        self._check: TaskCheck | None = None
        known = known_check(Path(file), self._folder, self._by)
        if known is None:
            self._check = TaskCheck(Path(file), *names, _answers_fit(config))
        self.found = known or TaskFile(Path(file))

    def advance(self, seconds: float) -> None:
        """Read on for about `seconds`. Raises `TaskFileError` with the mistakes so far."""
        if self._check is not None and not self._check.complete:
            self._check.advance(seconds)
            self._see(self._check.found)

    async def go_on(self) -> None:
        """Read the file to its end, concurrently with other coroutines. Raises `TaskFileError`."""
        if self._check is not None:
            self._see(await go_on(self._check))

    def _see(self, found: TaskFile) -> None:
        assert self._check is not None
        self.found = found
        _refuse_mistakes(found, self._config, self._models)
        if self._check.complete:
            keep_check(found, self._folder, self._by)


def check_tasks(config: Config) -> list[TaskFileCheck]:
    """Begin to check the training and evaluation task files, for a few seconds each.

    The rest of a large file is checked while the run begins (`TaskFileCheck.go_on`). Raises
    `TaskFileError` with the mistakes of both files, `AgentModelsError` and `ConfigError`.
    """
    if not config.data.train_file and config.sampling.enable_sampling:
        exported = "; MODEL is set here: `unset MODEL`, if that is not meant"
        raise ConfigError(
            "no tasks to train on: set TRAIN_FILE or --train_file to a task file (the demo's are "
            "used where no model is given, neither by MODEL nor by --model_name_or_path)"
            + (exported if "MODEL" in os.environ else "")
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
    """Load the user's scorers, agents, loss and agent config, which tasks and flags may name."""
    load_scorers(config)
    load_agents(config)
    find_estimator(config.reward.estimator)
    if is_function(config.loss.loss_calculator):
        load_user_function(config.loss.loss_calculator, "loss_calculator")
    return load_agent_models(config.agent.agent_config_path)


def _refuse_mistakes(found: TaskFile, config: Config, models: AgentModels) -> None:
    """Raise `TaskFileError` if the file has mistakes, or tasks that cannot be scored."""
    mistakes = [*found.mistakes, *_scoring_mistakes(found, config, models)]
    replace(found, mistakes=mistakes).without_mistakes()


def _answers_fit(config: Config) -> TaskLook:
    """Return a check that says why a task's scorer cannot use its `answer`."""

    def look(task: TaskLine) -> str | None:
        if task.answer is None or not _by_scorers(task, config):
            return None
        return unfit_answer(task.scorer, task.answer)

    return look


def _scoring_mistakes(found: TaskFile, config: Config, models: AgentModels) -> Iterator[str]:
    """Yield a sentence for each reason why tasks of the file cannot be scored."""
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
    """Name the agent config for an error message, or say how to give one."""
    given = config.agent.agent_config_path
    if given is not None:
        return f"--agent_config_path {given}"
    return "a file given with --agent_config_path (assets/agent_config_example.yml)"


def scorers_in_use(kinds: Iterable[TaskKind], config: Config) -> dict[str, TaskLine]:
    """The scorers that tasks of these kinds use, each with one task that uses it."""
    first: dict[str, TaskLine] = {}
    for kind in kinds:
        for name in parse_scorer(kind.first.scorer) if _by_scorers(kind.first, config) else ():
            first.setdefault(name, kind.first)
    return first


def _by_scorers(task: TaskLine, config: Config) -> bool:
    """Whether a task is scored by scorers and not by its agent."""
    return not may_score_itself(find_agent(agent_of(task, config)))


def agent_of(task: TaskLine, config: Config) -> str:
    """The name of the agent that works on a task."""
    return task.agent_name or config.agent.agent_name


def bytes_needed(model: Path, checkpoints: int | None) -> int:
    """Lower bound of the bytes that a run writes: database, published weights and checkpoints.

    A checkpoint has the weights and two optimizer moments. `checkpoints`: how many are kept; None
    counts three.
    """
    weights = sum(f.stat().st_size for pattern in _WEIGHT_PATTERNS for f in model.glob(pattern))
    return _MONGOD_BYTES + weights * (_KEPT_WEIGHTS + 3 * (checkpoints or 3))


def check_output(folder: Path, needed: int) -> None:
    """Check that `folder` can be made and written, with `needed` bytes free on its disk.

    Files made for the check are removed. Raises `ConfigError`.
    """
    existing = folder
    while not existing.exists():
        existing = existing.parent
    made: Path | None = None
    try:
        if existing != folder:
            # Another name, so that a failed check never leaves the run's folder behind.
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
