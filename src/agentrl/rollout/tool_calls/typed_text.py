"""Arguments that a family writes as bare text, given the types of the tool's JSON schema.

    <parameter=count>        {"count": {"type": "integer"}}        {"count": 7}
    7
    </parameter>

Text for a string is taken as it stands. Where nothing is known of a parameter, text that is JSON is
read as JSON, and other text is a string.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from agentrl.rollout.tool_calls.calls import Call, MalformedCall, Tools, make_call, quote

# Written by templates that print values instead of dumping them as JSON.
_PYTHON_WORDS: dict[str, bool | None] = {"True": True, "False": False, "None": None}
_NO_VALUE = object()


class _MistypedError(ValueError):
    """A text is not a value of the required type."""


def typed_call(name: str, texts: Iterable[tuple[str, str]], tools: Tools) -> Call:
    """The call of tool `name`. `texts`: pairs (parameter, text), in order."""
    schema = _parameters_schema(tools, name)
    properties = schema.get("properties")
    arguments: dict[str, Any] = {}
    for key, text in texts:
        if key in arguments:
            return MalformedCall(f"the tool call gives the parameter {quote(key)} twice")
        described = properties.get(key) if isinstance(properties, Mapping) else None
        try:
            arguments[key] = read_value(text, accepted_types(described, schema))
        except _MistypedError as error:
            return MalformedCall(f"the parameter {quote(key)} of the tool call {error}")
    return make_call(name, arguments)


def read_value(text: str, types: frozenset[str]) -> Any:
    """The value of a text. `types`: allowed types in JSON schema's names; empty: any.

    Raises `_MistypedError` for a text that fits none of them.
    """
    if types == {"string"}:
        return text
    value = _load(text.strip(), bool(types))
    if value is not _NO_VALUE:
        if isinstance(value, float) and value.is_integer() and "integer" in types:
            return int(value)
        if not types or _types_of(value) & (types - {"string"}):
            return value
    if not types or "string" in types:
        return text
    wanted = " or ".join(sorted(types))
    raise _MistypedError(f"must be {wanted} in JSON, not {quote(text)}")


def accepted_types(schema: object, root: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that a parameter's schema accepts; empty if it does not say.

    `root`: the schema that references (`#/$defs/...`) point into.
    """
    return frozenset(_collect_types(schema, root, set()))


def _collect_types(schema: object, root: Mapping[str, Any], seen: set[str]) -> set[str]:
    if not isinstance(schema, Mapping):
        return set()
    reference = schema.get("$ref")
    if isinstance(reference, str):
        if reference in seen:
            return set()
        seen.add(reference)
        return _collect_types(_resolve(reference, root), root, seen)
    stated = schema.get("type")
    if isinstance(stated, str):
        return {stated}
    if isinstance(stated, list):
        return {name for name in stated if isinstance(name, str)}
    choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(choices, list):
        return {name for value in choices for name in _types_of(value)}
    types: set[str] = set()
    for keyword in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(keyword)
        for part in parts if isinstance(parts, list) else ():
            types |= _collect_types(part, root, seen)
    return types


def _resolve(reference: str, root: Mapping[str, Any]) -> object:
    place: object = root
    for step in reference.removeprefix("#/").split("/"):
        place = place.get(step) if isinstance(place, Mapping) else None
    return place


def _parameters_schema(tools: Tools, name: str) -> Mapping[str, Any]:
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            return parameters if isinstance(parameters, Mapping) else {}
    return {}


def _load(text: str, python_words: bool) -> Any:
    if python_words and text in _PYTHON_WORDS:
        return _PYTHON_WORDS[text]
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return _NO_VALUE


def _types_of(value: object) -> set[str]:
    """The JSON schema types of a value."""
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number"}
    if isinstance(value, str):
        return {"string"}
    return {"array"} if isinstance(value, list) else {"object"}
