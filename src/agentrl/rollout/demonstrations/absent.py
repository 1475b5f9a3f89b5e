"""Objects of a table: they have all fields of their column, with null for those that they lack.

    {"arguments": {"bin": "R5", "x": null}}    a call, in a table of which another row has x

A null among arguments of calls and in schemas of tools is taken for that: a table cannot tell it
from one that was meant. Other objects of a row have their nulls ignored anyway.

A table may have been written as text since (`datasets.Dataset.to_json`). Its schemas of tools tell:
there a property may be null, which no schema has.
"""

from collections.abc import Mapping
from typing import Any

_ABSENT = "null in arguments of calls and in tools is taken for a field that the table's row lacks"
_GIVEN = (
    "null in arguments of calls is trained as it is given: only in tables it is a field left out"
)
_ARGUMENTS = ("arguments", "parameters")
_TOOLS = ("tools", "functions")


def without_absent(fields: dict[str, Any], in_table: bool) -> tuple[dict[str, Any], str | None]:
    """A row without what its arguments and schemas lack, and a sentence on its nulls, if any.

    `in_table`: whether it is known to stand in one.
    """
    present = _present_fields(fields)
    if present == fields:
        return fields, None
    if in_table or any(_lacks_property(fields.get(name)) for name in _TOOLS):
        return present, _ABSENT
    tools = {name: fields[name] for name in _TOOLS if name in fields}
    return fields, _GIVEN if {**present, **tools} != fields else None


def _present_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _present(value) if name in (*_ARGUMENTS, *_TOOLS) else _within(value)
        for name, value in fields.items()
    }


def _within(value: Any) -> Any:
    if isinstance(value, dict):
        return _present_fields(value)
    return [_within(item) for item in value] if isinstance(value, list) else value


def _present(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _present(item) for key, item in value.items() if item is not None}
    return [_present(item) for item in value] if isinstance(value, list) else value


def _lacks_property(schema: Any) -> bool:
    """Whether a property in schemas is null."""
    if isinstance(schema, list):
        return any(map(_lacks_property, schema))
    if not isinstance(schema, dict):
        return False
    properties = schema.get("properties")
    others = [value for name, value in schema.items() if name != "properties"]
    if not isinstance(properties, dict):
        return any(map(_lacks_property, others))
    # Its names are the tool's own: one of them may be `properties` too.
    within = properties.values()
    return None in within or any(map(_lacks_property, [*within, *others]))
