"""Generates two tables of flags from the code: `python scripts/flags_page.py`.

    docs/reference/flags.md        the table of flags, with defaults and choices
    docs/guides/checkpoints.md     the table of what may change after the first start

It replaces the lines after a page's marker, up to the end marker if there is one.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from agentrl.configs.flag import FlagClass
from agentrl.configs.flags import FLAGS, TITLES, Flag, shown

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


PAGES: Mapping[Path, Callable[[], Iterable[str]]] = {
    DOCS / "reference" / "flags.md": flags_table,
    DOCS / "guides" / "checkpoints.md": classes_table,
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
