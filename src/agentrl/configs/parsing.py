"""From flags to a checked configuration, with where each value comes from.

Layers of flags lie on one another, and the topmost that has a flag gives its value:

    default < preset (or the flags a run was launched with) < file < environment < command line
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from agentrl.configs.combinations import check_combinations
from agentrl.configs.command_line import run_parser
from agentrl.configs.config import Config
from agentrl.configs.flags import FLAGS, Value, holds_secret, shown, written
from agentrl.configs.losses import LOSSES, loss_defaults
from agentrl.configs.run_file import read_run_file
from agentrl.configs.secret_variables import (
    flags_in_environment,
    secret_environment,
    without_secret_flags,
)

COMMAND_LINE = "command line"


@dataclass(frozen=True)
class Layer:
    """Flags that come from one place. `origin` names it for people."""

    origin: str
    values: Mapping[str, Value]


def layers_given(
    values: Mapping[str, Value], files: Sequence[str], environment: Sequence[Layer] = ()
) -> list[Layer]:
    """Those of one command: its files of flags, its environment, and the flags themselves.

    Raises `ConfigError` for a file that cannot be used.
    """
    in_files = [Layer(f"file {file}", read_run_file(file)) for file in files]
    return [*in_files, *environment, Layer(COMMAND_LINE, values)]


def read_flags(flags: Sequence[str], origin: str = COMMAND_LINE) -> Layer:
    """Flags as words, as they are recorded and handed to other processes."""
    return Layer(origin, run_parser("agentrl train").parse(flags).values)


def merged(layers: Sequence[Layer]) -> dict[str, Value]:
    """What the topmost layers say."""
    return {name: value for layer in layers for name, value in layer.values.items()}


def origins_of(layers: Sequence[Layer]) -> dict[str, str]:
    """From where each value of `merged` comes."""
    return {name: layer.origin for layer in layers for name in layer.values}


def as_words(layers: Sequence[Layer]) -> list[str]:
    """The flags of all layers for a command line, each once."""
    words: list[str] = []
    for name, value in merged(layers).items():
        text = written(value)
        # A value that looks like a flag stands in one word with its own.
        words += [f"--{name}={text}"] if text.startswith("-") else [f"--{name}", text]
    return words


@dataclass(frozen=True)
class InForce:
    """What holds for a flag. `value` None: what its `unset` says."""

    value: Value | None
    origin: str


DEFAULT = "default"


def in_force(layers: Sequence[Layer]) -> dict[str, InForce]:
    """What holds for every flag, and who says so."""
    values, origins = merged(layers), origins_of(layers)
    held = {
        name: InForce(values.get(name, f.default), origins.get(name, DEFAULT))
        for name, f in FLAGS.items()
    }
    loss = str(held["loss_calculator"].value)
    for name, value in _of_the_paper(loss, values).items():
        if name not in values:
            held[name] = InForce(value, f"paper of {loss}")
    return held


def _of_the_paper(loss: str, given: Mapping[str, Value]) -> dict[str, Value]:
    """What flags that are not given stand at, by the paper of a known loss."""
    if loss not in LOSSES:
        return {}
    paper = loss_defaults(loss)
    higher = paper.epsilon_higher
    values: dict[str, Value] = {
        "advantage": paper.advantage,
        "epsilon": paper.epsilon,
        "epsilon_higher": given.get("epsilon", paper.epsilon) if higher is None else higher,
        "normalize_advantages": paper.normalize_advantages,
    }
    if "token_level_loss" not in given and not given.get("skip_length_normalization"):
        values["token_level_loss"] = paper.normalisation == "token"
        values["skip_length_normalization"] = paper.normalisation == "none"
    return values


def in_brackets(held: Mapping[str, InForce]) -> dict[str, str]:
    """What holds for each flag as `--help` says it."""
    texts = {}
    for name, flag in FLAGS.items():
        value, origin = held[name].value, held[name].origin
        texts[name] = f"{origin}: {flag.info.unset if value is None else shown(flag, value)}"
    return texts


def config_of(values: Mapping[str, Value | None]) -> Config:
    """The configuration with these values of flags, and defaults for the others.

    Raises `ConfigError` for a value out of its range.
    """
    groups: dict[str, Any] = {}
    for group in fields(Config):
        own = {name: value for name, value in values.items() if FLAGS[name].group == group.name}
        groups[group.name] = group.type(**own)  # type: ignore[operator]
    config = _with_loss_defaults(Config(**groups))
    _validate(config)
    return config


def parse_config(
    argv: Sequence[str],
    prog: str = "agentrl train",
    environment: Mapping[str, str] | None = None,
) -> Config:
    """The configuration that the flags in `argv` give, and the files that they name.

    `environment`: of a process that is handed its secrets by it (`secret_variables`). Raises
    `ConfigError`: an unknown flag, a value of the wrong type or out of its range.
    """
    return config_of(given_values(argv, prog, environment))


def given_values(
    argv: Sequence[str], prog: str, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The flags that stand in `argv`, in files that it names and in `environment`, no defaults.

    Raises `ConfigError`.
    """
    given = run_parser(prog).parse(argv)
    secrets = Layer("environment", flags_in_environment(environment or {}))
    return merged(layers_given(given.values, given.files, [secrets]))


def handed_on(
    flags: Sequence[str], environment: Mapping[str, str] | None = None
) -> tuple[list[str], dict[str, str]]:
    """Flags for a process that we start: its command line, and its environment for those that may
    hold a secret. `environment`: where such stand beside `flags`."""
    values = given_values(flags, "agentrl", environment)
    return as_words([Layer("", without_secret_flags(values))]), secret_environment(values)


def recorded(flags: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Flags for a file: those without a secret, and the others as they may be shown, by name."""
    values = read_flags(flags).values
    withheld = {name: value for name, value in values.items() if holds_secret(FLAGS[name], value)}
    kept = {name: value for name, value in values.items() if name not in withheld}
    return as_words([Layer("", kept)]), {
        name: shown(FLAGS[name], value) for name, value in withheld.items()
    }


def _with_loss_defaults(config: Config) -> Config:
    """With the advantage that the loss's paper has, if none is given: samplers know no loss."""
    if config.reward.advantage is not None:
        return config
    advantage = loss_defaults(config.loss.loss_calculator).advantage
    return replace(config, reward=replace(config.reward, advantage=advantage))


def _validate(config: Config) -> None:
    """Refuse values that would fail later, or quietly mean something else."""
    for flag in FLAGS.values():
        flag.check(getattr(getattr(config, flag.group), flag.name))
    check_combinations(config)
