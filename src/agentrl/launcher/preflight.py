"""Checks of a run before anything is started or written.

Each check raises `ConfigError` with a sentence for the user, or `TaskFileError` with one sentence
for each mistake in a task file.
"""

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from agentrl.configs import Config, ConfigError, model_folder
from agentrl.configs.flag import is_function
from agentrl.configs.user_module import load_user_function
from agentrl.databases.scorer_notation import parse_scorer
from agentrl.databases.task_file import TaskFile, TaskFileError, TaskLine, scan_tasks
from agentrl.rollout.agents import find_agent, known_agents, load_agents, may_score_itself
from agentrl.rollout.agents.answers import KNOWN_SCHEMAS
from agentrl.rollout.groups.advantages import find_estimator
from agentrl.rollout.llm.models import AgentModels, load_agent_models
from agentrl.rollout.scorers import known_scorers
from agentrl.rollout.scorers.scorer_registry import find_scorer, load_scorers, missing_for
from agentrl.rollout.tools.server_list import read_servers

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
_WEIGHT_PATTERNS = ("*.safetensors", "pytorch_model*.bin")
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
_MONGOD_BYTES = 150 << 20  # oplog and journal of an embedded mongod, and the run's own documents
_KEPT_WEIGHTS = 3
_PROBE_BYTES = 1 << 20
_SHOWN_TASKS = 5


def check_model(name: str | None, given_with: str = "MODEL or --model_name_or_path") -> Path:
    """The model's folder, if it holds weights, a configuration, a tokenizer and a chat template."""
    if not name:
        raise ConfigError(
            "no model to train: set MODEL or --model_name_or_path to a Hugging Face model folder"
        )
    folder = model_folder(name, given_with)
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model folder {name} has no config.json: is it a Hugging Face model?")
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


def check_tasks(config: Config) -> list[TaskFile]:
    """Both task files can be read, and every line of them is a task.

    Returns what they hold. Raises `TaskFileError` with the mistakes of both.
    """
    if not config.data.train_file and config.sampling.enable_sampling:
        raise ConfigError(
            "no tasks to train on: set TRAIN_FILE or --train_file to a task file (the demo's are "
            "used where no model is given, neither by MODEL nor by --model_name_or_path)"
        )
    given = dict.fromkeys(f for f in (config.data.train_file, config.data.eval_file) if f)
    found: list[TaskFile] = []
    mistakes: list[str] = []
    for file in given:
        try:
            found.append(check_task_file(file, config))
        except TaskFileError as error:
            mistakes.append(str(error))
    if mistakes:
        raise TaskFileError("\n".join(mistakes))
    return found


def check_tools(config: Config) -> None:
    """The flags name tool servers as they can be; whether these answer: `probes.py`."""
    read_servers(config.agent)


def check_task_file(file: str, config: Config) -> TaskFile:
    """A task file which the agents, scorers and agent config of the flags can work on.

    Raises `TaskFileError` with all that is wrong in it, `AgentModelsError`, or `ConfigError` for
    flags that it needs.
    """
    load_scorers(config)
    load_agents(config)
    find_estimator(config.reward.estimator)
    if is_function(config.loss.loss_calculator):
        load_user_function(config.loss.loss_calculator, "loss_calculator")
    models = load_agent_models(config.agent.agent_config_path)
    found = scan_tasks(Path(file), known_scorers(), KNOWN_SCHEMAS, known_agents())
    mistakes = [*found.mistakes, *_scoring_mistakes(found, config, models)]
    replace(found, mistakes=mistakes).without_mistakes()
    return found


def _scoring_mistakes(found: TaskFile, config: Config, models: AgentModels) -> Iterator[str]:
    """Why tasks of a file could never be scored."""
    by_scorers = _by_scorers(found.tasks, config)
    rows = zip(found.tasks, found.rows, by_scorers, strict=True)
    by_scorer = [(task, row) for task, row, by in rows if by]
    used = {scorer: parse_scorer(scorer) for scorer in {task.scorer for task, _ in by_scorer}}
    needing = {s for s, names in used.items() if any(find_scorer(n).needs_answer for n in names)}
    unanswered = [
        f"{row} (id {task.id})"
        for task, row in by_scorer
        if task.answer is None and task.scorer in needing
    ]
    if unanswered:
        shown = ", ".join(unanswered[:_SHOWN_TASKS])
        more = ", ..." if len(unanswered) > _SHOWN_TASKS else ""
        yield (
            f"task file {found.path}: {len(unanswered)} of {len(found.tasks)} tasks have no "
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


def scorers_in_use(tasks: Sequence[TaskLine], config: Config) -> dict[str, TaskLine]:
    """The scorers that tasks need, each with the first task that does."""
    first: dict[str, TaskLine] = {}
    for task, by_scorer in zip(tasks, _by_scorers(tasks, config), strict=True):
        for name in parse_scorer(task.scorer) if by_scorer else ():
            first.setdefault(name, task)
    return first


def _by_scorers(tasks: Sequence[TaskLine], config: Config) -> list[bool]:
    """Whether the agent of each task leaves scoring to scorers."""
    agents = {name: find_agent(name) for name in {agent_of(task, config) for task in tasks}}
    return [not may_score_itself(agents[agent_of(task, config)]) for task in tasks]


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
