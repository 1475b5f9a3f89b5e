"""Questions about a database, with the SQL that answers them and the slips a beginner makes."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from schemas import Contents, Schema


@dataclass(frozen=True)
class Question:
    """`sql` answers it. `lazy` forgets what comes after the first table, and runs; `broken` does
    not run. `values`: what the question names, by which train and held-out are divided.
    """

    kind: str
    text: str
    sql: str
    lazy: str
    broken: str
    values: tuple[str, ...]


def value(schema: Schema, contents: Contents, rng: Random) -> Question:
    """A measure of a child."""
    child, measure, name = schema.child, rng.choice(schema.measures), _child(contents, rng)
    start = f"select {measure} from {child}"
    return Question(
        "value", f"what is the {measure} of {child} '{name}'?",
        f"{start} where name = '{name}'", start, f"{start} where title = '{name}'", (name,),
    )  # fmt: skip


def above(schema: Schema, contents: Contents, rng: Random) -> Question:
    """How many children exceed a number."""
    child, measure, number = schema.child, rng.choice(schema.measures), rng.randint(20, 80)
    start = f"select count(*) from {child}"
    return Question(
        "above", f"how many {child}s have {measure} above {number}?",
        f"{start} where {measure} > {number}", start, f"{start} where amount > {number}",
        (str(number),),
    )  # fmt: skip


def children(schema: Schema, contents: Contents, rng: Random) -> Question:
    """The children of a parent."""
    child, parent, name = schema.child, schema.parent, _parent(contents, rng)
    where = f"from {schema.join} where {parent}.name = '{name}'"
    return Question(
        "children", f"which {child}s {schema.relation} '{name}'?",
        f"select {child}.name {where}", f"select name from {child}", f"select name {where}",
        (name,),
    )  # fmt: skip


def most(schema: Schema, contents: Contents, rng: Random) -> Question:
    """The child of a parent with the largest measure."""
    child, parent, name = schema.child, schema.parent, _parent(contents, rng)
    measure = rng.choice(schema.measures)
    rest = (
        f"from {schema.join} where {parent}.name = '{name}' order by {child}.{measure} desc limit 1"
    )
    return Question(
        "most", f"which of the {child}s that {schema.relation} '{name}' has the highest {measure}?",
        f"select {child}.name {rest}", f"select name from {child}", f"select name {rest}", (name,),
    )  # fmt: skip


def category(schema: Schema, contents: Contents, rng: Random) -> Question:
    """The categories of a child's parents."""
    child, parent, name = schema.child, schema.parent, _child(contents, rng)
    start = f"select {parent}.{schema.category} from {schema.join} where"
    return Question(
        "category", f"what is the {schema.category} of the {parent} of {child} '{name}'?",
        f"{start} {child}.name = '{name}'", f"select {schema.category} from {parent}",
        f"{start} name = '{name}'", (name,),
    )  # fmt: skip


def dose(schema: Schema, contents: Contents, rng: Random) -> Question:
    """The measure of a link: the dose of a drug for a disease."""
    assert schema.link is not None
    child, parent, (link, measure) = schema.child, schema.parent, schema.link
    name = _child(contents, rng)
    other = rng.choice(contents.parents_of[name])
    start = f"select {link}.{measure} from {schema.join} where"
    return Question(
        "dose", f"what {measure} of {child} '{name}' is for {parent} '{other}'?",
        f"{start} {child}.name = '{name}' and {parent}.name = '{other}'",
        f"select {measure} from {link}", f"{start} name = '{name}' and name = '{other}'",
        (name, other),
    )  # fmt: skip


Kind = Callable[[Schema, Contents, Random], Question]
KINDS: tuple[Kind, ...] = (value, above, children, most, category)


def draw_question(schema: Schema, contents: Contents, rng: Random) -> Question:
    """A question of any kind that the schema has."""
    kinds = KINDS if schema.link is None else (*KINDS, dose)
    return rng.choice(kinds)(schema, contents, rng)


def _child(contents: Contents, rng: Random) -> str:
    return rng.choice(list(contents.parents_of))


def _parent(contents: Contents, rng: Random) -> str:
    """A parent that has children."""
    return rng.choice(rng.choice(list(contents.parents_of.values())))
