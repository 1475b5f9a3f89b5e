"""A section of the agent file that is a mapping: its models, and what holds for all of them.

    scorer_agent:
      models: [{model, base_url, api_key}, ...]     # tried in order
      max_retries: 5         # tries of each model
      retry_delay: 1         # seconds before the second try
      backoff_factor: 2      # by which each later pause is longer
      timeout: 60
      judge_prompt_template: ...

A list of models is the short form. A section becomes the list of its models, each with what holds
for all, and its own settings (`JudgeSettings`, `BrowseSettings`).
"""

import logging
from collections.abc import Mapping
from string import Formatter
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

log = logging.getLogger(__name__)

_JUDGED = frozenset({"question", "labeled_answer", "pred_answer"})
_OF_ALL = ("timeout", "retry_delay", "backoff_factor", "extra_body")


class JudgeSettings(BaseModel):
    """How `scorer_agent` is asked. `judge_prompt_template`: a prompt with `{question}`,
    `{labeled_answer}` and `{pred_answer}`, answered "Correct" or "Incorrect"; None: our own."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    judge_prompt_template: str | None = None

    @field_validator("judge_prompt_template")
    @classmethod
    def _has_known_places(cls, template: str | None) -> str | None:
        if not template:
            return None
        try:
            named = {name for _, name, _, _ in Formatter().parse(template) if name is not None}
        except ValueError as error:
            raise ValueError(f"{error}; write a brace of the text twice") from None
        if not named <= _JUDGED or "pred_answer" not in named:
            raise ValueError(
                "must hold {pred_answer}, and may hold {question} and {labeled_answer}; it holds "
                f"{', '.join(f'{{{name}}}' for name in sorted(named)) or 'none'} (write a brace of "
                "the text twice)"
            )
        return template


class BrowseSettings(BaseModel):
    """Which results `browse_agent` reads, and what for. Lengths are tokens of `tokenizer_path`, or
    of the trained model's tokenizer.

    `status`: whether it reads any. `default_purpose`: for calls of a tool that name a `url` and no
    `purpose`, by tool.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_prompt_length: int = Field(60_000, gt=0)
    min_prompt_length: int = Field(1500, ge=0)
    browse_tools: tuple[str, ...] = ("fetch_url", "visit")
    default_purpose: dict[str, str] = Field(default_factory=dict)
    tokenizer_path: str | None = None
    status: bool = True


def split_sections(content: Mapping[str, Any]) -> dict[str, Any]:
    """The file's content with lists of models, and the settings beside them.

    Raises ValueError for a section that is neither a list nor a mapping with `models`.
    """
    split = dict(content)
    for name in ("scorer_agent", "browse_agent", "ruler_agent"):
        section = content.get(name)
        if not isinstance(section, Mapping):
            continue
        settings = dict(section)
        split[name] = _models(name, settings)
        if settings.pop("enable_logging", False):
            log.info("%s.enable_logging: the database has each result and each reply anyway", name)
        if name == "scorer_agent":
            split["judge"] = settings
        elif name == "browse_agent":
            split["browsing"] = {key: v for key, v in settings.items() if v not in (None, "")}
        elif settings:
            raise ValueError(f"{name}: has no {', '.join(sorted(settings))}")
    return split


def _models(name: str, settings: dict[str, Any]) -> list[Any]:
    """The models of a section, with the settings of all of them, which are taken out."""
    models = settings.pop("models", None)
    if not isinstance(models, list) or not models:
        raise ValueError(f"{name}: needs `models`, a list of models with base_url and model")
    # An answer has as many tokens as the endpoint allows: a reader's report is long.
    shared: dict[str, Any] = {"max_tokens": None}
    shared |= {key: settings.pop(key) for key in _OF_ALL if key in settings}
    if (tries := settings.pop("max_retries", None)) is not None:
        if not isinstance(tries, int) or tries < 1:
            raise ValueError(f"{name}.max_retries: {tries!r} is no whole number above 0")
        shared["retries"] = tries - 1
    return [{**shared, **model} if isinstance(model, Mapping) else model for model in models]
