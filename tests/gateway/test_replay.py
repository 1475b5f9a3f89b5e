"""`agentrl replay`: stored Records against the program of today."""

import asyncio
import inspect
import sys
from pathlib import Path

import pytest
from asking_program import TURNS
from sampler_at_work import add, at_work, records_of
from scripted_run import completed, until
from stage import DEMO_MODEL, END, Stage

from agentrl.cli import main
from agentrl.databases.connection import RunDatabase
from agentrl.databases.mongod import EmbeddedMongod
from agentrl.databases.records import RecordLedger
from agentrl.gateway.replaying import UnwrittenRecords
from agentrl.launcher.replay import side_by_side

HERE = Path(__file__).parent
PROGRAM = HERE / "asking_program.py"


async def everything(database: RunDatabase) -> list[object]:
    """All that is stored of a run."""
    kinds = (database.tasks, database.records, database.turns, database.rows, database.tool_results)
    return [document for kind in kinds async for document in kind.find().sort("_id", 1)]


class Yesterday:
    """A run whose program asked five times, and what `agentrl replay` makes of it today."""

    def __init__(
        self,
        stage: Stage,
        mongod: EmbeddedMongod,
        folder: Path,
        capture: pytest.CaptureFixture[str],
    ) -> None:
        self.stage = stage
        self._capture = capture
        self.program = folder / "program.py"
        self.program.write_text(PROGRAM.read_text())
        self._place = ("--db_connection_string", mongod.url, "--output_dir", str(folder / "run"))

    @property
    def command(self) -> str:
        return f"{sys.executable} {self.program}"

    async def sample(self, *arguments: str) -> None:
        async def answer(prompt: str) -> str:
            return f"note {len(self.stage.service.prompts)}{END}"

        self.stage.service.answer = answer
        await add(self.stage.database, 1)
        command = " ".join([self.command, *arguments])
        flags = ("--agent_name", "program", "--agent_command", command)
        async with at_work(self.stage, "program", *flags):
            await until(completed(self.stage.database, 1))

    def edit(self, old: str, new: str) -> None:
        """Change the program."""
        source = self.program.read_text()
        assert old in source
        self.program.write_text(source.replace(old, new))

    async def replay(self, *arguments: str) -> tuple[int, str]:
        """Exit status and output."""
        asked = [
            "replay", self.stage.database.name, *arguments, *self._place,
            "--model_name_or_path", str(DEMO_MODEL), "--max_tokens", "900",
            "--agent_name", "program", "--agent_command", self.command,
        ]  # fmt: skip
        self._capture.readouterr()
        status = await asyncio.to_thread(main, asked)
        return status, "".join(self._capture.readouterr())


@pytest.fixture
async def yesterday(
    stage: Stage,
    mongod: EmbeddedMongod,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Yesterday:
    monkeypatch.setenv("COLUMNS", "120")
    return Yesterday(stage, mongod, tmp_path, capsys)


async def test_an_unchanged_program_passes_without_a_service_and_nothing_is_written(
    yesterday: Yesterday,
) -> None:
    await yesterday.sample()
    before = await everything(yesterday.stage.database)
    await yesterday.stage.service.stop()
    status, said = await yesterday.replay("--check")
    assert status == 0, said
    assert said.count("5 of 5 as recorded") == 2 and "2 of 2 as recorded" in said
    [record, _] = await records_of(yesterday.stage.database)
    status, said = await yesterday.replay(record.id)
    assert status == 0 and str(record.final_answer) in said  # what it wrote
    assert await everything(yesterday.stage.database) == before
    await yesterday.stage.service.start()


async def test_a_changed_question_fails_the_check_with_both_requests_side_by_side(
    yesterday: Yesterday,
) -> None:
    await yesterday.sample()
    yesterday.edit(
        'f"And after {turn}?"', '"And at " + str(turn) + "?" if turn else "And after 0?"'
    )
    before = await everything(yesterday.stage.database)
    status, said = await yesterday.replay("--check")
    assert status == 1 and said.count("2 of 5 diverged at turn 2") == 2, said
    line = next(line for line in said.splitlines() if "And at 1?" in line)
    assert line.index("And after 1?") < line.index("And at 1?")
    assert await everything(yesterday.stage.database) == before
    assert len(yesterday.stage.service.prompts) == 2 * TURNS


async def test_whatever_else_a_program_does_otherwise_fails_the_check(
    yesterday: Yesterday,
) -> None:
    await yesterday.sample()
    answers = 'print(reply["content"])'
    for old, new, said in (
        ("TURNS = 5", "TURNS = 4", "ends without asking for turn 4"),
        ("TURNS = 5", "TURNS = 6", "asks for more turns than were recorded"),
        ('"max_tokens": 16', '"max_tokens": 17', "max_new_tokens: 17"),
        (answers, 'print("<answer>7</answer>")', "answers '7' and not None"),
        (answers, "1 / 0", "ZeroDivisionError"),
    ):
        yesterday.edit(old, new)
        status, told = await yesterday.replay("--check", "--count", "1")
        assert status == 1 and said in told, told
        yesterday.edit(new, old)


REPORTS = """
    for path, told in (
        ("reward", {"reward": 0.5, "rewards": {"steps": 2}}),
        ("reward", {"agent": "planner", "reward": 1.0}),
        ("finish", {"answer": "B7"}),
    ):
        headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
        url = f"{os.environ['AGENTRL_SESSION_URL']}/{path}"
        urllib.request.urlopen(urllib.request.Request(url, json.dumps(told).encode(), headers))
"""


async def test_a_program_that_reports_its_rewards_and_its_end_is_replayed_with_them(
    yesterday: Yesterday,
) -> None:
    yesterday.edit('    print(reply["content"])\n', REPORTS)
    await yesterday.sample()
    before = await everything(yesterday.stage.database)
    status, said = await yesterday.replay("--check")
    assert status == 0 and "2 of 2 as recorded" in said, said
    yesterday.edit('"reward": 0.5', '"reward": 0.25')
    status, said = await yesterday.replay("--check", "--count", "1")
    assert status == 1 and "reports the reward 0.25 and not 0.5" in said, said
    yesterday.edit('"reward": 0.25', '"reward": 0.5')
    yesterday.edit('"planner", "reward": 1.0', '"planner", "reward": -5.0')
    status, said = await yesterday.replay("--check", "--count", "1")
    assert status == 1 and "reports the reward -5.0 of planner and not 1.0" in said, said
    assert await everything(yesterday.stage.database) == before


def test_whatever_an_attempt_writes_is_not_written_in_a_replay() -> None:
    """A write that is added to the ledger must be one of those that a replay leaves out."""
    reads = {"resume", "taken_over", "tool_list", "scored", "turns", "earlier_turns"}
    of_groups = {"disown", "add_rows", "add_scores", "settle"}  # a replay has none
    methods = {
        name: method
        for name, method in vars(RecordLedger).items()
        if inspect.iscoroutinefunction(method) and not name.startswith("_")
    }
    under_lease = {
        name
        for name, method in methods.items()
        if {"_write_held", "_end"} & set(method.__code__.co_names)
    }
    left_out = under_lease | set(vars(UnwrittenRecords))
    assert set(methods) - reads - of_groups <= left_out and "note" in under_lease


async def test_an_attempt_that_was_killed_is_replayed_and_goes_on_live_if_there_is_a_service(
    yesterday: Yesterday,
) -> None:
    await yesterday.sample("2")
    killed = next(r for r in await records_of(yesterday.stage.database) if r.attempt == 0)
    before = await everything(yesterday.stage.database)
    n_asked = len(yesterday.stage.service.prompts)
    status, said = await yesterday.replay(killed.id, "--check")
    assert status == 0 and "3 of 3 as recorded" in said, said
    assert len(yesterday.stage.service.prompts) == n_asked
    status, said = await yesterday.replay(
        killed.id, "--inference_urls", yesterday.stage.service.url
    )
    assert status == 0 and "3 of 3 as recorded, then 2 turns by a service" in said, said
    assert len(yesterday.stage.service.prompts) == n_asked + 2
    assert await everything(yesterday.stage.database) == before


async def test_a_record_that_no_program_made_is_refused(yesterday: Yesterday) -> None:
    await yesterday.sample()
    [record, _] = await records_of(yesterday.stage.database)
    status, said = await yesterday.replay("no-such-record")
    assert status == 2 and "has no record 'no-such-record'" in said
    await yesterday.stage.database.records.update_one(
        {"_id": record.id}, {"$set": {"agent_name": "mcp"}}
    )
    status, said = await yesterday.replay(record.id)
    assert status == 2 and "only those of programs can be replayed" in said
    status, said = await yesterday.replay(record.id, "--where", "score>0")
    assert status == 2 and "leave out the ids" in said


def test_prompts_beside_each_other_show_what_differs_and_little_else() -> None:
    many = [f"line {number}" for number in range(50)]
    one, other = [*many, "a", *many], [*many, "b", "c", *many]
    rows = side_by_side("\n".join(one), "\n".join(other))
    assert rows == [
        ("line 47", "line 47"), ("line 48", "line 48"), ("line 49", "line 49"),
        ("a", "b"), ("", "c"),
        ("line 0", "line 0"), ("line 1", "line 1"), ("line 2", "line 2"),
    ]  # fmt: skip
