"""What of a dashboard's JSON Grafana's own types do not know, as JSON: `python FILE DASHBOARD`.

The types are those of the Grafana version that requirements.txt names. A field that they drop is
misspelt or of another version.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard


def lost(given: Any, kept: Any, place: str) -> Iterator[str]:
    """The places where something given was not kept as it is."""
    if isinstance(given, dict) and isinstance(kept, dict):
        for key, value in given.items():
            if key in kept:
                yield from lost(value, kept[key], f"{place}/{key}")
            else:
                yield f"{place}/{key}"
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for number, (one, other) in enumerate(zip(given, kept, strict=True)):
            yield from lost(one, other, f"{place}/{number}")
    elif given != kept:
        yield place


if __name__ == "__main__":
    plugins.register_default_plugins()
    given = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    kept = json.loads(JSONEncoder().encode(Dashboard.from_json(given)))
    print(json.dumps(list(lost(given, kept, ""))))
