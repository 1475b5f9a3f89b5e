"""Writes the table of flags into docs/reference/flags.md: `python scripts/flags_page.py`."""

from pathlib import Path

from agentrl.configs.flags import FLAGS, TITLES, Flag, shown

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "flags.md"
MARKER = "<!-- From here on written by scripts/flags_page.py -->\n"


def flags_page(page: str) -> str:
    """The page with the part after its marker made anew."""
    lines = [page.partition(MARKER)[0] + MARKER]
    for group, title in TITLES.items():
        lines += [f"## {title}", "", "| flag | default | |", "| --- | --- | --- |"]
        lines += [_row(flag) for flag in FLAGS.values() if flag.group == group]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _row(flag: Flag) -> str:
    default = flag.info.unset if flag.default is None else f"`{shown(flag, flag.default)}`"
    return f"| `--{flag.name}` {flag.metavar} | {default} | {flag.meaning} |".replace(
        "true|false", "true, false"
    )


if __name__ == "__main__":
    PAGE.write_text(flags_page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
