"""The pages of `agentrl view`: what they say of a run's database, and who may read them."""

import html
import json
import math
import os
import re
import shlex
import socket
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx2
import pytest
from two_segments import OF_RECORD
from viewed import SECRET, figures_in, rows_in, seen_in, shown

from agentrl.configs import ConfigError
from agentrl.databases import services
from agentrl.databases.arrays import pack_floats, pack_halves
from agentrl.databases.connection import RunDatabase
from agentrl.databases.documents import DeviceUse, TrainerStart
from agentrl.databases.loads import OwnLoad, store_loads
from agentrl.databases.mongod import EmbeddedMongod
from agentrl.databases.step_metrics import keep_metrics, stored_metrics
from agentrl.launcher.run_folder import LaunchRecord, write_launch
from agentrl.training.run.rollout_table import look_at
from agentrl.viewer.command import main as view
from agentrl.viewer.places import Places
from agentrl.viewer.samplers import SamplerLine, busiest
from agentrl.viewer.server import Viewer


async def test_without_the_secret_nothing_is_shown_and_nothing_is_written(
    page: httpx2.AsyncClient, run: str, database: RunDatabase
) -> None:
    record = f"/run/{run}/records/{OF_RECORD['record']}"
    async with httpx2.AsyncClient(base_url=page.base_url) as stranger:
        for path in ("/", f"/run/{run}", record, f"{record}/tokens", f"{record}/json"):
            for asked in ({}, {"token": "guessed"}):
                answer = await stranger.get(path, params=asked)
                assert answer.status_code == 401 and "forty-six" not in answer.text
                assert run not in re.sub('name="there" value="[^"]*"', "", answer.text)
        answer = await stranger.post(f"{record}/note", data={"text": "mine"})
        assert answer.status_code == 401
        assert (await stranger.post("/login", data={"secret": "guessed"})).status_code == 401
        assert (await stranger.post("/login", data={"secret": SECRET})).status_code == 303
        assert (await stranger.get("/")).status_code == 200
    assert await database.notes.count_documents({}) == 0


async def test_who_gives_the_password_at_the_second_try_sees_the_page_that_was_asked_for(
    run: str, mongod: EmbeddedMongod
) -> None:
    async with (
        Places(Path("output"), mongod.url) as places,
        Viewer(places, SECRET, "password").running("127.0.0.1", 0) as port,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client,
    ):
        asked = f"/run/{run}/records?order=worst&text=a%20b"
        form = (await client.get(asked)).text
        assert "AGENTRL_VIEW_PASSWORD" in form and "token" not in form
        for secret, status in (("guessed", 401), (SECRET, 303)):
            hidden = re.search(r'name="there" value="([^"]*)"', form)
            assert hidden is not None
            there = html.unescape(hidden[1])
            answer = await client.post("/login", data={"secret": secret, "there": there})
            assert answer.status_code == status
            form = answer.text
        assert answer.headers["Location"] == asked
        for elsewhere in ("//evil.example", "/\\evil.example", "https://evil.example", "/\t/evil"):
            data = {"secret": SECRET, "there": elsewhere}
            assert (await client.post("/login", data=data)).headers["Location"] == "/"


def test_the_printed_address_is_one_that_visitors_can_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DB_URL", raising=False)
    command = [sys.executable, "-m", "agentrl.cli", "view", "--port", "0", "--host", "0.0.0.0"]
    given = {**os.environ, "AGENTRL_VIEW_PASSWORD": SECRET}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=given) as viewer:
        try:
            assert viewer.stdout is not None
            said = viewer.stdout.readline()
        finally:
            viewer.terminate()
    assert re.fullmatch(rf"open http://{re.escape(socket.gethostname())}:\d+/\n", said), said


async def test_a_trajectory_shows_what_was_said_called_and_trained_and_runs_none_of_it(
    page: httpx2.AsyncClient, run: str
) -> None:
    text = await shown(page, f"/run/{run}/records/{OF_RECORD['record']}")
    for part in ("let me look", "forty-six", "stock", "K7", "right answer <b>46</b>"):
        assert part in text
    assert "46 &lt;i&gt;parts&lt;/i&gt;" in text and "<i>parts" not in text
    assert "Ready: it waits for a trainer." in text
    assert "it shares 3 tokens" in text and "the conversation was rewritten: agent" in text


async def test_links_of_trackers_lead_to_the_pages(page: httpx2.AsyncClient, run: str) -> None:
    pages, record = str(page.base_url).rstrip("/"), OF_RECORD["record"]
    assert run in await shown(page, look_at(run, None, pages))
    assert "forty-six" in await shown(page, look_at(run, record, pages))


async def test_each_sampled_token_has_its_own_values_also_in_branches(
    page: httpx2.AsyncClient, run: str
) -> None:
    answer = await page.get(f"/run/{run}/records/{OF_RECORD['record']}/tokens")
    turns = answer.json()
    assert [turn["output_ids"] for turn in turns] == [[10, 11], [12, 13], [14]]
    assert [turn["prompt_ids"] for turn in turns] == [[1, 2, 3], [20, 21], [30]]
    assert [turn["values"]["logprob"] for turn in turns] == [[-0.5, -0.25], [-1, -0.125], [-2]]
    assert [turn["values"]["version"] for turn in turns] == [[4, 4], [4, 5], [5]]
    assert [turn["values"]["advantage"] for turn in turns] == [[0.5, 0.5], [-0.25, -0.25], [0.5]]
    assert [turn["values"]["mask"] for turn in turns] == [[1, 1], [1, 1], [1]]
    assert [turn["shared"] for turn in turns] == [0, 0, 3]


async def test_a_trained_token_has_the_trainers_logprob_ratio_and_entropy_where_they_were_kept(
    page: httpx2.AsyncClient, run: str, database: RunDatabase
) -> None:
    record = f"/run/{run}/records/{OF_RECORD['record']}"
    before = (await page.get(f"{record}/tokens")).json()
    assert not {"trainer", "ratio", "entropy"} & before[0]["values"].keys()
    mark = {"step": 7, "trainer": "t", "fence": 1}
    kept = pack_floats([-0.5, -0.5, -1.0, -0.25, -1.0])
    entropies = pack_halves([0.5, 1.5, 0.25, 0.75, 2.5])
    trained = [{**mark, "logprobs": kept, "entropies": entropies}]
    await database.rows.update_one({"_id": OF_RECORD["record"]}, {"$set": {"trained": trained}})
    turns = (await page.get(f"{record}/tokens")).json()
    assert [turn["values"]["trainer"] for turn in turns] == [[-0.5, -0.5], [-1, -0.25], [-1]]
    assert [turn["values"]["entropy"] for turn in turns] == [[0.5, 1.5], [0.25, 0.75], [2.5]]
    ratios = [value for turn in turns for value in turn["values"]["ratio"]]
    assert ratios == pytest.approx([1, math.exp(-0.25), 1, math.exp(-0.125), math.e], abs=1e-5)


async def test_a_turn_can_be_asked_again_with_the_whole_prompt_that_it_had(
    page: httpx2.AsyncClient, run: str
) -> None:
    record = f"/run/{run}/records/{OF_RECORD['record']}"
    prompts = []
    for turn in range(3):
        words = shlex.split((await page.get(f"{record}/turns/{turn}/curl")).text)
        assert words[0] == "curl" and words[1].endswith("/generate")
        prompts.append(json.loads(words[-1])["input_ids"])
    assert prompts == [[1, 2, 3], [1, 2, 3, 10, 11, 20, 21], [1, 2, 3, 30]]
    assert (await page.get(f"{record}/turns/9/curl")).status_code == 404


async def test_a_list_goes_on_where_it_ended_and_a_search_says_how_far_it_looked(
    page: httpx2.AsyncClient, run: str, database: RunDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.viewer.records_page.SHOWN", 2)
    monkeypatch.setattr("agentrl.viewer.record_search._FIRST_OF_TEXT", 1)
    monkeypatch.setattr("agentrl.viewer.record_search._SECONDS_OF_TEXT", 0.0)
    one = await database.records.find_one({"_id": OF_RECORD["record"]})
    turn = await database.turns.find_one({"record_id": OF_RECORD["record"], "turn": 1})
    assert one is not None and turn is not None
    moments = [datetime(2026, 1, 1, 0, 0, second, tzinfo=UTC) for second in (1, 2, 2, 3)]
    await database.records.delete_many({})
    await database.records.insert_many(
        {**one, "_id": f"r{at}", "started_at": when} for at, when in enumerate(moments)
    )
    await database.turns.insert_one({**turn, "_id": "t", "record_id": "r0"})

    async def read(path: str) -> tuple[list[str], str | None]:
        text = (await page.get(path)).text
        older = re.search(r'rel="next" href="([^"]+)"', text)
        return re.findall(r">(r\d)</a>", text), older and html.unescape(older[1])

    # Two began in the same moment: they stay together.
    first, older = await read(f"/run/{run}/records")
    assert first[0] == "r3" and sorted(first) == ["r1", "r2", "r3"] and older is not None
    assert await read(f"/run/{run}/records{older}") == (["r0"], None)
    older, found = "?text=forty-six", []
    while older is not None:  # each look reads one moment, for want of time
        records, older = await read(f"/run/{run}/records{older}")
        found.append(records)
    assert found == [[], [], ["r0"], []]


async def pages(page: httpx2.AsyncClient, path: str | None) -> list[list[str]]:
    """The records of this page of a list and of all that come after it."""
    found: list[list[str]] = []
    while path is not None:
        text = (await page.get(path)).text
        found.append(re.findall(r">(r\d+)</a>", text))
        following = re.search(r'rel="next" href="([^"]+)"', text)
        path = following and path.partition("?")[0] + html.unescape(following[1])
    return found


async def test_a_text_is_searched_for_in_the_order_of_scores_and_not_among_the_newest_only(
    page: httpx2.AsyncClient, run: str, database: RunDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.viewer.records_page.SHOWN", 2)
    monkeypatch.setattr("agentrl.viewer.record_search._FIRST_OF_TEXT", 2)
    one = await database.records.find_one({"_id": OF_RECORD["record"]})
    turn = await database.turns.find_one({"record_id": OF_RECORD["record"], "turn": 1})
    assert one is not None and turn is not None
    began = datetime(2026, 1, 1, tzinfo=UTC)
    await database.records.delete_many({})
    for at, score in enumerate((0.0, 0.75, 0.5, 0.25, 1.0, 0.9)):  # the worst is the oldest
        times = {"started_at": began + timedelta(minutes=at), "finished_at": began}
        await database.records.insert_one({**one, **times, "_id": f"r{at}", "score": score})
        if at != 3:
            await database.turns.insert_one({**turn, "_id": f"t{at}", "record_id": f"r{at}"})

    async def read(order: str) -> tuple[list[str], str]:
        text = await shown(page, f"/run/{run}/records", text="forty-six", order=order)
        return re.findall(r">(r\d)</a>", text), text

    for order, found in (("worst", ["r0", "r2"]), ("best", ["r4", "r5"])):
        records, text = await read(order)
        assert records == found and "no time" not in text
    assert await pages(page, f"/run/{run}/records?text=forty-six&order=worst") == [
        ["r0", "r2"], ["r1", "r5"], ["r4"],
    ]  # fmt: skip
    monkeypatch.setattr("agentrl.viewer.record_search._SECONDS_OF_TEXT", 0.0)
    records, text = await read("worst")
    assert records == ["r0"] and "2 records were searched" in text
    assert await pages(page, f"/run/{run}/records?text=forty-six&order=worst") == [
        ["r0"], ["r2", "r1"], ["r5", "r4"], [],
    ]  # fmt: skip


@pytest.mark.parametrize("order", ["worst", "best", "longest", "shortest", "most turns"])
async def test_pages_of_an_order_have_each_record_once_also_among_equals(
    page: httpx2.AsyncClient, run: str, database: RunDatabase, monkeypatch: pytest.MonkeyPatch,
    order: str,
) -> None:  # fmt: skip
    monkeypatch.setattr("agentrl.viewer.records_page.SHOWN", 7)
    one = await database.records.find_one({"_id": OF_RECORD["record"]})
    assert one is not None
    await database.records.delete_many({})
    ended = datetime(2026, 1, 1, tzinfo=UTC)
    made = [
        {**one, "_id": f"r{at:02}", "score": [0.0, 0.5, 0.5, 1.0][at % 4], "n_turns": at % 3,
         "tokens": {**one["tokens"], "generated": at % 5}, "finished_at": ended}
        for at in range(40)
    ]  # fmt: skip
    await database.records.insert_many(made)
    await database.records.insert_one({**one, "_id": "r99", "score": None, "finished_at": None})
    keys = {
        "worst": lambda r: (r["score"], -r["tokens"]["generated"], r["_id"]),
        "longest": lambda r: (r["tokens"]["generated"], r["_id"]),
        "most turns": lambda r: (r["n_turns"], r["_id"]),
    }  # fmt: skip
    key = keys[{"best": "worst", "shortest": "longest"}.get(order, order)]
    expected = [
        each["_id"]
        for each in sorted(made, key=key, reverse=order in ("best", "longest", "most turns"))
    ]
    found = await pages(page, f"/run/{run}/records?order={order}")
    assert [len(each) for each in found] == [7, 7, 7, 7, 7, 5]
    assert [record for each in found for record in each] == expected
    wrong = await page.get(f"/run/{run}/records", params={"order": order, "after": '[1,"\\ud800"]'})
    assert wrong.status_code == 400 and "no place in the order" in wrong.text


async def test_records_are_found_by_conditions_by_text_and_by_label(
    page: httpx2.AsyncClient, run: str
) -> None:
    record, records = OF_RECORD["record"], f"/run/{run}/records"
    newest = await shown(page, records)
    assert record in newest and f'href="/run/{run}/groups/train-0-x"' in newest
    assert record in await shown(page, records, where="score>=1; turns=3")
    assert record not in await shown(page, records, where="score<1")
    assert record in await shown(page, records, text="FORTY-SIX")
    assert record in await shown(page, records, text="46 <i>parts")
    assert record not in await shown(page, records, text="forty.six")
    wrong = await page.get(records, params={"where": "scoer<1"})
    assert wrong.status_code == 400 and "do you mean score?" in wrong.text
    wrong = await page.get(records, params={"order": "odd"})
    assert wrong.status_code == 400 and "newest, worst, best" in wrong.text
    note = {"text": "lucky <script>", "labels": "odd, wrong tool,"}
    kept = await page.post(f"{records}/{record}/note", data=note)
    assert "lucky &lt;script&gt;" in kept.text and "odd, wrong tool" in kept.text
    assert record in await shown(page, records, label="wrong tool")
    assert "no such record" in await shown(page, records, label="other")
    gone = {"text": "", "labels": "", "changed_at": seen_in(kept.text)}
    await page.post(f"{records}/{record}/note", data=gone)
    assert "no such record" in await shown(page, records, label="wrong tool")
    long = await page.post(f"{records}/{record}/note", data={"text": "x" * 30_000})
    assert long.status_code == 400 and "20000 characters" in long.text


async def test_lists_begin_with_the_split_that_has_records(
    page: httpx2.AsyncClient, run: str, database: RunDatabase
) -> None:
    """As in the first evaluation of a run, whose training tasks are there but not begun."""
    task = await database.tasks.find_one({})
    assert task is not None
    waiting = {"status": "created", "group_order": task["group_order"] + 1}
    await database.tasks.insert_one({**task, **waiting, "_id": "waiting"})
    await database.tasks.update_one({"_id": task["_id"]}, {"$set": {"split": "eval"}})
    await database.records.update_many({}, {"$set": {"split": "eval"}})
    assert OF_RECORD["record"] in await shown(page, f"/run/{run}/records")
    assert task["_id"] in await shown(page, f"/run/{run}/tasks")


async def test_a_comparison_says_what_is_not_there_and_its_tasks_are_links_to_both_groups(
    page: httpx2.AsyncClient, run: str, database: RunDatabase
) -> None:
    task = await database.tasks.find_one({})
    assert task is not None and task["epoch"] == 0
    task["slots"][0]["score"] = 0.0
    order = task["group_order"] + 1_000_000_000
    await database.tasks.insert_one({**task, "_id": "later", "epoch": 1, "group_order": order})
    text = await shown(page, f"/run/{run}/compare", first="train:0", second="train:1")
    assert "1 lost" in text and text.count(f'href="/run/{run}/groups/later"') == 2
    assert f'href="/run/{run}/groups/train-0-x"' in text and 'role="alert"' not in text
    assert run not in re.findall(r'<option value="([^"]*)"></option>', text), "the run itself"
    for asked, missing in (("eval:40", "evaluation at step 40"), ("train:7", "epoch 7")):
        text = await shown(page, f"/run/{run}/compare", first="train:0", second=asked)
        assert f"{run} has no {missing}." in text
        assert "1 lost" in text, "the default is compared meanwhile"


async def test_a_run_that_cannot_be_laid_over_is_told_and_those_that_can_are_offered(
    page: httpx2.AsyncClient, run: str
) -> None:
    other = Path("output/other")
    (other / "mongo").mkdir(parents=True)
    write_launch(other, LaunchRecord("grpo", []))
    text = html.unescape(await shown(page, f"/run/{run}", **{"with": f"{run} nothing"}))
    assert "there is no run 'nothing' in its database." in text
    assert f"data-others='[\"{run}\"]'" in text and '<option value="other">' in text


async def test_tasks_groups_steps_failures_and_the_list_of_runs_are_there(
    page: httpx2.AsyncClient, run: str, database: RunDatabase
) -> None:
    assert run in await shown(page, "/")
    assert "train-0-x" in await shown(page, f"/run/{run}/tasks", text="how many")
    assert "no such task was begun" in await shown(page, f"/run/{run}/tasks", text="nothing")
    assert "how many &lt;b&gt;parts" in await shown(page, f"/run/{run}/groups/train-0-x")
    assert "No attempt failed." in await shown(page, f"/run/{run}/failures")
    await database.rows.update_one(
        {"_id": OF_RECORD["record"]},
        {"$set": {"status": "trained", "trained": [{"step": 7, "trainer": "t", "fence": 1}]}},
    )
    step = await shown(page, f"/run/{run}/steps/7")
    assert "1 rows of 1 groups" in step and OF_RECORD["record"] in step
    record = await shown(page, f"/run/{run}/records/{OF_RECORD['record']}")
    assert "Trained in step 7: 5 tokens." in record
    assert '<span class="state trained">trained</span>' in record
    for path in ("groups/none", "records/none"):
        answer = await page.get(f"/run/{run}/{path}")
        assert answer.status_code == 404 and "has no" in answer.text
    assert (await page.get("/run/nothing")).status_code == 404


async def test_a_task_with_failures_is_a_link_to_its_group(
    page: httpx2.AsyncClient, run: str, database: RunDatabase
) -> None:
    broken = {"slots.0.status": "failed", "slots.0.error": "ValueError: no"}
    await database.tasks.update_one({"_id": "train-0-x"}, {"$set": broken})
    failures = await shown(page, f"/run/{run}/failures")
    link = re.search(r'<a href="([^"]+)">x</a>', failures)
    assert link is not None and "ValueError: no" in failures
    assert "how many &lt;b&gt;parts" in await shown(page, html.unescape(link[1]))


async def test_figures_of_steps_are_drawn_without_the_runs_folder_and_of_its_lineage_only(
    page: httpx2.AsyncClient, run: str, database: RunDatabase
) -> None:
    figures = {
        "step_seconds": 1.0, "wait_seconds": 0.5, "train_seconds": 0.3, "publish_seconds": 0.1,
        "save_seconds": 0.1, "reward_mean": 0.25, "n_train_tokens": 10,
    }  # fmt: skip
    for fence, step in ((1, 1), (1, 2), (1, 3), (2, 2)):
        values = {**figures, "step": step, "loss": fence + step / 10}
        await keep_metrics(database, fence, step, values)
    later = [TrainerStart(fence=fence, step=step).model_dump() for fence, step in ((1, 0), (2, 1))]
    await database.runs.update_one({"_id": run}, {"$set": {"starts": later}}, True)
    assert [line["loss"] for line in await stored_metrics(database)] == [1.1, 2.2]
    text = await shown(page, f"/run/{run}")
    assert "phases of a step" in text and "[1.1, 2.2]" in text


async def test_a_run_page_has_the_stored_loads_of_services_and_samplers_and_says_which_are_stale(
    page: httpx2.AsyncClient, run: str, database: RunDatabase
) -> None:
    urls = ["http://one:1", "http://two:2", "http://three:3"]
    await services.register_urls(database, urls)
    loads = {
        url: {"running": 11 * n, "waiting": 7 * n, "used_tokens": 30 * n, "total_tokens": 120,
              "retractions": 0}
        for n, url in enumerate(urls[:2], 1)
    }  # fmt: skip
    await store_loads(database, "sampler-x", OwnLoad(5, 9, 0.042, 0.375), loads)
    soon = datetime.now(UTC) + timedelta(minutes=1)
    await database.runs.update_one(
        {"_id": run}, {"$set": {"status": "training", "lease_expires": soon}}, upsert=True
    )
    before = datetime.now(UTC) - timedelta(minutes=5)
    await database.services.update_one({"_id": urls[1]}, {"$set": {"load.at": before}})
    rows = rows_in(await shown(page, f"/run/{run}"))
    assert rows["http://one:1"][2:5] == ["11", "7", "25%"] and "stale" not in rows[urls[0]][5]
    assert rows["http://two:2"][2:6] == ["22", "14", "50%", "stale: 5 min ago"]
    assert rows["http://three:3"][2:6] == ["–", "–", "–", "not yet"]
    assert rows["sampler-x"][1:5] == ["0", "5 of 9", "38%", "42 ms"]


async def test_a_run_page_has_the_hours_of_devices_and_with_a_price_what_they_cost(
    run: str, mongod: EmbeddedMongod, database: RunDatabase
) -> None:
    uses = (("trainer", 4, 0, 90), ("service", 2, 0, 60), ("service", 0, 8, 15))
    until = datetime.now(UTC)
    for number, (part, gpus, cores, minutes) in enumerate(uses):
        began = until - timedelta(minutes=minutes)
        use = DeviceUse(
            _id=str(number), part=part, gpus=gpus, cores=cores, in_turns=False,
            began=began, until=until,
        )  # fmt: skip
        await database.device_use.insert_one(use.to_mongo())
    said = []
    for price in (None, 2.5):
        async with (
            Places(Path("output"), mongod.url) as places,
            Viewer(places, SECRET, gpu_hour_price=price).running("127.0.0.1", 0) as port,
            httpx2.AsyncClient(
                base_url=f"http://127.0.0.1:{port}", follow_redirects=True
            ) as client,
        ):
            await client.get("/", params={"token": SECRET})
            said.append(figures_in(await shown(client, f"/run/{run}")))
    for figures in said:
        assert figures["GPU hours 8.00"] == "6.00 trainer 2.00 services"
        assert figures["core hours 2.00"] == "0.00 trainer 2.00 services"
    assert "cost of GPU hours" not in said[0] and said[1]["cost of GPU hours"] == "20.00"


async def test_hours_of_a_part_add_up_and_a_time_that_is_not_known_is_the_dash_of_all_others(
    page: httpx2.AsyncClient, run: str, database: RunDatabase
) -> None:
    until = datetime.now(UTC)
    for part, seconds in (("trainer", 234), ("service", 198)):  # 0.065 and 0.055 hours
        use = DeviceUse(
            _id=part, part=part, gpus=0, cores=1, in_turns=False,
            began=until - timedelta(seconds=seconds), until=until,
        )  # fmt: skip
        await database.device_use.insert_one(use.to_mongo())
    soon = datetime.now(UTC) + timedelta(minutes=1)
    await database.runs.update_one(
        {"_id": run}, {"$set": {"status": "training", "lease_expires": soon}}, upsert=True
    )
    figures = figures_in(await shown(page, f"/run/{run}"))
    assert figures["time left"] == "–"
    (total,) = (name.split()[-1] for name in figures if name.startswith("core hours"))
    parts = re.findall(r"[\d.]+", figures[f"core hours {total}"])
    assert len(parts) == 2 and round(sum(map(float, parts)), 2) == float(total)


def test_of_many_samplers_the_busiest_are_shown() -> None:
    lines = [SamplerLine(f"s{at:03}", at, 0, 0.0, (), None) for at in range(300)]
    assert busiest(lines) == lines[200:]
    assert busiest(lines[:100]) == lines[:100]


def test_a_price_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTRL_GPU_HOUR_PRICE", "cheap")
    with pytest.raises(ConfigError, match="AGENTRL_GPU_HOUR_PRICE=cheap: it takes a number"):
        view([])


async def test_a_page_of_a_live_run_asks_to_be_read_again(
    page: httpx2.AsyncClient, run: str, database: RunDatabase
) -> None:
    assert "data-live" not in await shown(page, f"/run/{run}/records/{OF_RECORD['record']}")
    soon = datetime.now(UTC) + timedelta(minutes=1)
    await database.runs.update_one(
        {"_id": run}, {"$set": {"status": "training", "lease_expires": soon}}, upsert=True
    )
    assert "data-live" in await shown(page, f"/run/{run}")
