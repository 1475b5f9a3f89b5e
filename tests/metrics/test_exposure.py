"""Where a process's figures are read, and the file that says so."""

import ast
import asyncio
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from exposed_samples import Samples
from ports import free_port
from prometheus_client import Metric
from prometheus_client.registry import Collector

import agentrl
from agentrl.configs import Config, ConfigError, parse_config
from agentrl.metrics.exposure import exposed
from agentrl.metrics.figure import Counter, Gauge, Histogram
from agentrl.metrics.targets import announced, targets_file

DEGREES = Gauge("test_degrees", "How warm it is.", ("room",))
STEPS = Counter("test_steps_total", "How often.", ("room", "foot"))
SIZES = Histogram("test_sizes", "How large.", (0.0, 1.5))


class Rooms(Collector):
    def collect(self) -> Iterator[Metric]:
        yield DEGREES.by({"hall": 20.5, 'the "old" one\n': -1})
        yield STEPS.by({("hall", "left"): 3})
        yield SIZES.of([1, 2, 4], 9.5)


def config(folder: Path, port: int = 0, *flags: str) -> Config:
    return parse_config(
        ["--run_name", "r", "--output_dir", str(folder / "r"), "--metrics_port", str(port), *flags]
    )


def entries(config: Config) -> list[tuple[str, str, str]]:
    """Run, process and address of each target."""
    found: list[dict[str, Any]] = json.loads(targets_file(config).read_text())
    return [(each["labels"]["run"], each["labels"]["process"], *each["targets"]) for each in found]


async def read(url: str) -> Samples:
    async with aiohttp.ClientSession() as http, http.get(url) as response:
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/plain; version=")
        return Samples(await response.text())


async def test_figures_are_served_as_prometheus_reads_them(tmp_path: Path) -> None:
    async with exposed(config(tmp_path), "sampler-0", [Rooms()]) as url:
        samples = await read(url)
    assert samples("test_degrees", room="hall") == 20.5
    assert samples("test_degrees", room='the "old" one\n') == -1
    assert samples("test_steps_total", room="hall", foot="left") == 3
    assert [samples("test_sizes_bucket", le=end) for end in ("0.0", "1.5", "+Inf")] == [1, 3, 7]
    assert (samples("test_sizes_count"), samples("test_sizes_sum")) == (7, 9.5)
    assert samples("process_cpu_seconds_total") > 0


async def test_each_process_takes_the_next_free_port_and_stands_in_the_file_while_it_serves(
    tmp_path: Path,
) -> None:
    of_run = config(tmp_path, free_port())
    first = of_run.run.metrics_port
    assert first is not None
    async with AsyncExitStack() as stack:
        with socket.create_server(("127.0.0.1", first)):
            one = await stack.enter_async_context(exposed(of_run, "sampler-0", []))
        async with exposed(of_run, "trainer", [], beside={"service-0": "there:30000"}) as other:
            assert len({one, other}) == 2
            ports = {int(url.split(":")[2].split("/")[0]) for url in (one, other)}
            assert min(ports) >= first and max(ports) < first + 100
            addresses = {url.split("/")[2] for url in (one, other)}
            assert {address for *_, address in entries(of_run)} == {*addresses, "there:30000"}
            assert [process for _, process, _ in entries(of_run)] == [
                "sampler-0", "trainer", "service-0",
            ]  # fmt: skip
        assert entries(of_run) == [("r", "sampler-0", one.split("/")[2])]
    assert list(tmp_path.iterdir()) == []  # the file goes with its last entry


async def test_what_refreshes_figures_is_awaited_before_they_are_read(tmp_path: Path) -> None:
    degrees: list[float] = []

    class Warm(Collector):
        def collect(self) -> Iterator[Metric]:
            yield DEGREES.by({"hall": sum(degrees)})

    async def warm() -> None:
        degrees.append(2.0)

    async with exposed(config(tmp_path), "ledger", [Warm()], refresh=warm) as url:
        assert [(await read(url))("test_degrees", room="hall") for _ in range(2)] == [2, 4]


async def test_entries_of_processes_that_were_killed_go_with_the_next_change(
    tmp_path: Path,
) -> None:
    of_run = config(tmp_path)
    dying = f"""
import asyncio
import os
from agentrl.configs import parse_config
from agentrl.metrics.targets import announced
config = parse_config(["--run_name", "r", "--output_dir", {str(tmp_path / "r")!r},
    "--metrics_port", "0"])
async def main():
    async with announced(config, {{"sampler-0": "127.0.0.1:1"}}):
        os._exit(1)
asyncio.run(main())
"""
    assert subprocess.run([sys.executable, "-c", dying], env=dict(os.environ)).returncode == 1
    assert [process for _, process, _ in entries(of_run)] == ["sampler-0"]
    async with announced(of_run, {"sampler-0": "127.0.0.1:2"}):
        assert entries(of_run) == [("r", "sampler-0", "127.0.0.1:2")]
        # One of another machine may live: nobody here can tell.
        file = targets_file(of_run)
        found = json.loads(file.read_text())
        found[0]["labels"] |= {"__meta_agentrl_host": "elsewhere", "__meta_agentrl_pid": "1"}
        file.write_text(json.dumps(found))
        async with announced(of_run, {"trainer": "127.0.0.1:3"}):
            assert [process for _, process, _ in entries(of_run)] == ["sampler-0", "trainer"]


@pytest.mark.parametrize(
    "text",
    ["", "garbage{", "{}", "3", "null", '["a"]', '[{"targets": ["a:1"], "labels": {}}]', "\udc80"],
)
async def test_a_list_that_somebody_broke_is_written_anew(tmp_path: Path, text: str) -> None:
    of_run = config(tmp_path)
    file = targets_file(of_run)

    def spoil() -> None:
        file.write_text(text, "utf-8", "surrogateescape")

    spoil()
    async with announced(of_run, {"sampler-0": "127.0.0.1:2"}):
        assert entries(of_run) == [("r", "sampler-0", "127.0.0.1:2")]
        spoil()
        async with announced(of_run, {"trainer": "127.0.0.1:3"}):
            assert entries(of_run) == [("r", "trainer", "127.0.0.1:3")]
            spoil()
    assert not file.exists()


@pytest.mark.parametrize("what", ["the file", "an entry", "the folder"])
async def test_an_entry_that_somebody_removed_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr("agentrl.metrics.targets._LOOK_S", 0.05)
    of_run = config(tmp_path / "output")
    file = targets_file(of_run)

    def all_there() -> bool:
        return file.exists() and {process for _, process, _ in entries(of_run)} == {
            "trainer", "sampler-0",
        }  # fmt: skip

    async with (
        announced(of_run, {"trainer": "127.0.0.1:3"}),
        announced(of_run, {"sampler-0": "127.0.0.1:2"}),
    ):
        assert all_there()
        if what == "the file":
            file.unlink()
        elif what == "an entry":
            file.write_text(json.dumps(json.loads(file.read_text())[1:]))
        else:
            shutil.rmtree(file.parent)
        assert not all_there()
        async with asyncio.timeout(20):
            while not all_there():
                await asyncio.sleep(0.02)
        assert len(entries(of_run)) == 2
    assert list(file.parent.iterdir()) == []


async def test_a_wildcard_address_is_announced_by_the_name_of_the_machine(tmp_path: Path) -> None:
    of_run = config(tmp_path, 0, "--metrics_host", "0.0.0.0")
    async with exposed(of_run, "trainer", []):
        [(_, _, address)] = entries(of_run)
    assert address.startswith(f"{socket.gethostname()}:")


async def test_what_cannot_be_served_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--metrics_host 203\.0\.113\.1 --metrics_port 0: "):
        async with exposed(config(tmp_path, 0, "--metrics_host", "203.0.113.1"), "trainer", []):
            pass
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--metrics_port 0: the list of targets cannot be wr"):
        async with exposed(config(tmp_path / "file"), "trainer", []):
            pass
    with pytest.raises(ConfigError, match="--metrics_host ::1: has no effect without --metrics_p"):
        parse_config(["--metrics_host", "::1"])


def test_without_the_flag_nothing_of_it_is_loaded() -> None:
    """What imports it when it is imported itself is loaded only where the flag is given."""
    of_metrics = re.compile(
        r"agentrl\.metrics\b|prometheus_client\b"
        r"|agentrl\..+\.(sampler|gateway|trainer|engine|ledger)_figures$"
    )
    source = Path(agentrl.__file__).parent
    importing = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in [getattr(node, "module", None) or node.names[0].name]
        if of_metrics.match(name)
    }
    assert len(importing) >= 6
    assert all(name.startswith("metrics/") or name.endswith("_figures.py") for name in importing)
