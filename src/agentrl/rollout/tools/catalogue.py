"""The tools of the model and their names: a function of the servers' tools.

A tool keeps its name. If two servers offer the same name, both are prefixed with their server's
name: `search` of the servers `web` and `wiki` becomes `web__search` and `wiki__search`.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any

from agentrl.configs import ConfigError

CREATE_TOOL, CLOSE_TOOL = "create_session", "close_session"
"""Tools that the model does not see; samplers call them (docs/reference/tools.md)."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A tool as its server lists it.

    `parameters`: JSON schema of the arguments. `read_only`: whether it changes nothing, by the
    annotations of MCP; None if they do not tell.
    """

    server: str
    tool: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    read_only: bool | None = None

    @property
    def full_name(self) -> str:
        """`server.tool`, which patterns may match besides the tool's name."""
        return f"{self.server}.{self.tool}"


class Effect(StrEnum):
    """What a call leaves behind, for a fork of its rollout (docs/reference/tools.md)."""

    NONE = "none"  # the result is all there is of it
    REPEATABLE = "repeatable"  # a state of the record's own session, made again by the same calls
    LASTING = "lasting"  # a state that no other rollout can have


def effect_of(offer: Offer, per_record: bool, resettable: bool | None) -> Effect:
    """The effect of a tool's calls.

    `per_record`: each record has its own session with the server. `resettable`: whether a new one
    begins as the last one began, if its entry in the config file tells.
    """
    if offer.read_only:
        return Effect.NONE
    if per_record and resettable is not False:
        return Effect.REPEATABLE
    # Records that share a server share what is in it, so usually nothing of theirs is.
    lasting = resettable is False or offer.read_only is False
    return Effect.LASTING if lasting else Effect.NONE


@dataclass(frozen=True)
class Catalogue:
    """The tools by the names in prompts. `renamed`: the names that are not the tools' own."""

    tools: Mapping[str, Offer]
    renamed: tuple[str, ...]

    @property
    def schemas(self) -> tuple[dict[str, Any], ...]:
        """The tools as OpenAI's function schemas, which chat templates expect."""
        return tuple(_as_function(name, offer) for name, offer in self.tools.items())


def catalogue(
    offers: Sequence[Offer], allow: Sequence[str] = (), block: Sequence[str] = ()
) -> Catalogue:
    """The tools for the model, in the order of `offers`.

    `allow`, `block`: patterns (`*`, `?`, `[…]`) of names or of `server.name`. An empty `allow`
    allows all; `block` takes precedence. Names are made unique after that, so if one of two tools
    of the same name is blocked, the other keeps its name. Raises `ConfigError` for a pattern that
    matches no tool, and for names that stay ambiguous.
    """
    open_to_model = [offer for offer in offers if offer.tool not in (CREATE_TOOL, CLOSE_TOOL)]
    for flag, patterns in (("mcp_allow_tools", allow), ("mcp_block_tools", block)):
        for pattern in patterns:
            if not any(_matches(offer, [pattern]) for offer in open_to_model):
                names = ", ".join(offer.full_name for offer in open_to_model) or "none"
                raise ConfigError(f"--{flag}: {pattern!r} matches no tool; the tools are {names}")
    chosen = [
        offer
        for offer in open_to_model
        if (not allow or _matches(offer, allow)) and not _matches(offer, block)
    ]
    times = Counter(offer.tool for offer in chosen)
    named = [
        (offer.tool if times[offer.tool] == 1 else _with_server(offer), offer) for offer in chosen
    ]
    twice = [name for name, count in Counter(name for name, _ in named).items() if count > 1]
    if twice:
        raise ConfigError(
            f"two tools would both be called {twice[0]}: block one of them with --mcp_block_tools, "
            "or give the servers other names"
        )
    renamed = tuple(name for name, offer in named if name != offer.tool)
    return Catalogue(dict(named), renamed)


def _matches(offer: Offer, among: Sequence[str]) -> bool:
    names = (offer.tool, offer.full_name)
    return any(fnmatchcase(name, pattern) for pattern in among for name in names)


def _with_server(offer: Offer) -> str:
    return f"{re.sub(r'[^A-Za-z0-9_-]', '_', offer.server)}__{offer.tool}"


def _as_function(name: str, offer: Offer) -> dict[str, Any]:
    function = {
        "name": name,
        "description": offer.description,
        "parameters": dict(offer.parameters),
    }
    return {"type": "function", "function": function}
