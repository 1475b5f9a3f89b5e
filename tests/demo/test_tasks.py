"""The demo's committed task files and the world they come from."""

from pathlib import Path

from make_tasks import TASKS_OF_SPLIT, task_lines
from warehouse import BINS_PER_WAREHOUSE, KINDS, draw_warehouse

SEED = 0


def test_making_the_tasks_again_gives_the_committed_bytes(demo_dir: Path) -> None:
    for split in TASKS_OF_SPLIT:
        committed = (demo_dir / f"{split}.jsonl").read_bytes()
        assert task_lines(split, SEED).encode() == committed


def test_another_seed_gives_other_tasks() -> None:
    assert task_lines("heldout", SEED) != task_lines("heldout", SEED + 1)


def test_there_are_enough_tasks_of_every_kind(
    train_tasks: list[dict[str, str]], heldout_tasks: list[dict[str, str]]
) -> None:
    assert len(train_tasks) >= 240
    assert len(heldout_tasks) >= 64
    for tasks in (train_tasks, heldout_tasks):
        kinds = [task["kind"] for task in tasks]
        assert all(kinds.count(kind) >= len(tasks) / 5 for kind in KINDS)


def test_no_warehouse_serves_two_tasks(
    train_tasks: list[dict[str, str]], heldout_tasks: list[dict[str, str]]
) -> None:
    ids = [task["id"] for task in train_tasks + heldout_tasks]
    warehouses = {str(draw_warehouse(SEED, task_id)) for task_id in ids}
    assert len(set(ids)) == len(warehouses) == len(ids)


def test_a_warehouse_has_one_item_in_each_of_its_bins() -> None:
    warehouse = draw_warehouse(SEED, "any-task")
    assert len(warehouse.bin_of) == BINS_PER_WAREHOUSE
    assert sorted(warehouse.bin_of.values()) == sorted(warehouse.stock_of)


def test_every_task_names_its_scorer_and_schema(train_tasks: list[dict[str, str]]) -> None:
    for task in train_tasks:
        assert list(task) == ["id", "query", "answer", "scorer", "answer_schema", "kind"]
        assert (task["scorer"], task["answer_schema"]) == ("exact_match", "answer")
