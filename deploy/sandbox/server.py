"""A sandbox as an MCP server over streamable HTTP: tools `python` and `shell`.

    python deploy/sandbox/server.py --port 9000        # then http://127.0.0.1:9000/mcp

Every MCP session has a sandbox of its own: a folder whose files stay between calls, made with the
first call and gone with the session. `create_session` makes it before that, with files in it and
limits below the server's. What holds programs in, and what is not promised: docs/guides/sandbox.md.
"""

import argparse
import asyncio
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Annotated, Any

import syscall_filter
import uvicorn
from gate import Gate, is_loopback
from limits import Limits
from mcp import MCPError
from mcp.server.context import CallNext, HandlerResult, ServerRequestContext
from mcp.server.mcpserver import Context, MCPServer
from mcp_types import METHOD_NOT_FOUND, CallToolResult, TextContent
from pydantic import Field
from room import OWN_FOLDERS
from sandboxes import Sandboxes
from session import Session, SessionGone, SessionRefused

TOKEN_VARIABLE = "SANDBOX_TOKEN"
_KERNEL = (5, 14)  # since then a user namespace counts its processes by itself

_Files = Annotated[dict[str, str], Field(description="texts by their paths below the folder")]
_AskedLimits = Annotated[dict[str, float], Field(description="limits below the server's")]


async def _sessions_only(ctx: ServerRequestContext[Any, Any], call_next: CallNext) -> HandlerResult:
    """Refuse protocol versions without sessions, whose clients would share one sandbox."""
    if ctx.method == "server/discover":
        raise MCPError(METHOD_NOT_FOUND, "this server needs a session: send initialize")
    return await call_next(ctx)


def build_server(sandboxes: Sandboxes) -> MCPServer:
    """The tools, each at work in the sandbox of the session that calls it."""
    server = MCPServer("sandbox", log_level="WARNING", middleware=[_sessions_only])

    async def run(context: Context, interpreter: str, program: str) -> CallToolResult:
        try:
            sandbox = await sandboxes.of(_session_id(context))
            result = await sandbox.run(interpreter, program)
        except (SessionGone, SessionRefused) as error:
            return _answer(str(error), is_error=True)
        return _answer(result.text, is_error=result.stopped)

    @server.tool(structured_output=False)
    async def python(code: str, ctx: Context) -> CallToolResult:
        """Run a Python program and return what it prints. Files in the working folder are kept."""
        return await run(ctx, "python3", code)

    @server.tool(structured_output=False)
    async def shell(command: str, ctx: Context) -> CallToolResult:
        """Run a bash script and return what it prints. Files in the working folder are kept."""
        return await run(ctx, "bash", command)

    @server.tool(structured_output=False)
    async def create_session(
        ctx: Context, files: _Files | None = None, limits: _AskedLimits | None = None
    ) -> CallToolResult:
        """Prepare this session's sandbox, before its first call."""
        try:
            await sandboxes.create(_session_id(ctx), files or {}, limits or {})
        except (SessionGone, SessionRefused, ValueError) as error:
            return _answer(str(error), is_error=True)
        return _answer("ready", is_error=False)

    return server


def _answer(text: str, is_error: bool) -> CallToolResult:
    return CallToolResult(content=[TextContent(type="text", text=text)], is_error=is_error)


def _session_id(context: Context) -> str:
    session = (context.headers or {}).get("mcp-session-id")
    if session is None:
        raise SessionRefused("the call belongs to no session: connect over streamable HTTP")
    return session


async def why_unable(limits: Limits, read_only: Sequence[str]) -> str | None:
    """Why this machine cannot run a sandbox, as one sentence; None if it can."""
    release = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])
    if sys.platform != "linux" or release < _KERNEL or not syscall_filter.supported():
        return (
            f"the sandbox needs Linux {'.'.join(map(str, _KERNEL))} or newer on x86_64 or aarch64; "
            f"this is {platform.system()} {platform.release()} on {platform.machine()}"
        )
    try:
        session = await Session.open(limits, read_only)
        try:
            tried = await session.run("bash", "python3 -c 'print(6 * 7)'")
        finally:
            await session.close()
    except (SessionRefused, SessionGone) as error:
        return (
            f"no sandbox can be made here: {error}. It needs user namespaces and a /proc of its "
            "own: allow them (sysctl kernel.unprivileged_userns_clone=1; on Ubuntu 24.04 "
            "kernel.apparmor_restrict_unprivileged_userns=0; in a container the security options "
            "of deploy/sandbox/compose.yml)"
        )
    if tried.text.strip() != "42":
        return f"bash and python3 do not run in the sandbox, they say: {tried.text.strip()}"
    return None


async def serve(
    host: str, port: int, limits: Limits, read_only: Sequence[str], max_sessions: int, idle_s: float
) -> None:
    """Serve until a signal ends it; all sandboxes end with it."""
    token = os.environ.get(TOKEN_VARIABLE)
    if not token and not is_loopback(host):
        sys.exit(
            f"deploy/sandbox/server.py: --host {host}: other machines reach the server there and "
            f"may run programs, so it needs a key: set {TOKEN_VARIABLE} to one (python -c 'import "
            "secrets; print(secrets.token_hex(32))' makes one), and MCP_AUTH_TOKEN in the runs"
        )
    problem = await why_unable(limits, read_only)
    if problem is not None:
        sys.exit(f"deploy/sandbox/server.py: {problem}")
    async with Sandboxes(limits, read_only, max_sessions, idle_s) as sandboxes:
        app = build_server(sandboxes).streamable_http_app(
            host=host, json_response=True, session_idle_timeout=idle_s
        )
        gate = Gate(app, sandboxes, token)
        config = uvicorn.Config(gate, host=host, port=port, log_level="warning")
        await uvicorn.Server(config).serve()


def _folder(path: str) -> str:
    if not os.path.isabs(path) or not os.path.isdir(path):
        raise argparse.ArgumentTypeError(f"{path} is no absolute path of a folder")
    top = path.split("/")[1]
    if top in OWN_FOLDERS:
        raise argparse.ArgumentTypeError(f"{path}: a sandbox has a /{top} of its own")
    return path


def main() -> None:
    """Read the flags and serve."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog=f"A bearer token that clients must show is taken from ${TOKEN_VARIABLE}; it must be "
        "set where other machines reach --host.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=9000)
    parser.add_argument("--max_sessions", type=int, default=256, help="open at once")
    parser.add_argument(
        "--idle_seconds",
        type=float,
        default=1800.0,
        help="without a call, after which one is closed",
    )
    parser.add_argument(
        "--read_only", nargs="*", default=[], metavar="FOLDER", type=_folder,
        help="folders of this machine to show beside its system folders",
    )  # fmt: skip
    for field in fields(Limits):
        parser.add_argument(
            f"--{field.name}", type=type(field.default), default=field.default, help="of a session"
        )
    arguments = parser.parse_args()
    try:
        limits = Limits(**{field.name: getattr(arguments, field.name) for field in fields(Limits)})
    except ValueError as error:
        parser.error(str(error))
    asyncio.run(
        serve(
            arguments.host, arguments.port, limits, arguments.read_only, arguments.max_sessions,
            arguments.idle_seconds,
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
