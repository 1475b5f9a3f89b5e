"""Whose each flag is: the run's, which its database keeps for what joins it, or a process's.

A flag's class stands where the flag is declared (`FlagClass`). It decides what becomes of another
value on a resume, and of one that a joining sampler gives; docs/guides/checkpoints.md explains it.
Not in here: what a task file or a model holds (`digests.py`), and where flags are kept.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agentrl.configs.config import Config
from agentrl.configs.digests import tokenizer_digest
from agentrl.configs.flag import ConfigError, FlagClass, is_function
from agentrl.configs.flags import FLAGS, flags_named
from agentrl.configs.parsing import config_of
from agentrl.file_digest import file_digest

Flags = dict[str, Any]  # values by the flags' names, without dashes


# What one launch was asked to do, and says nothing of the run.
_OF_THIS_START = {*flags_named("change_data", "resume_from_checkpoint")}
# Never in a database, beside secrets: where it is itself.
_NOT_STORED = {*flags_named("db_connection_string"), *_OF_THIS_START}
# Files and folders, which have another path on another machine. Stored whole, for another folder.
_PATHS = {
    name for name, flag in FLAGS.items() if flag.info.kind in ("FILE", "DIR")
} - _OF_THIS_START
_URLS = flags_named("mcp_manager_url", "inference_urls")
_MAY_HOLD_SECRETS = re.compile(r"//[^/\s]*@|\?")  # in a URL: a user, a query
_READ_BY_SAMPLERS = flags_named("model_name_or_path", "agent_module", "scorer_module")
_NEEDED_BY_SAMPLERS = (*_READ_BY_SAMPLERS, *flags_named("agent_config_path"))
_TASK_FILES = flags_named("train_file", "eval_file")


def class_of(name: str) -> FlagClass:
    """The class of a flag. Raises `KeyError` if there is no such flag."""
    return FLAGS[name].belongs


def stored_flags(config: Config) -> Flags:
    """The flags as a database may keep them for all who join: no secrets, paths from the root."""
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
    if name == "mcp_manager_url" and "://" not in value:
        return str(Path(value).absolute())
    if FLAGS[name].info.kind == "JSON":
        return _in_one_spelling(value)
    if name in _URLS and _MAY_HOLD_SECRETS.search(value):
        return None
    return value


def _in_one_spelling(text: str) -> str:
    try:
        return json.dumps(json.loads(text), sort_keys=True)
    except ValueError:
        return text  # whoever makes a configuration of it refuses it


def flat_flags(by_group: Mapping[str, Mapping[str, Any]]) -> Flags:
    """The flags that a checkpoint holds by group, as `stored_flags` has them."""
    flat = {name: value for group in by_group.values() for name, value in group.items()}
    return {name: _stored(name, value) for name, value in flat.items() if name in FLAGS}


def changed_flags(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The run's flags whose value is another than it was, each as `--name before → now`.

    A flag that is not in `before` is new since: it has not changed. Nor have files that moved.
    """
    return [
        f"--{name} {_shown(before[name])} → {_shown(value)}"
        for name, value in now.items()
        if name in before and before[name] != value and class_of(name) != FlagClass.OWN
        if not (name in _PATHS and _same_content(name, before[name], value))
    ]


def refuse_fixed(before: Mapping[str, Any], now: Mapping[str, Any], what: str) -> None:
    """Raises `ConfigError` if a flag has changed that `what` was made with and depends on."""
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
    """What the files hold that a joining sampler reads too, wherever it has them."""
    flags = stored_flags(config)
    found = {name: _digest_of(name, flags[name]) for name in sorted(_READ_BY_SAMPLERS)}
    return {name: digest for name, digest in found.items() if digest is not None}


def joined_config(
    run: str, stored: Mapping[str, Any], digests: Mapping[str, str], given: Mapping[str, Any]
) -> Config:
    """The flags of a sampler that joins a run: the run's, and what is the sampler's own.

    `digests`: what `read_digests` said where the run was started. Raises `ConfigError` where the
    sampler gives another value than the run's for what changes the data, or a file of the run's is
    not here.
    """
    for name, value in given.items():
        own = _stored(name, value)
        agrees = stored.get(name, own) == own or (
            class_of(name) not in (FlagClass.DATA, FlagClass.SAMPLING)
            or name in _TASK_FILES  # its tasks come from the database
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
    """Raises `ConfigError` if the run has other flags now than a sampler that joined it before."""
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
    """Whether two paths lead to the same as far as can be seen from here."""
    seen = _digest_of(name, one), _digest_of(name, other)
    return None not in seen and seen[0] == seen[1]


def _digest_of(name: str, path: str | None) -> str | None:
    digest = tokenizer_digest if name.endswith("model_name_or_path") else file_digest
    return None if path is None else digest(Path(path))
