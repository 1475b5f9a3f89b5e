"""Which two Records of a group make a pair, for `agentrl dpo --from_run` and `export-data`."""

from collections.abc import Mapping


def best_and_worst(scores: Mapping[str, float]) -> tuple[str, str] | None:
    """The ids of the Records with the highest and the lowest score; None if no two differ.

    `scores`: by Record. Of equal ones the first by its id counts, so that no length is preferred.
    """
    ids = sorted(scores)
    if not ids:
        return None
    best, worst = max(ids, key=lambda id: scores[id]), min(ids, key=lambda id: scores[id])
    return None if scores[best] == scores[worst] else (best, worst)
