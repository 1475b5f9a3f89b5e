"""The auxiliary models and services of agents and scorers, a YAML file (`--agent_config_path`).

`scorer_agent` judges answers, `ruler_agent` ranks rollouts, `http_scorer` is a reward service
(`rollout/scorers`). `browse_agent` reads long results of tools (`tools/browse.py`). Each list of
models is tried in order (`rollout/llm/client.py`). A section may also be a mapping with its models
and settings (`sections.py`).
"""

import os
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from agentrl.rollout.llm.sections import BrowseSettings, JudgeSettings, split_sections


class AgentModelsError(ValueError):
    """The file of `--agent_config_path` is unusable. The message names the file and the key."""


class AgentModel(BaseModel):
    """A model behind an OpenAI-compatible endpoint."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(min_length=1)
    base_url: str = Field(pattern=r"^https?://")
    api_key: str | None = None
    api_key_env: str | None = None  # name of the environment variable that holds the key
    temperature: float = Field(0.0, ge=0)
    max_tokens: int | None = Field(1024, gt=0)  # None: as many as the endpoint allows
    timeout: float = Field(60.0, gt=0)  # seconds per request
    retries: int = Field(2, ge=0)  # further tries before the next model is asked
    retry_delay: float | None = Field(None, ge=0)  # seconds before the first of them (0.5)
    backoff_factor: float = Field(2.0, ge=1)  # by which each later pause is longer
    extra_body: dict[str, Any] | None = None  # further fields of each request

    @model_validator(mode="after")
    def _one_key(self) -> Self:
        _check_secret("api_key", self.api_key, self.api_key_env)
        return self

    @property
    def key(self) -> str:
        """The API key; a placeholder if none is given, because clients require one."""
        if self.api_key_env is not None:
            return os.environ[self.api_key_env]
        return self.api_key or "none"


class RewardServiceConfig(BaseModel):
    """The service behind the scorer `http`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str = Field(pattern=r"^https?://")
    token: str | None = None
    token_env: str | None = None  # name of the environment variable that holds the token
    timeout: float = Field(60.0, gt=0)  # seconds, from a request to the end of its answer
    retries: int = Field(2, ge=0)
    concurrency: int = Field(64, gt=0)  # concurrent requests per process; others wait

    @model_validator(mode="after")
    def _one_token(self) -> Self:
        _check_secret("token", self.token, self.token_env)
        return self

    @property
    def key(self) -> str | None:
        """The bearer token; None if there is none."""
        return self.token if self.token_env is None else os.environ[self.token_env]


class AgentModels(BaseModel):
    """The content of the file of `--agent_config_path`, by use."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    browse_agent: tuple[AgentModel, ...] = ()
    scorer_agent: tuple[AgentModel, ...] = ()
    ruler_agent: tuple[AgentModel, ...] = ()
    http_scorer: RewardServiceConfig | None = None
    judge: JudgeSettings = JudgeSettings()
    browsing: BrowseSettings | None = None  # None: by the flags --browse_*

    @model_validator(mode="before")
    @classmethod
    def _sections(cls, content: object) -> object:
        return split_sections(content) if isinstance(content, dict) else content

    @property
    def scorer_section(self) -> dict[str, Any]:
        """The section `scorer_agent` as the file may have it: a mapping with `models`."""
        models = [{**model.model_dump(), "api_key": model.key} for model in self.scorer_agent]
        tries = [model.retries + 1 for model in self.scorer_agent]
        return {"models": models, "max_retries": max(tries, default=1), **self.judge.model_dump()}

    @property
    def ranking_models(self) -> tuple[AgentModel, ...]:
        """The models of the scorer `ruler`: `ruler_agent`, else `scorer_agent`."""
        return self.ruler_agent or self.scorer_agent


def _check_secret(name: str, given: str | None, variable: str | None) -> None:
    """Raise ValueError if a secret is given twice, or its environment variable is not set."""
    if given is not None and variable is not None:
        raise ValueError(f"give {name} or {name}_env, not both")
    if variable is not None and not os.environ.get(variable):
        raise ValueError(f"the environment variable {variable} is not set")


def load_agent_models(path: str | Path | None) -> AgentModels:
    """Read the file; None gives an empty one. Raises `AgentModelsError`."""
    if path is None:
        return AgentModels()
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise AgentModelsError(
            f"--agent_config_path: {path} cannot be read: {error.strerror}"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise AgentModelsError(f"--agent_config_path: {path} is not YAML: {error}") from None
    if not isinstance(content, dict):
        raise AgentModelsError(
            f"--agent_config_path: {path} holds no mapping with scorer_agent and browse_agent"
        )
    try:
        return AgentModels.model_validate(content)
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(map(str, fault['loc']))}: {fault['msg'].removeprefix('Value error, ')}"
            for fault in error.errors()
        )
        raise AgentModelsError(f"--agent_config_path: {path}: {faults}") from None
