"""Flags to a checked configuration, with the origin of each value.

Flags come in layers. A value of a later layer takes precedence:

    default < preset (or the flags a run was launched with) < file < environment < command line
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from agentrl.configs.combinations import check_combinations
from agentrl.configs.command_line import run_parser
from agentrl.configs.config import Config
from agentrl.configs.flags import FLAGS, Value, holds_secret, shown, written
from agentrl.configs.hub import with_models_here
from agentrl.configs.losses import LOSSES, loss_defaults
from agentrl.configs.run_file import read_run_file
from agentrl.configs.secret_variables import (
    flags_in_environment,
    secret_environment,
    without_secret_flags,
)
from agentrl.configs.training import LossConfig

COMMAND_LINE = "command line"


@dataclass(frozen=True)
class Layer:
    """Flags from one source. `origin` is the name of the source for display."""

    origin: str
    values: Mapping[str, Value]


def layers_given(
    values: Mapping[str, Value], files: Sequence[str], environment: Sequence[Layer] = ()
) -> list[Layer]:
    """Return the layers of one command, lowest first: files, environment, command line.

    Raises `ConfigError` if a file cannot be read or is invalid.
    """
    in_files = [Layer(f"file {file}", read_run_file(file)) for file in files]
    return [*in_files, *environment, Layer(COMMAND_LINE, values)]


def read_flags(flags: Sequence[str], origin: str = COMMAND_LINE) -> Layer:
    """Parse the words of a command line into a layer. Raises `ConfigError`."""
    return Layer(origin, run_parser("agentrl train").parse(flags).values)


def merged(layers: Sequence[Layer]) -> dict[str, Value]:
    """Return the value of each given flag; a later layer takes precedence."""
    return {name: value for layer in layers for name, value in layer.values.items()}


def origins_of(layers: Sequence[Layer]) -> dict[str, str]:
    """Return the origin of each value of `merged`."""
    return {name: layer.origin for layer in layers for name in layer.values}


def as_words(layers: Sequence[Layer]) -> list[str]:
    """Return the merged flags as the words of a command line."""
    words: list[str] = []
    for name, value in merged(layers).items():
        text = written(value)
        # A value that begins with a minus is joined to its flag: argparse would take it for one.
        words += [f"--{name}={text}"] if text.startswith("-") else [f"--{name}", text]
    return words


@dataclass(frozen=True)
class InForce:
    """The value of a flag and its origin. `value` None has the effect that `unset` describes."""

    value: Value | None
    origin: str


DEFAULT = "default"


def in_force(layers: Sequence[Layer]) -> dict[str, InForce]:
    """Return the value of every flag and its origin, defaults and loss defaults included."""
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
    """Return the flags that the loss's paper sets; none for a loss in a user's file."""
    if loss not in LOSSES:
        return {}
    paper = loss_defaults(loss)
    of_loss: dict[str, Any] = {n: v for n, v in given.items() if FLAGS[n].group == "loss"}
    config = LossConfig(**of_loss)
    values: dict[str, Value] = {
        "advantage": paper.advantage,
        "epsilon": paper.epsilon,
        "proximal_policy": config.centre,
        "rollout_is_threshold": paper.rollout_is_threshold,
        "normalize_advantages": paper.normalize_advantages,
        "strict_in_bound": config.is_strict,
    }
    if "epsilon_higher" not in given:
        higher = paper.clip_ratio_high
        values["clip_ratio_high"] = (
            given.get("epsilon", paper.epsilon) if higher is None else higher
        )
    if "token_level_loss" not in given and not given.get("skip_length_normalization"):
        values["token_level_loss"] = paper.normalisation == "token"
        values["skip_length_normalization"] = paper.normalisation == "constant"
    return values


def in_brackets(held: Mapping[str, InForce]) -> dict[str, str]:
    """Return "origin: value" for each flag, which `--help` shows in brackets."""
    texts = {}
    for name, flag in FLAGS.items():
        value, origin = held[name].value, held[name].origin
        texts[name] = f"{origin}: {flag.info.unset if value is None else shown(flag, value)}"
    return texts


def config_of(values: Mapping[str, Value | None]) -> Config:
    """Return the configuration with these values, and defaults for the other flags.

    Raises `ConfigError` for a value out of range and for flags that contradict each other.
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
    """Return the configuration of a command line and of the files that it names.

    `environment`: the environment of a process that gets its secrets by it (`secret_variables`).
    Raises `ConfigError` for an unknown flag and for a value of the wrong type or out of range.
    """
    return config_of(given_values(argv, prog, environment))


def given_values(
    argv: Sequence[str], prog: str, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the flags given in `argv`, its files and `environment`, without defaults.

    Models that are named as on the hub are downloaded. Raises `ConfigError`.
    """
    given = run_parser(prog).parse(argv)
    secrets = Layer("environment", flags_in_environment(environment or {}))
    return with_models_here(merged(layers_given(given.values, given.files, [secrets])))


def handed_on(
    flags: Sequence[str], environment: Mapping[str, str] | None = None
) -> tuple[list[str], dict[str, str]]:
    """Split flags for a child process into its command line and, for secrets, its environment.

    `environment`: further secrets that are not in `flags`.
    """
    values = given_values(flags, "agentrl train", environment)
    return as_words([Layer("", without_secret_flags(values))]), secret_environment(values)


def recorded(flags: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Split flags for a file: words without secrets, and redacted values of the rest by name."""
    values = read_flags(flags).values
    withheld = {name: value for name, value in values.items() if holds_secret(FLAGS[name], value)}
    kept = {name: value for name, value in values.items() if name not in withheld}
    return as_words([Layer("", kept)]), {
        name: shown(FLAGS[name], value) for name, value in withheld.items()
    }


def _with_loss_defaults(config: Config) -> Config:
    """Set the advantage of the loss's paper if none is given. Samplers do not read loss flags."""
    if config.reward.advantage is not None:
        return config
    advantage = loss_defaults(config.loss.loss_calculator).advantage
    return replace(config, reward=replace(config.reward, advantage=advantage))


def _validate(config: Config) -> None:
    """Raise `ConfigError` for values that would fail later or be ignored."""
    for flag in FLAGS.values():
        flag.check(getattr(getattr(config, flag.group), flag.name))
    check_combinations(config)
