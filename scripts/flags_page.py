"""Generates tables of flags from the code: `python scripts/flags_page.py`.

    docs/reference/flags.md        the table of flags, with defaults and choices
    docs/guides/checkpoints.md     the table of what may change after the first start
    docs/from-agentrl.md           the tables of the flags of the original AgentRL and transformers

It replaces the lines after a page's marker, up to the end marker if there is one.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from agentrl.configs.familiar import FAMILIAR, FamiliarFlag, Treatment
from agentrl.configs.familiar.original_defaults import (
    DIFFERS,
    KEPT,
    NOT_SET,
    ORIGINAL_DEFAULTS,
    TRANSFORMERS_DEFAULTS,
)
from agentrl.configs.familiar.original_flags import ORIGINAL_FLAGS
from agentrl.configs.familiar.transformers_flags import TRANSFORMERS_FLAGS
from agentrl.configs.flag import FlagClass
from agentrl.configs.flags import FLAGS, TITLES, Flag, shown, written

DOCS = Path(__file__).resolve().parents[1] / "docs"
MARKER = "<!-- From here on written by scripts/flags_page.py -->\n"
END = "<!-- Until here written by scripts/flags_page.py -->\n"

# For each class: its title, and how a resume and a joining sampler treat another value.
CLASSES: Mapping[FlagClass, tuple[str, str, str]] = {
    FlagClass.DATA: (
        "of the data",
        "refused, or taken with `--change_data`",
        "refused if it is another; task files are not read",
    ),
    FlagClass.SAMPLING: ("of the sampling", "taken", "refused if it is another"),
    FlagClass.FIXED: ("fixed", "refused", "not read"),
    FlagClass.OWN: ("of a process", "taken, not recorded", "its own"),
    FlagClass.TRAINING: ("of the training", "taken", "not read"),
}


def flags_table() -> Iterable[str]:
    """The lines of the table of flags, by group."""
    for group, title in TITLES.items():
        yield from (f"## {title}", "", "| flag | default | |", "| --- | --- | --- |")
        yield from (_row(flag) for flag in FLAGS.values() if flag.group == group)
        yield ""


def classes_table() -> Iterable[str]:
    """The lines of the table of flag classes. Of the training class only the optimizer's flags."""
    yield "| flags | given otherwise on a resume | given by a sampler that joins |"
    yield "| --- | --- | --- |"
    for belongs, (title, resumed, joining) in CLASSES.items():
        flags = [flag for flag in FLAGS.values() if flag.belongs == belongs]
        others = ""
        if belongs == FlagClass.TRAINING:
            flags = [flag for flag in flags if flag.group == "optimizer"]
            others = " and all others"
        names = " ".join(f"`--{flag.name}`" for flag in flags)
        yield f"| {title}: {names}{others} | {resumed} | {joining} |"
    yield ""


def original_tables() -> Iterable[str]:
    """The lines of the tables of flags that users of the original AgentRL bring."""
    yield from ("### Of its configuration class and scripts", "")
    yield from _familiar_table([*ORIGINAL_DEFAULTS, *ORIGINAL_FLAGS])
    yield from ("### Of transformers.TrainingArguments", "")
    yield from _familiar_table([*TRANSFORMERS_DEFAULTS, *TRANSFORMERS_FLAGS])


def _familiar_table(names: Iterable[str]) -> Iterable[str]:
    """One row for each treatment, with all flags that have it."""
    rows: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        rows.setdefault(_here(name), []).append(f"`--{name}`")
    yield from ("| flag | here |", "| --- | --- |")
    yield from (f"| {' '.join(flags)} | {here} |" for here, flags in rows.items())
    yield ""


def _here(name: str) -> str:
    """What is done with a flag of the original."""
    if name in FAMILIAR:
        return _treated(FAMILIAR[name])
    flag = next(flag for flag in FLAGS.values() if name in (flag.name, *flag.info.aliases))
    there = {**TRANSFORMERS_DEFAULTS, **ORIGINAL_DEFAULTS, **NOT_SET}[name]
    if flag.name in DIFFERS:
        return f"the same, but {DIFFERS[flag.name]}"
    if flag.name in KEPT:
        return f"the same; if it is not given: {KEPT[flag.name]}"
    if there in (flag.default, None, "") or written(there) == written(flag.default or False):
        return "the same"
    default = f"({flag.info.unset})" if flag.default is None else f"`{shown(flag, flag.default)}`"
    return f"the same; if it is not given, `{written(there)}` there, {default} here"


def _treated(flag: FamiliarFlag) -> str:
    if flag.treatment is Treatment.IDLE:
        return f"taken, without effect: {flag.said}"
    if flag.treatment is Treatment.TRANSLATED:
        return f"becomes {flag.said}"
    taken = " or ".join(f"`{value}`" for value in flag.harmless)
    return f"{taken} is taken; else refused: {flag.said}" if taken else f"refused: {flag.said}"


PAGES: Mapping[Path, Callable[[], Iterable[str]]] = {
    DOCS / "reference" / "flags.md": flags_table,
    DOCS / "guides" / "checkpoints.md": classes_table,
    DOCS / "from-agentrl.md": original_tables,
}


def rewritten(page: str, lines: Iterable[str], marker: str = MARKER, until: str = END) -> str:
    """Return the page with the lines after its marker replaced."""
    before, _, after = page.partition(marker)
    _, end, after = after.partition(until)
    table = "\n".join(lines) + "\n"
    return before + marker + "\n" + (table + end + after if end else table.rstrip() + "\n")


def _row(flag: Flag) -> str:
    default = flag.info.unset if flag.default is None else f"`{shown(flag, flag.default)}`"
    return f"| `--{flag.name}` {flag.metavar} | {default} | {flag.meaning} |".replace(
        "true|false", "true, false"
    )


if __name__ == "__main__":
    for path, lines in PAGES.items():
        path.write_text(rewritten(path.read_text(encoding="utf-8"), lines()), encoding="utf-8")
