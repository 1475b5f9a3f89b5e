"""Numbers, times and texts as people read them: the filters of the templates."""

from collections.abc import Mapping
from datetime import UTC, datetime
from urllib.parse import urlencode

from agentrl.launcher import view
from agentrl.launcher.runs import age
from agentrl.viewer.folded_json import folded_json

_NONE = "–"


def number(value: float | None, form: str = ".3g") -> str:
    """A number in a format, a whole one without; a dash for None."""
    if value is None:
        return _NONE
    return f"{value:,}" if isinstance(value, int) and form == ".3g" else format(value, form)


def duration(seconds: float | None) -> str:
    """Seconds as `1:02:03` or `2:03`; a dash for None."""
    return _NONE if seconds is None else view.duration(seconds)


def ago(value: datetime | float | None) -> str:
    """How long ago a time was (seconds since 1970, or aware)."""
    if value is None:
        return _NONE
    then = value.timestamp() if isinstance(value, datetime) else value
    return age(datetime.now(UTC).timestamp() - then) + " ago"


def clock(value: datetime | float | None) -> str:
    """A time as ISO 8601 in UTC, which the page shows as local time."""
    if value is None:
        return ""
    then = value if isinstance(value, datetime) else datetime.fromtimestamp(value, UTC)
    return then.isoformat(timespec="milliseconds")


def milliseconds(seconds: float | None) -> str:
    """Seconds as `12 ms` or `3.4 s`."""
    if seconds is None:
        return _NONE
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def large(value: int | None) -> str:
    """A count with three digits or so: 12.3k, 4.56M."""
    if value is None:
        return _NONE
    for unit, name in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if value >= unit:
            return f"{value / unit:.3g}{name}"
    return str(value)


def query(fields: Mapping[str, str], **changed: str) -> str:
    """The query of an address with these fields, some of them changed."""
    return urlencode({**fields, **changed})


FILTERS = {
    "number": number,
    "ago": ago,
    "clock": clock,
    "folded_json": folded_json,
    "milliseconds": milliseconds,
    "duration": duration,
    "query": query,
    "large": large,
}
