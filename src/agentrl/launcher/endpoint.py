"""`--endpoint` of `agentrl eval`: its flags, and a first request before anything is started."""

import asyncio
import os
from argparse import Namespace

from agentrl.configs import Config, ConfigError
from agentrl.configs.text_checks import check_service_url
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


def check_endpoint(model: AgentModel) -> str | None:
    """Ask the endpoint for a few tokens. Returns a sentence if it cannot answer just now.

    Raises `ConfigError` if it does not answer at all, or refuses our key or the model's name.
    """
    return asyncio.run(_ask(model))


async def _ask(model: AgentModel) -> str | None:
    try:
        async with ChatEndpoint(model, {}, _PATIENCE_S) as endpoint:
            await endpoint.complete([{"role": "user", "content": "Hello"}], (), _FIRST_TOKENS)
    except (EndpointUnreachable, EndpointRefused) as error:
        if isinstance(error, EndpointUnreachable) and error.for_now:
            return f"--endpoint is waited for: {error}"
        raise ConfigError(f"--endpoint: {error}") from None
    return None
