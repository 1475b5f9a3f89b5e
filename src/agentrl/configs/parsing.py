"""From flags to a checked configuration, with where each value comes from.

Layers of flags lie on one another, and the topmost that has a flag gives its value:

    default < preset (or the flags a run was launched with) < file < environment < command line
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from agentrl.configs.command_line import run_parser
from agentrl.configs.config import Config
from agentrl.configs.flag import ConfigError
from agentrl.configs.flags import FLAGS, Value, shown, written
from agentrl.configs.loss_checks import validate_loss
from agentrl.configs.losses import LOSSES, loss_defaults
from agentrl.configs.run_file import read_run_file
from agentrl.configs.training import ReservedConfig

SAMPLING_PARAMS = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty",
)  # fmt: skip
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,37}")  # MongoDB: 63 bytes for a database's name

_SERVICE_URL = re.compile(r"([a-z0-9_]+\+)?https?://")  # an engine's name may come before


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
    return [*in_files, *environment, Layer("command line", values)]


def read_flags(flags: Sequence[str], origin: str = "command line") -> Layer:
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


def parse_config(argv: Sequence[str], prog: str = "agentrl train") -> Config:
    """The configuration that the flags in `argv` give, and the files that they name.

    Raises `ConfigError`: an unknown flag, a value of the wrong type or out of its range.
    """
    given = run_parser(prog).parse(argv)
    return config_of(merged(layers_given(given.values, given.files)))


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
    validate_loss(config.loss)
    longest = config.sampling.max_prompt_tokens
    if config.context.new_context != "disabled" and not (
        longest is not None and longest < config.sampling.max_tokens
    ):
        raise ConfigError(
            f"--new_context {config.context.new_context}: needs --max_prompt_tokens, below "
            f"--max_tokens ({config.sampling.max_tokens}), which ends a record"
        )
    for url in config.inference_urls:
        if not _SERVICE_URL.match(url):
            raise ConfigError(
                f"--inference_urls {url}: must begin with http:// or https://, or with the name of"
                " an engine and a + before that"
            )
    if not RUN_NAME.fullmatch(config.run.run_name):
        raise ConfigError(
            f"--run_name {config.run.run_name!r}: must be 1 to 38 letters, digits, - or _, "
            "because it names a database and folders"
        )
    if config.parallel.pp_size > 1:
        raise ConfigError(
            f"--pp_size {config.parallel.pp_size}: there is no pipeline parallelism, because a "
            "step's trees have no common shape to send between stages; use --dp_replicate_size, "
            "--tp_size, --cp_size or --ep_size"
        )
    if config.lora.lora_rank and (config.parallel.tp_size > 1 or config.parallel.ep_size > 1):
        raise ConfigError(
            f"--lora_rank {config.lora.lora_rank}: an adapter cannot be split over --tp_size or "
            "--ep_size, because the model's plan for them does not know it; shard over data or use "
            "--cp_size"
        )
    for reserved in fields(ReservedConfig):
        value = getattr(config.reserved, reserved.name)
        if value != reserved.default:
            raise ConfigError(
                f"--{reserved.name} {value}: this version has only {reserved.default}; "
                "leave the flag out"
            )
    _validate_sampling_params(config.sampling.preferred_sampling_params)
    _json_object("chat_template_kwargs", config.model.chat_template_kwargs)
    ratio = config.services.inf_mem_ratio
    if ratio is not None and not 0 < ratio < 1:
        raise ConfigError(f"--inf_mem_ratio {ratio:g}: must lie between 0 and 1")
    if config.services.inf_share_gpus and not config.sampling.sync_sampling:
        raise ConfigError(
            "--inf_share_gpus: needs --sync_sampling, because services whose memory is given back "
            "cannot sample while the trainer computes"
        )
    for name in ("gae_gamma", "gae_lambda"):
        factor = getattr(config.critic, name)
        if not 0 <= factor <= 1:
            raise ConfigError(f"--{name} {factor:g}: must lie between 0 and 1")
    for name in ("adam_beta1", "adam_beta2"):
        beta = getattr(config.optimizer, name)
        if not 0 <= beta < 1:
            raise ConfigError(f"--{name} {beta:g}: must be at least 0 and below 1")
    if config.optimizer.adam_epsilon <= 0:
        raise ConfigError(f"--adam_epsilon {config.optimizer.adam_epsilon:g}: must be above 0")
    compares = config.reward.estimator != "score" and config.loss.loss_calculator != "CrossEntropy"
    if config.sampling.num_generations < 2 and compares:
        raise ConfigError(
            f"--num_generations {config.sampling.num_generations}: an advantage compares rollouts "
            "at one task, so there must be at least 2"
        )


def _json_object(name: str, text: str) -> dict[str, Any]:
    """The JSON object that is a flag's value."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--{name} {text}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ConfigError(f"--{name} {text}: not a JSON object")
    return value


def _validate_sampling_params(text: str) -> None:
    flag = f"--preferred_sampling_params {text}"
    params = _json_object("preferred_sampling_params", text)
    for name, value in params.items():
        if name not in SAMPLING_PARAMS:
            raise ConfigError(f"{flag}: {name} is not known; known: {', '.join(SAMPLING_PARAMS)}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{flag}: {name} is not a number")
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{flag}: {name} is not a finite number")
    if params.get("temperature", 1.0) <= 0:
        raise ConfigError(
            f"{flag}: temperature must be above 0, because rollouts of one task must differ"
        )
