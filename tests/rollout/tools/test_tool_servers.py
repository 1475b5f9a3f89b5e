"""Which servers `--mcp_manager_url` and its file name."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tool_session import config_file

from agentrl.configs import AgentConfig, ConfigError
from agentrl.rollout.tools.server_list import ServerSpec, ToolTransport, read_servers


def specs(url: str | Path | None, **flags: Any) -> tuple[ServerSpec, ...]:
    return read_servers(AgentConfig(mcp_manager_url=url and str(url), **flags))


def test_without_the_flag_there_are_no_servers() -> None:
    assert specs(None) == specs("") == ()


@pytest.mark.parametrize(
    ("url", "name", "transport"),
    [
        ("http://host:9000/mcp", "host_9000", ToolTransport.HTTP),
        ("https://me:secret@host/x/sse", "host", ToolTransport.SSE),
        ("http://host/mcpapi/", "host", ToolTransport.AGGREGATOR),
        ("web=http://host/mcp?key=a,b", "web", ToolTransport.HTTP),
    ],
)
def test_a_url_says_what_it_is_and_its_label_keeps_secrets(
    url: str, name: str, transport: ToolTransport
) -> None:
    [spec] = specs(url, mcp_auth_token="token")
    assert (spec.name, spec.transport) == (name, transport)
    assert spec.headers == {"Authorization": "Bearer token"}
    assert "secret" not in spec.label and "key" not in spec.label


def test_a_list_of_urls_is_several_servers() -> None:
    found = specs(
        "web=http://a/mcp, http://b:1/sse,code=https://c/mcp?x=1,2", mcp_sessions=3, tool_timeout=5
    )
    assert [(s.name, s.url, s.sessions, s.timeout_s) for s in found] == [
        ("web", "http://a/mcp", 3, 5),
        ("b_1", "http://b:1/sse", 3, 5),
        ("code", "https://c/mcp?x=1,2", 3, 5),
    ]
    picked = specs("web=http://a/mcp,code=http://b/mcp", mcp_server_name="code")
    assert [s.name for s in picked] == ["code"]
    [alone] = specs("http://a/mcp", mcp_server_name="warehouse")
    assert alone.name == "warehouse"


def test_an_object_of_a_file_or_a_module_is_a_server() -> None:
    for given, name in (("a/b.py:server", "b"), ("pkg.tools:server", "tools")):
        [spec] = specs(given, mcp_sessions=2)
        assert (spec.name, spec.transport, spec.python, spec.sessions) == (
            name, ToolTransport.PYTHON, given, 2,
        )  # fmt: skip
        assert spec.label == f"{name} (`{given}`)"
    assert specs("a/b.py:server", mcp_server_name="warehouse")[0].name == "warehouse"
    # A token in the environment may be there for other runs.
    assert specs("a/b.py:server", mcp_auth_token="t")[0].headers == {}


def test_a_file_is_read_as_other_clients_write_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY", "k")
    path = config_file(
        tmp_path,
        {
            "files": {"command": "npx", "args": ["-y", "server", "${HOME_DIR:-/data}"],
                      "env": {"KEY": "${env:KEY}"}, "alwaysAllow": ["read"]},
            "web": {"type": "streamable-http", "url": "http://a/x",
                    "headers": {"Authorization": "Bearer ${KEY}"}, "timeout": 7, "sessions": 4},
            "old": {"url": "http://b/sse", "session": "record"},
            "editor": {"serverUrl": "http://c/mcp"},
            "off": {"command": "rm", "disabled": True},
        },
    )  # fmt: skip
    files, web, old, editor = specs(path)
    assert (files.transport, files.command) == (ToolTransport.STDIO, "npx")
    assert files.args == ("-y", "server", "/data")
    assert files.env == {"KEY": "k"}
    assert (web.transport, web.headers) == (ToolTransport.HTTP, {"Authorization": "Bearer k"})
    assert (web.timeout_s, web.sessions, web.per_record) == (7, 4, False)
    assert (old.transport, old.per_record) == (ToolTransport.SSE, True)
    assert editor.url == "http://c/mcp"
    assert [spec.name for spec in specs(path, mcp_server_name="old, web")] == ["web", "old"]


def test_the_form_of_an_editor_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "mcp.json"
    path.write_text(json.dumps({"servers": {"a": {"type": "stdio", "command": "serve"}}}))
    assert [spec.command for spec in specs(path)] == ["serve"]


@pytest.mark.parametrize(
    ("servers", "flags", "message"),
    [
        ({"a": {"args": ["x"]}}, {}, "server a: must have one of `command`, `url` and"),
        ({"a": {"command": "x", "url": "http://a"}}, {}, "one of `command`, `url` and `python`"),
        ({"a": {"python": "tools.py"}}, {}, "python tools.py: write FILE.py:NAME or MODULE:NAME"),
        ({"a": {"command": "x", "type": "http"}}, {}, "type http does not go with"),
        ({"a": {"url": "http://a", "type": "pigeon"}}, {}, "type pigeon: not known; known: http"),
        ({"a": {"command": "x", "args": "-y"}}, {}, "server a: args: Input should be a valid list"),
        (
            {"a": {"url": "http://a", "timeout": 0}},
            {},
            "server a: timeout: Input should be",
        ),
        ({"a": {"url": "http://${NO_SUCH}"}}, {}, "the environment variable NO_SUCH is not set"),
        ({"a": {"url": "http://${input:host}"}}, {}, "nobody can be asked for ..input:host."),
        ({"a": {"url": "http://a/mcpapi", "session": "record"}}, {}, "has no sessions"),
        ({"a": "http://a"}, {}, "server a: the entry: Input should be"),
        (
            {"a": {"command": "x"}},
            {"mcp_server_name": "b"},
            "--mcp_server_name b: there is no",
        ),
        (
            {"a": {"command": "x"}},
            {"mcp_auth_token": "t"},
            "--mcp_auth_token goes to servers",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_one_sentence_with_file_and_server(
    tmp_path: Path, servers: dict[str, Any], flags: dict[str, Any], message: str
) -> None:
    path = config_file(tmp_path, servers)
    with pytest.raises(ConfigError, match=message) as caught:
        specs(path, **flags)
    if "mcp_server_name" not in flags:
        assert str(path) in str(caught.value)


def test_what_is_neither_url_nor_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a http:// URL nor a file that can be read"):
        specs("host:9000/mcp")
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(ConfigError, match=r"broken.json: not JSON: .*line 1"):
        specs(broken)
    broken.write_text("[]")
    with pytest.raises(ConfigError, match="has no object `mcpServers`"):
        specs(broken)
    with pytest.raises(ConfigError, match="two servers are named host; write NAME=URL"):
        specs("http://host/a,http://host/b")


def test_the_config_file_of_the_documentation_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEB_TOKEN", "t")
    page = (Path(__file__).parents[3] / "docs" / "reference" / "tools.md").read_text(
        encoding="utf-8"
    )
    [example] = [block for block in re.findall(r"```json\n(.*?)```", page, re.DOTALL)
                 if "mcpServers" in block]  # fmt: skip
    path = tmp_path / "tools.json"
    path.write_text(example)
    files, web, bank = specs(path)
    assert (files.command, web.timeout_s, bank.per_record) == ("npx", 120, True)
    assert web.headers == {"Authorization": "Bearer t"}
