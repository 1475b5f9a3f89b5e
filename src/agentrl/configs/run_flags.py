"""The flags that a run stores in its database, and their comparison on a resume or a join.

The class of a flag (`FlagClass`) decides whether a resumed run or a joining sampler may have
another value; docs/guides/checkpoints.md explains the classes. `digests.py` compares the content of
task files and models.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agentrl.configs.config import Config
from agentrl.configs.digests import tokenizer_digest
from agentrl.configs.flag import ConfigError, FlagClass, is_function, is_object
from agentrl.configs.flags import FLAGS, flags_named
from agentrl.configs.parsing import config_of
from agentrl.file_digest import file_digest

Flags = dict[str, Any]  # values by the flags' names, without dashes


# Flags that apply to one launch and not to the run.
_OF_THIS_START = {
    *flags_named("change_data", "resume_from_checkpoint", "metrics_port", "metrics_host")
}
# Flags that are not stored, in addition to secrets. A database does not hold its own address.
_NOT_STORED = {*flags_named("db_connection_string"), *_OF_THIS_START}
# Files and folders. They are stored as absolute paths; another machine may have them elsewhere.
_PATHS = {
    name for name, flag in FLAGS.items() if flag.info.kind in ("FILE", "DIR")
} - _OF_THIS_START
_URLS = flags_named("mcp_manager_url", "inference_urls")
_MAY_HOLD_SECRETS = re.compile(r"//[^/\s]*@|\?")  # a user or a query in a URL
_READ_BY_SAMPLERS = flags_named("model_name_or_path", "agent_module", "scorer_module")
_NEEDED_BY_SAMPLERS = (*_READ_BY_SAMPLERS, *flags_named("agent_config_path"))
_TASK_FILES = flags_named("train_file", "eval_file")


def class_of(name: str) -> FlagClass:
    """Return the class of a flag. Raises `KeyError` if there is no such flag."""
    return FLAGS[name].belongs


def stored_flags(config: Config) -> Flags:
    """Return the flags that the database stores: without secrets, with absolute paths."""
    flat = {name: value for group in asdict(config).values() for name, value in group.items()}
    return {
        name: _stored(name, value)
        for name, value in flat.items()
        if not FLAGS[name].info.secret and name not in _NOT_STORED
    }


def _stored(name: str, value: Any) -> Any:
    if value is None:
        return None
    if name in _PATHS:
        return str(Path(value).absolute())
    if FLAGS[name].info.function and is_function(value):
        return str(Path(value).absolute())
    if name == "mcp_manager_url" and _is_path(value):
        return str(Path(value).absolute())
    if FLAGS[name].info.kind == "JSON":
        return _in_one_spelling(value)
    if name in _URLS and _MAY_HOLD_SECRETS.search(value):
        return None
    return value


def _is_path(tools: str) -> bool:
    """Whether the tools are of a file: not of URLs, and not of an installed module."""
    return "://" not in tools and (is_function(tools) or not is_object(tools))


def _in_one_spelling(text: str) -> str:
    try:
        return json.dumps(json.loads(text), sort_keys=True)
    except ValueError:
        return text  # `config_of` refuses it


def flat_flags(by_group: Mapping[str, Mapping[str, Any]]) -> Flags:
    """Convert the flags of a checkpoint, which are grouped, to the form of `stored_flags`."""
    flat = {name: value for group in by_group.values() for name, value in group.items()}
    return {name: _stored(name, value) for name, value in flat.items() if name in FLAGS}


def changed_flags(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the run's flags whose value differs, each as `--name before → now`.

    Flags that `before` lacks and files that moved with the same content do not count as changed.
    """
    return [
        f"--{name} {_shown(before[name])} → {_shown(value)}"
        for name, value in now.items()
        if name in before and before[name] != value and class_of(name) != FlagClass.OWN
        if not (name in _PATHS and _same_content(name, before[name], value))
    ]


def refuse_fixed(before: Mapping[str, Any], now: Mapping[str, Any], what: str) -> None:
    """Raise `ConfigError` if a fixed flag has changed. `what` names the object made with it."""
    for name, value in now.items():
        if class_of(name) == FlagClass.FIXED and before.get(name, value) != value:
            raise ConfigError(
                f"--{name} {value}: {what} was made with {_shown(before[name])}, which cannot"
                f" change on the way; give --{name} {before[name]}, or another run name"
            )


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        digits, exponent = f"{value:.5e}".split("e")
        power = f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"
        return min(f"{value:g}", power, key=len)
    return str(value)


def read_digests(config: Config) -> dict[str, str]:
    """Return the digests, by flag, of the files that a joining sampler reads from its own disk."""
    flags = stored_flags(config)
    found = {name: _digest_of(name, flags[name]) for name in sorted(_READ_BY_SAMPLERS)}
    return {name: digest for name, digest in found.items() if digest is not None}


def joined_config(
    run: str, stored: Mapping[str, Any], digests: Mapping[str, str], given: Mapping[str, Any]
) -> Config:
    """Return the flags of a sampler that joins a run: `stored`, overridden by `given`.

    `digests`: the result of `read_digests` on the machine that started the run. Raises
    `ConfigError` if `given` contradicts the run in a flag that affects the data, or if a file of
    the run does not exist on this machine.
    """
    for name, value in given.items():
        own = _stored(name, value)
        agrees = stored.get(name, own) == own or (
            class_of(name) not in (FlagClass.DATA, FlagClass.SAMPLING)
            or name in _TASK_FILES  # a sampler reads tasks from the database
            or (name in digests and _digest_of(name, own) in (digests[name], None))
        )
        if not agrees:
            raise ConfigError(
                f"--{name} {_shown(value)}: run {run!r} has {_shown(stored[name])}, and"
                " trajectories of one run must be made alike; leave the flag out, or resume the "
                "run with the new value first"
            )
    known = {name: value for name, value in stored.items() if name in FLAGS}
    for name in _NEEDED_BY_SAMPLERS:
        path = known.get(name)
        if name not in given and path is not None and not Path(path).exists():
            raise ConfigError(
                f"--{name}: run {run!r} has it at {path}, which is not on this machine: give the "
                "flag with its place here"
            )
    return config_of({**known, **given})


def refuse_changed(
    run: str, stored: Mapping[str, Any], digests: Mapping[str, str], config: Config
) -> None:
    """Raise `ConfigError` if the run was resumed with other flags than this sampler has."""
    ours, files = stored_flags(config), read_digests(config)
    alike = [name for name in ours if class_of(name) in (FlagClass.DATA, FlagClass.SAMPLING)]
    changed = changed_flags(
        {name: ours[name] for name in alike if name not in _PATHS},
        {name: value for name, value in stored.items() if name in alike},
    )
    changed += [
        f"--{name} has another content"
        for name, digest in files.items()
        if digests.get(name, digest) != digest
    ]
    if changed:
        raise ConfigError(
            f"run {run!r} was resumed with other flags than this sampler has "
            f"({', '.join(changed)}): start the sampler again"
        )


def _same_content(name: str, one: str | None, other: str | None) -> bool:
    """Whether both paths exist on this machine and have the same content."""
    seen = _digest_of(name, one), _digest_of(name, other)
    return None not in seen and seen[0] == seen[1]


def _digest_of(name: str, path: str | None) -> str | None:
    digest = tokenizer_digest if name.endswith("model_name_or_path") else file_digest
    return None if path is None else digest(Path(path))
