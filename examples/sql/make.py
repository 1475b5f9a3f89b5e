"""Makes all that the example needs, in a minute:  python examples/sql/make.py

    made/NAME.sqlite, NAME-other.sqlite    the databases
    made/train.jsonl, heldout.jsonl        questions; held-out ones name what the others never do
    made/demonstrations.jsonl              conversations for the warm-up
    made/untrained/                        a model of half a million random weights

The same files each time.
"""

import argparse
import json
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

from questions import draw_question
from schemas import NAMES, SCHEMAS, Contents, Schema, draw_contents, draw_names, other, write
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from warmup import demonstrations

DEMO = Path(__file__).parents[2] / "assets" / "demo"
sys.path.append(str(DEMO))

from demo_tokenizer import END, PAD, START  # noqa: E402
from make_model import new_model  # noqa: E402

SEED, WARMUP_SEED = 0, 1
QUESTIONS_OF_SPLIT = {"train": 256, "heldout": 96}
HELD_OUT_EACH = 3  # each third name and number is in held-out questions alone
DEMONSTRATIONS = 5_000
VOCAB_SIZE = 512  # names apart
WORD_PATTERN = r"\d| ?[a-z_]+|\n| ?[^\sa-z\d]+|\s"


def make_databases(folder: Path) -> Iterator[tuple[Schema, Contents, Path]]:
    """Write the databases of each schema; their contents differ in all but the names."""
    for schema in SCHEMAS:
        rng = Random(f"{SEED}:{schema.name}")
        names = draw_names(schema, rng)
        file = folder / f"{schema.name}.sqlite"
        for path in (other(file), file):
            contents = draw_contents(schema, *names, rng)
            path.unlink(missing_ok=True)
            with closing(sqlite3.connect(path)) as connection:
                write(connection, schema, contents)
        yield schema, contents, file


def draw_tasks(databases: list[tuple[Schema, Contents, Path]]) -> dict[str, list[dict[str, Any]]]:
    """The task lines of each split."""
    rng = Random(SEED)
    tasks: dict[str, list[dict[str, Any]]] = {split: [] for split in QUESTIONS_OF_SPLIT}
    asked: set[tuple[str, str]] = set()
    while any(len(tasks[split]) < count for split, count in QUESTIONS_OF_SPLIT.items()):
        schema, contents, file = rng.choice(databases)
        question = draw_question(schema, contents, rng)
        held_out = [is_held_out(value) for value in question.values]
        split = "heldout" if all(held_out) else "train"
        one = (schema.name, question.text)
        full = len(tasks[split]) == QUESTIONS_OF_SPLIT[split]
        if full or one in asked or any(held_out) != all(held_out):
            continue
        asked.add(one)
        tasks[split].append({
            "id": f"{split}-{len(tasks[split]):04d}", "query": question.text,
            "answer": question.sql, "scorer": "exact_match", "schema": schema.name,
            "kind": question.kind, "database": str(file.resolve()),
        })  # fmt: skip
    return tasks


def is_held_out(value: str) -> bool:
    """Whether only held-out questions name it."""
    if value.isdigit():
        return int(value) % HELD_OUT_EACH == 0
    return any(value in names[::HELD_OUT_EACH] for names in NAMES.values())


def build_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE in which digits and names are single tokens, for the demo's template."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    names = [name for of_table in NAMES.values() for name in of_table]
    backend.add_tokens([AddedToken(name, single_word=True) for name in names])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=(DEMO / "chat_template.jinja").read_text(encoding="utf-8"),
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START],
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    """A JSONL file."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def main() -> None:
    """Write everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", type=Path, default=Path(__file__).parent / "made")
    folder = parser.parse_args().output_dir
    folder.mkdir(parents=True, exist_ok=True)
    for split, tasks in draw_tasks(list(make_databases(folder))).items():
        write_lines(folder / f"{split}.jsonl", tasks)
    talks = list(demonstrations(WARMUP_SEED, DEMONSTRATIONS))
    write_lines(folder / "demonstrations.jsonl", [{"messages": talk} for talk in talks])
    texts = ["system\nuser\nassistant\n"] * len(talks)
    texts += [message["content"] for talk in talks for message in talk]
    tokenizer = build_tokenizer(texts)
    tokenizer.save_pretrained(folder / "untrained")
    new_model(tokenizer).save_pretrained(folder / "untrained")
    print(f"{folder}: {len(talks)} demonstrations, {len(tokenizer)} tokens in the vocabulary")


if __name__ == "__main__":
    main()
