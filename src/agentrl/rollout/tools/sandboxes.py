"""A task's arguments for the sandboxes of its tools: `create_kwargs`, by server.

    {"tools_kwargs": {"python": {"create_kwargs": {"files": {...}}}}}

`python` is a server or one of its tools. This is the layout of verl's `extra_info.tools_kwargs`.
"""

from collections.abc import Mapping
from typing import Any

from agentrl.rollout.tools.calls import ToolSessionFailed
from agentrl.rollout.tools.catalogue import Catalogue

FIELD = "tools_kwargs"


def create_kwargs(
    fields: Mapping[str, Any], catalogue: Catalogue
) -> tuple[dict[str, dict[str, Any]], tuple[str, ...]]:
    """A task's `create_kwargs` by server, and the unknown names in them.

    `fields`: the task's further fields. The arguments for a server and for its tools are merged.
    Raises `ToolSessionFailed` for another layout, and for conflicting values of an argument.
    """
    given = fields.get(FIELD) or {}
    if not isinstance(given, Mapping):
        raise ToolSessionFailed(f"the task's {FIELD} is no object")
    owners = {name: offer.server for name, offer in catalogue.tools.items()}
    owners |= {offer.tool: offer.server for offer in catalogue.tools.values()}
    owners |= {offer.server: offer.server for offer in catalogue.tools.values()}
    by_server: dict[str, dict[str, Any]] = {}
    unknown = []
    for name, settings in given.items():
        wanted = settings.get("create_kwargs") or {} if isinstance(settings, Mapping) else None
        if not isinstance(wanted, Mapping):
            raise ToolSessionFailed(f"the task's {FIELD}.{name} holds no object `create_kwargs`")
        if name not in owners:
            unknown.append(name)
            continue
        arguments = by_server.setdefault(owners[name], {})
        for key, value in wanted.items():
            if arguments.setdefault(key, value) != value:
                raise ToolSessionFailed(
                    f"the task's {FIELD} gives {key} twice and differently to the tools of "
                    f"{owners[name]}"
                )
    return by_server, tuple(unknown)
