"""What the address of a page asks for, as values. Addresses are typed, shared and cut off."""

import json
from collections.abc import Collection, Mapping
from datetime import UTC, datetime

from agentrl.databases.documents import Split
from agentrl.launcher.show_list import ORDERS, OrderPlace

_LARGEST = 2**63  # MongoDB has no larger integers


class AddressError(ValueError):
    """An address asks for what there is not. The message is one sentence."""


def split_in(asked: Mapping[str, str]) -> Split | None:
    """The split; None if none is named."""
    return Split(_one_of(asked, "split", list(Split))) if "split" in asked else None


def order_in(asked: Mapping[str, str], orders: Collection[str]) -> str:
    """The order, one of these; without one, the newest first."""
    return _one_of(asked, "order", orders) if "order" in asked else "newest"


def text_in(asked: Mapping[str, str]) -> str:
    """The text that is looked for; empty if none is."""
    text = asked.get("text", "").strip()
    if "\0" in text:
        raise AddressError("text: MongoDB looks for no text with a NUL character")
    return text


def time_in(asked: Mapping[str, str], field: str) -> datetime | None:
    """A time; one without a zone is UTC. None if none is given."""
    if not (given := asked.get(field, "")):
        return None
    try:
        read = datetime.fromisoformat(given)
        return read.replace(tzinfo=UTC) if read.tzinfo is None else read.astimezone(UTC)
    except (ValueError, OverflowError):
        raise AddressError(f"{field}={given}: not a time as 2026-01-31T12:00:00Z") from None


def place_in(asked: Mapping[str, str], order: str) -> OrderPlace | None:
    """A place in an order, behind which the page begins; None if none is given."""
    if not (given := asked.get("after", "")):
        return None
    try:
        *numbers, record = json.loads(given)
        record.encode()
        if len(numbers) + 1 == len(ORDERS[order]) and all(
            -_LARGEST < n < _LARGEST for n in numbers
        ):
            return [*numbers, record]
    except (ValueError, TypeError, AttributeError, RecursionError):  # not such a list
        pass
    raise AddressError(f"after={given[:200]}: no place in the order {order}")


def _one_of(asked: Mapping[str, str], field: str, known: Collection[str]) -> str:
    if asked[field] not in known:
        raise AddressError(f"{field}={asked[field]}: there are {', '.join(known)}")
    return asked[field]
