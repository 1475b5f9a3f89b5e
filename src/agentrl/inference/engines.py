"""The registry of engines: the class that talks to the service at a URL.

A URL may name its engine, as in `NAME+http://host:port`. Without a name the engine is that of
SGLang's API, which the local engine has too. A new engine is a file with a subclass of `Engine`,
and a line in `ENGINES`.
"""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import aiohttp

from agentrl.inference.client import SGLangClient
from agentrl.inference.engine_protocol import Engine
from agentrl.inference.protocol import UNKNOWN_LIMITS, ModelLimits
from agentrl.inference.transport import engine_name, open_session

ENGINES: dict[str, type[Engine]] = {"sglang": SGLangClient}
_DEFAULT = "sglang"


class UnknownEngine(ValueError):
    """A URL names an engine that is not registered. The message is one sentence for the user."""


def engine_at(
    url: str,
    api_key: str | None = None,
    *,
    limits: ModelLimits = UNKNOWN_LIMITS,
    session: aiohttp.ClientSession | None = None,
    silence_s: float = 10.0,
) -> Engine:
    """Make the engine for a URL. The other arguments are those of `Engine`.

    Raises `UnknownEngine`.
    """
    name = engine_name(url) or _DEFAULT
    if name not in ENGINES:
        raise UnknownEngine(
            f"inference service {url}: no engine is called {name!r}, only {', '.join(ENGINES)}"
        )
    return ENGINES[name](url, api_key, limits=limits, session=session, silence_s=silence_s)


@asynccontextmanager
async def open_engines(
    urls: Iterable[str], api_key: str | None = None
) -> AsyncIterator[list[Engine]]:
    """Open the engines at these URLs, in order. Connections close with the block."""
    async with open_session() as session:
        yield [engine_at(url, api_key, session=session) for url in urls]
