"""The guides in docs/ do what they say: their files are written and their commands run.

A fence ```LANGUAGE title="NAME" is a file of the guide; every ```bash fence is a command. The
commands run in order in one shell, in an empty folder.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet as parquet
import pytest
from ports import free_port

from agentrl.configs.losses import LOSSES
from agentrl.databases.documents import Record, Split
from agentrl.databases.task_file import scan_tasks
from agentrl.rollout.agents.answers import KNOWN_SCHEMAS
from agentrl.rollout.groups.advantages import find_estimator
from agentrl.rollout.scorers import known_scorers

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r'^```(\w+)(?: title="(\S+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
GUIDE_PORTS = ("8765", "8766", "8767")  # of the guides' servers; the tests take free ones
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)#:\s]*)(?:#([^)\s]+))?\)")


def run_guide(guide: Path, folder: Path) -> str:
    """Write the guide's files, run its commands; returns what they printed."""
    commands = ["set -eu", "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT"]
    text = guide.read_text(encoding="utf-8")
    for port in GUIDE_PORTS:
        text = text.replace(port, str(free_port()))
    for language, file, body in FENCE.findall(text):
        if file:
            (folder / file).write_text(body, encoding="utf-8")
        elif language == "bash":
            commands.append(body)
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "AGENTRL": str(ROOT),
        "DEMO_MODEL": str(ROOT / "assets" / "demo" / "model"),
    }
    shell = subprocess.Popen(
        ["bash", "-c", "\n".join(commands)], cwd=folder, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        printed, _ = shell.communicate(timeout=300)
    finally:
        # What the guide leaves running in the background ends with it, whatever became of it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
    assert shell.returncode == 0, printed
    return printed


@pytest.mark.slow  # a whole run
@pytest.mark.timeout(320)
def test_the_guide_to_own_tasks_leads_to_a_trained_run(tmp_path: Path) -> None:
    printed = run_guide(ROOT / "docs" / "start" / "your-own-tasks.md", tmp_path)
    assert re.search(r"1 tools: shelf \(of http://127\.0\.0\.1:\d+/mcp\)", printed)
    assert "multi-turn training is exact" in printed
    assert "library: 2 steps" in printed
    assert "Where is" in printed  # the trajectory that `agentrl show` prints


@pytest.mark.slow  # a whole run
@pytest.mark.timeout(320)
def test_the_guides_to_agents_and_scorers_lead_to_a_run_with_both(tmp_path: Path) -> None:
    printed = run_guide(ROOT / "docs" / "guides" / "write-an-agent.md", tmp_path)
    assert "letters: 1 steps" in printed
    assert re.search(r"How many [pe] are in|What is 17", printed)  # `agentrl show`
    printed = run_guide(ROOT / "docs" / "guides" / "write-a-scorer.md", tmp_path)
    assert "2 groups" in printed


@pytest.mark.slow  # three whole runs
@pytest.mark.timeout(320)
def test_the_guide_to_programs_leads_to_runs_of_a_command_a_function_and_from_outside(
    tmp_path: Path,
) -> None:
    printed = run_guide(ROOT / "docs" / "guides" / "programs.md", tmp_path)
    assert "clerk: 1 steps" in printed and "function: 1 steps" in printed
    assert "laptop: 1 steps" in printed and "the run is finished" in printed
    assert printed.count("agent program") == 2 and "agent outside" in printed  # `agentrl show`
    assert "Are you sure? Answer again." in printed


@pytest.mark.slow
@pytest.mark.timeout(320)
def test_the_guide_to_supervised_training_leads_to_a_model_folder(tmp_path: Path) -> None:
    printed = run_guide(ROOT / "docs" / "guides" / "supervised.md", tmp_path)
    assert "2 rows" in printed
    assert "finished after step 4 of 4" in printed
    assert (tmp_path / "output" / "sft" / "model" / "config.json").is_file()


@pytest.mark.slow
@pytest.mark.timeout(320)
def test_the_guide_to_evaluation_leads_from_a_model_to_a_better_one_and_files(
    tmp_path: Path,
) -> None:
    printed = run_guide(ROOT / "docs" / "guides" / "evaluation.md", tmp_path)
    assert "256 trajectories" in printed
    assert re.search(r"against demo/model on held\.jsonl: success \+0\.\d+", printed)
    assert "held.jsonl: evaluated before" in printed
    assert "the same, byte by byte" in printed


@pytest.mark.slow
@pytest.mark.timeout(320)
def test_the_guide_to_preferences_leads_to_a_model_and_through_two_rounds_of_spin(
    tmp_path: Path,
) -> None:
    printed = run_guide(ROOT / "docs" / "guides" / "preferences.md", tmp_path)
    assert "2 pairs" in printed
    for run in ("dpo", "spin-1", "spin-2"):
        assert (tmp_path / "output" / run / "model" / "config.json").is_file()
    rounds = [(tmp_path / f"pairs-{number}.jsonl").read_text() for number in (1, 2)]
    assert all(text.count("rejected") == 2 for text in rounds)


@pytest.mark.slow
@pytest.mark.timeout(320)
def test_each_part_started_by_hand_as_the_page_on_deployment_says_is_a_run(tmp_path: Path) -> None:
    printed = run_guide(ROOT / "docs" / "guides" / "deployment.md", tmp_path)
    assert "finished after step 2 of 2" in printed
    assert "How many" in printed  # `agentrl show`
    assert (tmp_path / "model" / "config.json").is_file()


@pytest.mark.slow
@pytest.mark.timeout(320)
def test_the_recipe_of_gsm8k_holds_together_without_a_gpu(tmp_path: Path) -> None:
    printed = run_guide(ROOT / "docs" / "start" / "gsm8k.md", tmp_path)
    assert "1 tools: calculate" in printed
    assert "gsm8k-path: 1 steps" in printed
    assert "Use the tool calculate" in printed  # `agentrl show`


def test_the_recipe_of_gsm8k_converts_both_forms_of_the_data_set(tmp_path: Path) -> None:
    guide = (ROOT / "docs" / "start" / "gsm8k.md").read_text(encoding="utf-8")
    for _, file, body in FENCE.findall(guide):
        if file:
            (tmp_path / file).write_text(body, encoding="utf-8")
    lines = [json.loads(line) for line in (tmp_path / "made.jsonl").read_text().splitlines()]
    parquet.write_table(pyarrow.Table.from_pylist(lines), tmp_path / "made.parquet")
    for source in ("made.jsonl", "made.parquet"):
        subprocess.run(
            [sys.executable, "convert.py", source, "tasks.jsonl"], cwd=tmp_path, check=True
        )
        tasks = scan_tasks(tmp_path / "tasks.jsonl", known_scorers(), KNOWN_SCHEMAS).tasks
        assert [task.answer for task in tasks] == ["31", "1200", "150"]
        assert {task.scorer for task in tasks} == {"math"}


@pytest.mark.slow
def test_the_guide_to_tools_leads_to_a_server_that_attempts_share(tmp_path: Path) -> None:
    printed = run_guide(ROOT / "docs" / "guides" / "write-a-tool.md", tmp_path)
    assert "2 tools: year, note" in printed
    assert "a 'one'\nb 'two'\na 'one\\nthree'" in printed
    assert re.search(r"^True .*There is no book 'Dracula'", printed, re.MULTILINE)


def test_the_guide_to_an_own_loss_and_advantage_gives_ones_that_can_be_trained(
    tmp_path: Path,
) -> None:
    guide = ROOT / "docs" / "reference" / "losses.md"
    printed = run_guide(guide, tmp_path)
    (promised,) = re.findall(r"^    (gradient by logprob: .*)$", guide.read_text(), re.MULTILINE)
    assert promised in printed
    estimate = find_estimator(f"{tmp_path}/my_advantage.py:against_the_best")
    records = [
        Record(
            _id=f"a-t{rollout}-a0", task="a", task_id="a", rollout=rollout, attempt=0,
            split=Split.TRAIN,
            epoch=0, owner="test", query="?", score=score, n_turns=2,
        )
        for rollout, score in enumerate((1.0, 0.25))
    ]  # fmt: skip
    assert estimate(records, [1.0, 0.25]) == pytest.approx([-0.02, -0.77])


def test_the_table_of_losses_is_that_of_the_code() -> None:
    text = (ROOT / "docs" / "reference" / "losses.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    table = {cells[0].strip("| `"): cells for cells in rows if len(cells) == 6}
    assert table.keys() - {"--loss_calculator", "path/to/file.py:function"} == LOSSES.keys()
    for name, defaults in LOSSES.items():
        _, _, normalisation, advantage, clip_range, _ = table[name]
        assert normalisation == defaults.normalisation
        if name not in ("PPO", "CrossEntropy"):
            assert advantage.startswith(f"`{defaults.advantage}`")
            assert ("normalized" in advantage) == defaults.normalize_advantages
        if clip_range not in ("—", "none, 4"):
            low, _, high = clip_range.partition(", ")
            assert float(low) == defaults.epsilon
            assert float(high or low) == (defaults.clip_ratio_high or defaults.epsilon)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_to_a_file_and_a_heading_in_it(page: Path) -> None:
    for target, heading in LINK.findall(prose(page)):
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not heading or heading in headings(file), f"{page.name}: {target}#{heading}"


def prose(page: Path) -> str:
    """A page without what its fences hold."""
    text = page.read_text(encoding="utf-8")
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_command_of_the_readme_exists() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for script in re.findall(r"(\w+_example\.sh)", text):
        assert os.access(ROOT / script, os.X_OK)
    shown = subprocess.run(
        [sys.executable, "-m", "agentrl.cli", "--help"], text=True, capture_output=True, check=True
    ).stdout
    for verb in set(re.findall(r"agentrl (\w+)", text)):
        assert re.search(rf"^  {verb}\b", shown, re.MULTILINE), f"there is no agentrl {verb}"


def test_every_launch_that_a_page_shows_names_its_run() -> None:
    shown = [
        (page.name, after)
        for page in PAGES
        for after in re.findall(
            r"(?:grpo|minirl)_example\.sh\"?(?:[ \\\n]+)(\S+)", page.read_text(encoding="utf-8")
        )
    ]
    assert len(shown) > 20
    nameless = [(page, after) for page, after in shown if after.startswith("-")]
    assert [each for each in nameless if not each[1].startswith("--help")] == []
