"""Writes the demo's task files: `train.jsonl` and `heldout.jsonl`.

    python assets/demo/make_tasks.py --seed 0

The same seed gives the same bytes. Ids differ between the two files, hence so do the warehouses.
"""

import argparse
import json
from pathlib import Path

from warehouse import draw_question

TASKS_OF_SPLIT = {"train": 320, "heldout": 96}


def task_lines(split: str, seed: int) -> str:
    """The JSON lines of one split, in id order, each ending in a newline."""
    lines = []
    for number in range(TASKS_OF_SPLIT[split]):
        task_id = f"{split}-{number:04d}"
        question = draw_question(seed, task_id)
        task = {
            "id": task_id,
            "query": question.text,
            "answer": str(question.answer),
            "scorer": "exact_match",
            "answer_schema": "answer",
            "kind": question.kind,
        }
        lines.append(json.dumps(task) + "\n")
    return "".join(lines)


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="the world's: as given to tool_server")
    parser.add_argument("--output_dir", type=Path, default=Path(__file__).parent)
    args = parser.parse_args()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    for split in TASKS_OF_SPLIT:
        path = args.output_dir / f"{split}.jsonl"
        path.write_text(task_lines(split, args.seed), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
