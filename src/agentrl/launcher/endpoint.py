"""`--endpoint` of `agentrl eval`: its flags, and a first request before anything is started."""

import asyncio
import os
from argparse import Namespace

from agentrl.configs import Config, ConfigError
from agentrl.configs.text_checks import check_service_url
from agentrl.launcher.console import Say
from agentrl.rollout.llm.endpoint import ChatEndpoint, EndpointRefused, EndpointUnreachable
from agentrl.rollout.llm.models import AgentModel

_KEY_VARIABLE = "OPENAI_API_KEY"
_PATIENCE_S = 3.0
_FIRST_TOKENS = 16


def endpoint_of(own: Namespace, config: Config) -> AgentModel | None:
    """The model behind `--endpoint`; None without one. Raises `ConfigError`."""
    if own.endpoint is None:
        for flag in ("endpoint_model", "endpoint_key_env"):
            if getattr(own, flag) is not None:
                raise ConfigError(f"--{flag} belongs to --endpoint, which is not given")
        return None
    try:
        check_service_url(own.endpoint)
    except ValueError as error:
        raise ConfigError(f"--endpoint {own.endpoint}: {error}") from None
    if own.endpoint_model is None:
        raise ConfigError("--endpoint_model is needed: the name of the model at --endpoint")
    variable = own.endpoint_key_env or (_KEY_VARIABLE if os.environ.get(_KEY_VARIABLE) else None)
    if variable is not None and not os.environ.get(variable):
        raise ConfigError(f"--endpoint_key_env: the environment variable {variable} is not set")
    if config.context.new_context != "disabled":
        raise ConfigError(
            f"--new_context {config.context.new_context}: a context is rewritten as tokens, which "
            "an API does not give; evaluate --endpoint without it"
        )
    return AgentModel(
        model=own.endpoint_model,
        base_url=own.endpoint.rstrip("/"),
        api_key_env=variable,
        timeout=config.sampling.request_timeout,
    )


def look_at_endpoint(model: AgentModel, timeout_s: float) -> str | None:
    """Ask the endpoint for a few tokens; returns a sentence if it cannot answer now.

    `timeout_s`: of a request at most. Raises `ConfigError` if it does not answer, or refuses our
    key or the model's name.
    """
    try:
        asyncio.run(_ask(_limited(model, timeout_s), _PATIENCE_S))
    except (EndpointUnreachable, EndpointRefused) as error:
        if isinstance(error, EndpointUnreachable) and error.for_now:
            return f"--endpoint is waited for when it is needed: {error}"
        raise ConfigError(f"--endpoint: {error}") from None
    return None


async def await_endpoint(model: AgentModel, patience_s: float, say: Say) -> None:
    """Wait until the endpoint answers, for up to `patience_s` seconds if it cannot answer now.

    No request takes longer either. `say`: called with a sentence before it waits. Raises
    `ConfigError` if it does not answer, or refuses our key or the model's name.
    """
    model, first_s = _limited(model, patience_s), min(_PATIENCE_S, patience_s)
    try:
        try:
            await _ask(model, first_s)
        except EndpointUnreachable as away:
            if not away.for_now or first_s == patience_s:
                raise
            say(f"--endpoint is waited for, {patience_s:g} s at most: {away}")
            await _ask(model, patience_s - first_s)
    except (EndpointUnreachable, EndpointRefused) as error:
        raise ConfigError(f"--endpoint: {error}") from None


def _limited(model: AgentModel, timeout_s: float) -> AgentModel:
    return model.model_copy(update={"timeout": min(model.timeout, timeout_s)})


async def _ask(model: AgentModel, patience_s: float) -> None:
    async with ChatEndpoint(model, {}, patience_s) as endpoint:
        await endpoint.complete([{"role": "user", "content": "Hello"}], (), _FIRST_TOKENS)
