#!/usr/bin/env bash
# Both demos from start to end, as a newcomer runs them, and what they must reach:  bash tests/demos.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

for preset in grpo minirl; do
    run="check-$preset"
    rm -rf "output/$run"
    "./${preset}_example.sh" "$run"
    "./eval_example.sh" "$run" --eval_rollouts 2
    source scripts/setup.sh run
    python - "output/$run" <<'CHECK'
import json
import sys
from pathlib import Path

folder = Path(sys.argv[1])
summary = json.loads((folder / "summary.json").read_text())
(evaluation,) = (json.loads(file.read_text()) for file in (folder / "eval").glob("*.json"))
pass_at_1 = evaluation["pass_at"]["1"]["mean"]
print(f"{folder.name}: {summary['eval_before']} -> {summary['eval_after']}, pass@1 {pass_at_1:.3f}")
assert 0.2 <= summary["eval_before"] <= 0.6, "the warm-up must leave something to learn"
assert summary["eval_after"] >= 0.93 and pass_at_1 >= 0.9, "it must have been learned"
assert summary["max_staleness"] <= 2 and summary["slots"]["failed"] == 0
assert (folder / "curve.png").stat().st_size > 10_000
CHECK
done
