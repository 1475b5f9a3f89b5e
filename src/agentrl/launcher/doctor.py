"""`agentrl doctor`: checks this machine, a model, and the services that a run needs.

Each check prints one sentence; that of a failed check says what to do. Services that are not given
are not checked.
"""

import asyncio
import os
import platform
import shutil
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from rich.console import Console
from rich.markup import escape

from agentrl.configs import Config, ConfigError
from agentrl.configs.parsing import config_of
from agentrl.configs.secret_variables import flags_in_environment
from agentrl.configs.verbs import doctor_parser
from agentrl.databases.connection import DatabaseUnreachable, connect
from agentrl.databases.mongod import MongodError, find_mongod
from agentrl.inference.engines import UnknownEngine, open_engines
from agentrl.inference.protocol import InferenceError
from agentrl.launcher.console import TerminalConsole
from agentrl.launcher.preflight import check_model
from agentrl.launcher.probes import tried_tools
from agentrl.rollout.agents.limits import check_context
from agentrl.rollout.chat import ChatRenderer
from agentrl.rollout.chat.exactness import check_exactness
from agentrl.rollout.tools.calls import ToolServerUnreachable

_PATIENCE_S = 10.0


class NotInOrder(Exception):
    """A check failed. The message says what is wrong and what to do."""


@dataclass(frozen=True)
class Check:
    """A named check. `look` returns what it found, or raises `NotInOrder`."""

    name: str
    look: Callable[[], Awaitable[str]]


def main(argv: Sequence[str]) -> int:
    """Run `agentrl doctor [flags]`; returns the exit status, 1 if a check fails."""
    given = doctor_parser().parse(argv)
    # The token as a run would send it. The other variables name services, which are not checked
    # unasked.
    token = flags_in_environment(os.environ).get("mcp_auth_token")
    config = config_of({"mcp_auth_token": token, **given.values})
    return asyncio.run(examine(checks_for(given.own.model, config), TerminalConsole()))


async def examine(checks: Sequence[Check], console: Console) -> int:
    """Run the checks and print one line each; returns the exit status."""
    failed = 0
    for check in checks:
        try:
            console.print(
                f"[green]ok[/]    {check.name}: {escape(await check.look())}",
                highlight=False,
                soft_wrap=True,
            )
        except NotInOrder as problem:
            failed += 1
            said = escape(str(problem))
            console.print(f"[red]wrong[/] {check.name}: {said}", highlight=False, soft_wrap=True)
    console.print(f"{failed} of {len(checks)} checks failed" if failed else "all checks passed")
    return 1 if failed else 0


def checks_for(model: str | None, config: Config) -> list[Check]:
    """The checks of this machine, then those of the given model and services."""
    checks = [
        Check("python", _python),
        Check("packages", _packages),
        Check("torch", _torch),
        Check("disk", _disk),
    ]
    url = config.run.db_connection_string
    checks.append(Check("mongodb", partial(_mongodb, url) if url else _embedded_mongod))
    if model:
        checks.append(Check("model", partial(_model, model, config)))
        checks.append(Check("training", partial(_training, model, config)))
    if config.agent.mcp_manager_url:
        checks.append(Check("tools", partial(_tools, config)))
    for service in config.inference_urls:
        checks.append(Check("inference", partial(_service, service, config)))
    return checks


async def _python() -> str:
    return f"{platform.python_version()} on {platform.system()} {platform.machine()}"


async def _packages() -> str:
    wrong = []
    needed = [Requirement(line) for line in requires("agentrl") or []]
    needed = [package for package in needed if not package.marker or package.marker.evaluate()]
    for package in needed:
        try:
            found = version(package.name)
        except PackageNotFoundError:
            wrong.append(f"{package} is missing")
            continue
        if not package.specifier.contains(found.split("+")[0]):
            wrong.append(f"{package} is required, {found} is installed")
    if wrong:
        raise NotInOrder("; ".join(wrong) + ": run scripts/setup.sh")
    return f"{len(needed)} packages as pinned"


async def _torch() -> str:
    import torch

    if not torch.cuda.is_available():
        return f"{torch.__version__}, no GPU: training and inference run on the CPU"
    names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
    return f"{torch.__version__}, {torch.cuda.device_count()} GPU(s): {', '.join(sorted(names))}"


async def _disk() -> str:
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    if free < 2:
        raise NotInOrder(f"{free:.1f} GiB free in {Path.cwd()}: a run needs at least 2")
    return f"{free:.0f} GiB free in {Path.cwd()}"


async def _embedded_mongod() -> str:
    try:
        return f"{find_mongod()} will be started for a run"
    except MongodError as error:
        raise NotInOrder(str(error)) from None


async def _mongodb(url: str) -> str:
    try:
        database = await connect(url, "agentrl-doctor", _PATIENCE_S)
    except DatabaseUnreachable as error:
        raise NotInOrder(str(error)) from None
    hello = await database.client.admin.command("hello")
    info = await database.client.server_info()
    await database.client.drop_database(database.name)
    await database.close()
    kind = "replica set" if hello.get("setName") else "single server, no change streams"
    return f"MongoDB {info['version']}, {kind}, takes writes"


async def _model(path: str, config: Config) -> str:
    try:
        folder = check_model(path, "--model")
        renderer = ChatRenderer.load(
            folder, config.chat_template_options, config.agent.tool_call_parser
        )
    except ValueError as error:
        raise NotInOrder(str(error)) from None
    parser, exactness = renderer.parser_choice, check_exactness(renderer)
    findings = f"{parser.sentence}; {exactness.sentence()}"
    if parser.unread or exactness.faulty:
        raise NotInOrder(findings)
    return f"tokenizer and chat template found; a turn ends with {renderer.turn_end!r}; {findings}"


async def _training(path: str, config: Config) -> str:
    # Imported here: the other checks need no torch.
    from agentrl.training.run.probe_folder import free_memory, memory_to_probe, probe_folder

    try:
        folder = check_model(path, "--model")
    except ConfigError:
        return "not probed, because the model's folder is not in order"
    needed, free = memory_to_probe(folder), free_memory()
    if needed > free:
        return (
            f"not probed, because that takes {needed / 2**30:.0f} GiB of memory and "
            f"{free / 2**30:.0f} are free; a run probes the model at its start"
        )
    try:
        model = replace(config.model, model_name_or_path=str(folder))
        verdict = probe_folder(model, config.sampling.max_tokens)
    except ConfigError as error:
        raise NotInOrder(str(error)) from None
    if verdict.difference is None:
        raise NotInOrder(verdict.sentence)
    return verdict.sentence


async def _tools(config: Config) -> str:
    try:
        async with tried_tools(config, partial(print, file=sys.stderr, flush=True)) as box:
            tools, servers = box.catalogue, box.servers
    except (ToolServerUnreachable, ConfigError) as error:
        raise NotInOrder(str(error)) from None
    found = []
    for server in servers.values():
        names = [name for name, offer in tools.tools.items() if offer.server == server.name]
        kind = ", a session for each record" if server.per_record else ""
        found.append(f"{', '.join(names) or 'none'} (of {server.label}{kind})")
    renamed = "; tools of the same name have their server's in front" if tools.renamed else ""
    return f"{len(tools.tools)} tools: {'; '.join(found)}{renamed}"


async def _service(url: str, config: Config) -> str:
    try:
        async with open_engines([url], config.sampling.inference_api_key) as [engine]:
            serves = f"{url} serves {await engine.description()}"
            context = (await engine.fetch_limits()).context_length
            if context is None:
                return serves
            doubt = check_context(config.sampling, context, url)
            return f"{serves}, with a context of {context} tokens{f'; {doubt}' if doubt else ''}"
    except (ConfigError, InferenceError, UnknownEngine) as error:
        raise NotInOrder(f"{error}") from None
