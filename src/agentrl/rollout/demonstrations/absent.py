"""Objects of a table: they have all fields of their column, with null for those that they lack.

    {"arguments": {"bin": "R5", "x": null}}    a call, in a table of which another row has x

A null among arguments of calls and in schemas of tools is taken for that: a table cannot tell it
from one that was meant. Other objects of a row have their nulls ignored anyway.
"""

from collections.abc import Mapping
from typing import Any

_HOLDERS = ("arguments", "parameters", "tools", "functions")


def without_absent(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a table's row without what its arguments and schemas lack."""
    return {
        name: _present(value) if name in _HOLDERS else _within(value)
        for name, value in fields.items()
    }


def _within(value: Any) -> Any:
    if isinstance(value, dict):
        return without_absent(value)
    return [_within(item) for item in value] if isinstance(value, list) else value


def _present(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _present(item) for key, item in value.items() if item is not None}
    return [_present(item) for item in value] if isinstance(value, list) else value
