"""Which servers the tools come from: `--mcp_manager_url` and the config file it may name.

    http://host/mcp                    one MCP server
    search=http://a/mcp,http://b/sse   several, with names or without
    http://host/mcpapi                 the servers behind an aggregator
    tools.py:server                    a server that is an object in a Python file, or in a module
    tools.json                         a file in the `mcpServers` form of other MCP clients

Nothing is connected to here.
"""

import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from agentrl.configs import AgentConfig, ConfigError
from agentrl.configs.flag import is_object

log = logging.getLogger(__name__)

_FLAG = "--mcp_manager_url"
_URLS = re.compile(r"(?:[\w.-]+=)?https?://")
_NAMED = re.compile(r"(?:(?P<name>[\w.-]+)=)?(?P<url>https?://.+)")
_VARIABLE = re.compile(r"\$\{(?P<prefix>env:|input:)?(?P<name>[^}:]+)(?::-(?P<default>[^}]*))?\}")


class ToolTransport(StrEnum):
    """The protocol of a server."""

    HTTP = "http"  # MCP over streamable HTTP
    SSE = "sse"  # MCP over HTTP with server-sent events, from before 2025
    STDIO = "stdio"  # MCP over the standard input and output of a process
    PYTHON = "python"  # an object of Python's MCP SDK, in a thread of the sampler
    AGGREGATOR = "mcpapi"  # several servers behind one HTTP API


_TYPES = {
    **{transport.value: transport for transport in ToolTransport},
    "streamable-http": ToolTransport.HTTP,
    "streamable_http": ToolTransport.HTTP,
    "streamableHttp": ToolTransport.HTTP,
}


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """The settings of one server or aggregator.

    `timeout_s`: of one call. `sessions`: number of shared connections. `per_record`: each record
    has its own session instead. `resettable`: whether a new session begins as the last one began;
    None if that is not told. `url`, `headers`: for HTTP. `command`, `args`, `env`, `cwd`: for
    stdio. `python`: for an object, as `file.py:name` or `module:name`.
    """

    name: str
    transport: ToolTransport
    timeout_s: float
    sessions: int = 1
    per_record: bool = False
    resettable: bool | None = None
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    command: str = ""
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    python: str = ""

    @property
    def started_here(self) -> bool:
        """Whether this process starts the server, which may first install or load something."""
        return self.transport in (ToolTransport.STDIO, ToolTransport.PYTHON)

    @property
    def label(self) -> str:
        """The server's name and address in messages, without passwords and keys."""
        if self.started_here:
            return f"{self.name} (`{self.command or self.python}`)"
        parts = urlsplit(self.url)
        place = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        return place if self.name == _name_of(self.url) else f"{self.name} at {place}"


class _Entry(BaseModel):
    """A server in a config file. Unknown keys are allowed, because other clients define more."""

    model_config = ConfigDict(extra="allow", frozen=True)

    type: str | None = Field(None, validation_alias=AliasChoices("type", "transport"))
    command: str | None = None
    args: list[str] = []
    env: dict[str, str] = {}
    cwd: str | None = None
    python: str | None = None
    url: str | None = Field(None, validation_alias=AliasChoices("url", "serverUrl", "httpUrl"))
    headers: dict[str, str] = {}
    disabled: bool = False
    timeout: float | None = Field(None, gt=0)  # seconds
    sessions: int | None = Field(None, ge=1)
    session: Literal["shared", "record"] = "shared"
    resettable: bool | None = None


def read_servers(agent: AgentConfig) -> tuple[ServerSpec, ...]:
    """The servers that the flags name; () without `--mcp_manager_url`. Raises `ConfigError`."""
    given = (agent.mcp_manager_url or "").strip()
    if not given:
        return ()
    if _URLS.match(given):
        specs = _of_urls(given, agent)
    elif is_object(given):
        specs = [_of_object(given, agent)]
    else:
        specs = _of_file(Path(given), agent)
    names = [spec.name for spec in specs]
    refuse_twins(names)
    wanted = wanted_servers(agent)
    if wanted is None or any(spec.transport is ToolTransport.AGGREGATOR for spec in specs):
        return tuple(specs)  # an aggregator's servers are not known yet
    refuse_unknown_servers(wanted, names)
    return tuple(spec for spec in specs if spec.name in wanted)


def wanted_servers(agent: AgentConfig) -> frozenset[str] | None:
    """The servers that `--mcp_server_name` selects; None for all.

    For a single MCP server by URL, and for an object, the flag sets its name instead.
    """
    names = {name.strip() for name in (agent.mcp_server_name or "all").split(",")}
    return None if names == {"all"} else frozenset(names)


def refuse_twins(names: Sequence[str]) -> None:
    """Raise `ConfigError` if two servers have the same name."""
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{_FLAG}: two servers are named {twice[0]}; write NAME=URL")


def refuse_unknown_servers(wanted: frozenset[str], known: Sequence[str]) -> None:
    """Raise `ConfigError` if `--mcp_server_name` selects an unknown server."""
    if missing := sorted(wanted - set(known)):
        raise ConfigError(
            f"--mcp_server_name {','.join(missing)}: there is no such server; there are "
            f"{', '.join(sorted(known)) or 'none'}"
        )


def _of_urls(given: str, agent: AgentConfig) -> list[ServerSpec]:
    headers = {"Authorization": f"Bearer {agent.mcp_auth_token}"} if agent.mcp_auth_token else {}
    specs = []
    urls = re.split(rf",\s*(?={_URLS.pattern})", given)
    for url in urls:
        match = _NAMED.fullmatch(url.strip())
        assert match is not None, "split where a URL begins"
        transport = _transport_of(match["url"])
        name = match["name"] or _name_of(match["url"])
        if len(urls) == 1 and transport is not ToolTransport.AGGREGATOR:
            name = agent.mcp_server_name or name
        specs.append(
            ServerSpec(
                name,
                transport,
                url=match["url"].rstrip("/"),
                headers=headers,
                timeout_s=agent.tool_timeout,
                sessions=agent.mcp_sessions,
            )
        )
    return specs


def _of_object(given: str, agent: AgentConfig) -> ServerSpec:
    if agent.mcp_auth_token:  # as MCP_AUTH_TOKEN it may be there for other runs
        log.info("--mcp_auth_token goes to servers given by URL, and %s is none", given)
    return ServerSpec(
        agent.mcp_server_name or _name_of_object(given),
        ToolTransport.PYTHON,
        timeout_s=agent.tool_timeout,
        sessions=agent.mcp_sessions,
        python=given,
    )


def _name_of_object(python: str) -> str:
    """The last part of its module's name."""
    module = python.rpartition(":")[0]
    return Path(module).stem if module.endswith(".py") else module.rpartition(".")[2]


def _transport_of(url: str) -> ToolTransport:
    """The transport of a URL, by the last part of its path."""
    last = urlsplit(url).path.rstrip("/").rpartition("/")[2]
    return {"sse": ToolTransport.SSE, "mcpapi": ToolTransport.AGGREGATOR}.get(
        last, ToolTransport.HTTP
    )


def _name_of(url: str) -> str:
    return re.sub(r"[^\w-]+", "_", urlsplit(url).netloc.rpartition("@")[2])


def _of_file(path: Path, agent: AgentConfig) -> list[ServerSpec]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{_FLAG} {path}: neither a http:// URL nor a file that can be read ({error.strerror})"
        ) from None
    except ValueError as error:
        if path.suffix == ".py":
            raise ConfigError(
                f"{_FLAG} {path}: name the server object in it, as {path}:server"
            ) from None
        raise ConfigError(f"{_FLAG} {path}: not JSON: {error}") from None
    servers = None
    if isinstance(content, dict):
        servers = content.get("mcpServers", content.get("servers"))
    if not isinstance(servers, dict):
        raise ConfigError(f"{_FLAG} {path}: has no object `mcpServers`")
    if agent.mcp_auth_token:
        raise ConfigError(
            f"--mcp_auth_token goes to servers given by URL; for {path} write the header in the "
            'file: "headers": {"Authorization": "Bearer ${MCP_TOKEN}"}'
        )
    specs = [_of_entry(name, entry, path, agent) for name, entry in servers.items()]
    return [spec for spec in specs if spec is not None]


def _of_entry(name: str, entry: object, path: Path, agent: AgentConfig) -> ServerSpec | None:
    where = f"{_FLAG} {path}: server {name}"
    try:
        given = _Entry.model_validate(_with_variables(entry, where))
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(map(str, fault["loc"])) or "the entry"
        raise ConfigError(f"{where}: {key}: {fault['msg']}") from None
    if given.disabled:
        return None
    if [given.command, given.url, given.python].count(None) != 2:
        raise ConfigError(f"{where}: must have one of `command`, `url` and `python`")
    if given.python is not None and not is_object(given.python):
        raise ConfigError(f"{where}: python {given.python}: write FILE.py:NAME or MODULE:NAME")
    if given.model_extra:
        log.warning("%s: %s mean nothing here", where, ", ".join(sorted(given.model_extra)))
    if given.type is not None and given.type not in _TYPES:
        raise ConfigError(f"{where}: type {given.type}: not known; known: {', '.join(_TYPES)}")
    if given.type is not None:
        transport = _TYPES[given.type]
    elif given.url:
        transport = _transport_of(given.url)
    else:
        transport = ToolTransport.PYTHON if given.python else ToolTransport.STDIO
    goes_with = {ToolTransport.STDIO: given.command, ToolTransport.PYTHON: given.python}
    if goes_with.get(transport, given.url) is None:
        raise ConfigError(f"{where}: type {given.type} does not go with what else is there")
    if transport is ToolTransport.AGGREGATOR and given.resettable:
        raise ConfigError(f"{where}: an aggregator has no sessions, so none can be made again")
    if transport is ToolTransport.AGGREGATOR and given.session == "record":
        raise ConfigError(f"{where}: an aggregator has no sessions, so none for each record")
    return ServerSpec(
        name,
        transport,
        timeout_s=given.timeout or agent.tool_timeout,
        sessions=given.sessions or agent.mcp_sessions,
        per_record=given.session == "record",
        resettable=given.resettable,
        url=(given.url or "").rstrip("/"),
        headers=given.headers,
        command=given.command or "",
        args=tuple(given.args),
        env=given.env,
        cwd=given.cwd,
        python=given.python or "",
    )


def _with_variables(value: Any, where: str) -> Any:
    """`value` with `${NAME}`, `${env:NAME}` and `${NAME:-default}` replaced in all texts.

    Raises `ConfigError` for a variable that is not set.
    """
    if isinstance(value, dict):
        return {key: _with_variables(item, where) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_variables(item, where) for item in value]
    if not isinstance(value, str):
        return value

    def look_up(match: re.Match[str]) -> str:
        if match["prefix"] == "input:":
            raise ConfigError(f"{where}: nobody can be asked for {match[0]}; use ${{env:NAME}}")
        found = os.environ.get(match["name"], match["default"])
        if found is None:
            raise ConfigError(f"{where}: the environment variable {match['name']} is not set")
        return found

    return _VARIABLE.sub(look_up, value)
