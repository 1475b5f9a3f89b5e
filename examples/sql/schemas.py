"""The example's databases: four schemas, of which one is medical, and contents drawn for them.

All four have children that belong to parents: drugs treat diseases, books are by authors, and so
on. Drugs and diseases are many to many. Who belongs to whom is drawn, and so are all numbers.
"""

import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random

PARENTS, CHILDREN = 8, 16  # of a database
LINKS = 2  # parents of a child where they are many
MEASURES = range(10, 100)


@dataclass(frozen=True)
class Schema:
    """`child` and `parent` are tables with `name`; `category` is a column of the parent, and
    `measures` are integer columns of the child. `relation`: what children do to a parent, in words.
    `link`: the table between them and its measure, where a child has several parents.
    """

    name: str
    child: str
    parent: str
    category: str
    measures: tuple[str, ...]
    relation: str
    categories: tuple[str, ...]
    link: tuple[str, str] | None = None

    @property
    def tables(self) -> dict[str, tuple[str, ...]]:
        """The columns of each table."""
        child, parent = f"{self.child}_id", f"{self.parent}_id"
        tables = {self.parent: ("id", "name", self.category)}
        if self.link is None:
            return {**tables, self.child: ("id", "name", parent, *self.measures)}
        table, measure = self.link
        tables[self.child] = ("id", "name", *self.measures)
        return {**tables, table: (child, parent, measure)}

    @property
    def text(self) -> str:
        """The schema as the model reads it."""
        return " ".join(f"{table}({','.join(names)})" for table, names in self.tables.items())

    @property
    def join(self) -> str:
        """The tables from the child to the parent, as SQL writes them."""
        child, parent = self.child, self.parent
        if self.link is None:
            return f"{child} join {parent} on {child}.{parent}_id = {parent}.id"
        link = self.link[0]
        return (
            f"{child} join {link} on {link}.{child}_id = {child}.id "
            f"join {parent} on {link}.{parent}_id = {parent}.id"
        )


SCHEMAS = (
    Schema("medical", "drug", "disease", "organ", ("price", "stock"), "treat disease",
           ("heart", "lung", "skin", "brain"), ("treats", "dose")),
    Schema("library", "book", "author", "country", ("pages", "copies"), "are by author",
           ("chile", "kenya", "norway", "japan")),
    Schema("shop", "product", "maker", "city", ("cost", "weight"), "are made by maker",
           ("lima", "oslo", "cairo", "quito")),
    Schema("school", "course", "teacher", "subject", ("hours", "seats"), "are taught by teacher",
           ("music", "logic", "art", "law")),
)  # fmt: skip
SCHEMA_OF = {schema.name: schema for schema in SCHEMAS}

# Names that a database may have, by table. They are single tokens of the model.
NAMES = {
    table: words.split()
    for table, words in {
        "disease": "asthma gout anemia migraine psoriasis eczema malaria angina measles",
        "drug": "aspirin codeine digoxin insulin heparin warfarin naproxen quinine "
                "atropine morphine lithium ketamine estradiol fentanyl lidocaine "
                "metformin nystatin omeprazole",
        "author": "adler brandt castro duarte eriksen fischer gomez hansen ito",
        "book": "amber anchor beacon canyon cinder comet coral ember falcon ferry "
                "garden glacier harbor heron island ivory jungle kettle",
        "maker": "acme borealis corvex dynamo evergreen fulcrum gravita helix ionix",
        "product": "anvil apron basket bellows blanket broom bucket candle chisel clock "
                   "compass cushion drawer easel faucet funnel grater hammer",
        "teacher": "abbott barnes carver dalton ellis foster graham harper irving",
        "course": "algebra anatomy archery biology botany calculus ceramics chemistry "
                  "cooking dance debate drama drawing ecology economics fencing french "
                  "geology",
    }.items()
}  # fmt: skip


@dataclass(frozen=True)
class Contents:
    """What is in a database: rows by table, and which parents each child has, by name."""

    rows: dict[str, list[tuple[object, ...]]]
    parents_of: dict[str, tuple[str, ...]]


def draw_names(schema: Schema, rng: Random) -> tuple[list[str], list[str]]:
    """Names of the parents and of the children."""
    return rng.sample(NAMES[schema.parent], PARENTS), rng.sample(NAMES[schema.child], CHILDREN)


def draw_contents(schema: Schema, parents: list[str], children: list[str], rng: Random) -> Contents:
    """Contents with these names. No measure occurs twice in a column, so that no order has ties."""
    columns = [rng.sample(MEASURES, CHILDREN) for _ in schema.measures]
    rows: dict[str, list[tuple[object, ...]]] = {table: [] for table in schema.tables}
    for number, name in enumerate(parents, 1):
        rows[schema.parent].append((number, name, rng.choice(schema.categories)))
    parents_of = {}
    for number, (name, *measures) in enumerate(zip(children, *columns, strict=True), 1):
        own = rng.sample(range(1, PARENTS + 1), 1 if schema.link is None else LINKS)
        parents_of[name] = tuple(parents[one - 1] for one in own)
        if schema.link is None:
            rows[schema.child].append((number, name, *own, *measures))
        else:
            rows[schema.child].append((number, name, *measures))
            rows[schema.link[0]] += [(number, one, rng.choice(MEASURES)) for one in own]
    return Contents(rows, parents_of)


def other(file: Path) -> Path:
    """The database with the same names and other contents."""
    return file.with_stem(f"{file.stem}-other")


def write(connection: sqlite3.Connection, schema: Schema, contents: Contents) -> None:
    """Fill an empty database."""
    for table, columns in schema.tables.items():
        text = {"name", schema.category}
        declared = [f"{name} {'text' if name in text else 'integer'}" for name in columns]
        connection.execute(f"create table {table} ({', '.join(declared)})")
        _insert(connection, table, contents.rows[table])
    connection.commit()


def _insert(connection: sqlite3.Connection, table: str, rows: Iterable[tuple[object, ...]]) -> None:
    for row in rows:
        connection.execute(f"insert into {table} values ({', '.join('?' * len(row))})", row)
