"""Checks the inference services of `--inference_urls` before a launch: their key and context."""

import asyncio

from agentrl.configs import Config, ConfigError
from agentrl.inference.engine_protocol import Engine
from agentrl.inference.engines import open_engines
from agentrl.inference.protocol import InferenceError, KeyRefused
from agentrl.launcher.console import Say
from agentrl.rollout.agents.limits import check_context

_PATIENCE_S = 10.0


def check_services(config: Config, say: Say) -> None:
    """Check that the services of `--inference_urls` accept our key and have a sufficient context.

    A service that does not answer may be starting: `say` reports it, and samplers wait for it.
    Raises `ConfigError`, and `UnknownEngine` for an unknown engine in a URL.
    """
    if config.inference_urls:
        asyncio.run(_check_all(config, say))


async def _check_all(config: Config, say: Say) -> None:
    async with open_engines(config.inference_urls, config.sampling.inference_api_key) as engines:
        await asyncio.gather(*(_check(engine, config, say) for engine in engines))


async def _check(engine: Engine, config: Config, say: Say) -> None:
    try:
        async with asyncio.timeout(_PATIENCE_S):
            limits = await engine.fetch_limits()
    except KeyRefused as error:
        raise ConfigError(f"--inference_urls {engine.url}: {error}") from None
    except (InferenceError, TimeoutError) as error:
        reason = str(error) or f"no answer within {_PATIENCE_S:g} s"
        say(f"inference service {engine.url} is waited for, it does not tell its limits: {reason}")
        return
    if limits.context_length is not None:
        whose = f"inference service {engine.url}"
        doubt = check_context(config.sampling, limits.context_length, whose)
        if doubt is not None:
            say(doubt)
