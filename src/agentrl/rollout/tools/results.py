"""A tool's result: the text that the model reads, and the stored whole result.

Nothing is lost silently. Parts that are not text are named in the text and stored as files. A long
text is cut with a note and stored whole. Parts that exceed a MongoDB document are named in it.
"""

import base64
import binascii
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from mcp_types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
)

from agentrl.databases.documents import ResultFile, ToolResult
from agentrl.foreign_text import utf8_text

# Bytes of a stored result with its files. MongoDB's limit is 16 MB, but an embedded mongod, whose
# cache is small, refuses documents of 12.
MAX_KEPT_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """The result of a call.

    `text`: what the model reads. `whole`: the whole text if `text` is cut, else None. `kept`: `_id`
    in the collection `tool_results` of the whole text and files; None if `text` is complete.
    `lasting`: the call may have left a state that no fork of the rollout can have.
    """

    text: str
    is_error: bool
    started_at: datetime
    latency_s: float
    whole: str | None = None
    kept: str | None = None
    lasting: bool = False


@dataclass(frozen=True, slots=True)
class Reading:
    """A result as text. `files`: parts that are not text; `text` names them."""

    text: str
    is_error: bool = False
    files: tuple[ResultFile, ...] = ()


def read_result(result: CallToolResult) -> Reading:
    """Read all parts of a result, in order.

    Structured content is appended as JSON, unless the other parts repeat it, as MCP recommends.
    """
    texts: list[str] = []
    files: list[ResultFile] = []
    for part in result.content:
        if isinstance(part, TextContent):
            texts.append(part.text)
        elif isinstance(part, EmbeddedResource) and not isinstance(
            part.resource, BlobResourceContents
        ):
            texts.append(part.resource.text)
        elif isinstance(part, ResourceLink):
            texts.append(f"[link to {part.name}: {part.uri}]")
        else:
            file = _file_of(part)
            files.append(file)
            texts.append(_note_of(file))
    content = result.structured_content
    if content is not None and not _says(result.content, content):
        texts.append(json_text(content))
    text = "\n".join(texts)
    if result.is_error and not text:
        text = "The tool failed and gave no reason."
    return Reading(utf8_text(text), bool(result.is_error), tuple(files))


def json_text(value: Any) -> str:
    """A JSON value as text. Never raises; integers may be of any size."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except RecursionError:
        return "[JSON that is nested too deeply to be read]"


def shorten(text: str, limit: int) -> str:
    """The first `limit` characters of a text, with a note if it is longer."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]}\n[{len(text) - limit} characters left out]"


def kept_result(
    key: str, record_id: str, tool: str, text: str, files: Sequence[ResultFile]
) -> ToolResult:
    """The document that stores a result. `key`: its `_id`."""
    omitted = []
    encoded = text.encode("utf-8", "replace")
    if len(encoded) > MAX_KEPT_BYTES:
        text = encoded[:MAX_KEPT_BYTES].decode("utf-8", "ignore")
        omitted.append(f"the text's last {len(encoded) - MAX_KEPT_BYTES} bytes")
    room = MAX_KEPT_BYTES - min(len(encoded), MAX_KEPT_BYTES)
    kept: list[ResultFile] = []
    for file in files:
        if len(file.data) <= room:
            kept.append(file)
            room -= len(file.data)
        else:
            omitted.append(_describe(file))
    return ToolResult(
        id=key,
        record_id=record_id,
        tool=tool,
        text=utf8_text(text),
        files=kept,
        omitted=omitted,
        created_at=datetime.now(UTC),
    )


def _says(parts: Sequence[ContentBlock], content: Any) -> bool:
    """Whether the parts repeat the structured content.

    Compared are the whole content and the value of its only key, in which servers wrap a value that
    is no object.
    """
    texts = [part.text for part in parts if isinstance(part, TextContent)]
    forms: list[Any] = [texts, [_parsed(text) for text in texts]]
    forms += [form[0] for form in forms if len(form) == 1]
    forms.append([part.model_dump(mode="json", by_alias=True, exclude_none=True) for part in parts])
    inner = list(content.values()) if isinstance(content, dict) and len(content) == 1 else []
    return any(form == value for form in forms for value in [content, *inner])


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _file_of(part: object) -> ResultFile:
    """A part that is not text, as a file."""
    if isinstance(part, ImageContent | AudioContent):
        return ResultFile(kind=part.type, mime_type=part.mime_type, data=_decoded(part.data))
    assert isinstance(part, EmbeddedResource), "the protocol has no other parts"
    blob = part.resource
    assert isinstance(blob, BlobResourceContents), "texts are no files"
    return ResultFile(
        kind="resource",
        mime_type=blob.mime_type or "application/octet-stream",
        uri=blob.uri,
        data=_decoded(blob.blob),
    )


def _decoded(data: str) -> bytes:
    """Decoded base64 data; other data stays as it is."""
    try:
        return base64.b64decode(data)
    except (binascii.Error, ValueError):
        return data.encode("utf-8", "replace")


def _note_of(file: ResultFile) -> str:
    return f"[{_describe(file)} left out: only text can be read]"


def _describe(file: ResultFile) -> str:
    name = f"{file.kind} {file.uri}" if file.uri else file.kind
    return f"{name} ({file.mime_type}, {len(file.data)} bytes)"
