"""Ten thousand sampler processes on a sharded cluster, simulated.

An event-driven simulation in Python: time is the simulation's, and no database runs. What an
operation costs a server is what `ledger.py` measured of mongod (`mongod_us` in
results/ledger.json); servers are processors with a queue; writes wait for the majority as well; a
claim that meets another one's claim of the same group is done again, as WiredTiger does after a
write conflict. Samplers do what `rollout/scheduling/scheduler.py` and `databases/` do: claim,
start, four turns with a pause of lognormal length before each, finish, complete, and finalise their
groups, with one bulk write in flight for each process and collection.

    python benchmarks/scaling.py [--quick] [--save]

The designs stand in order, each with one more change than the one before. What they are and what
was found: `docs/internals/scaling.md`. The last line is a JSON object.
"""

import json
from dataclasses import asdict, replace

from cluster_simulation import Cluster, Design, Load, Simulation
from report import RESULTS, finish, parse_flags

AS_IS = Design("as it is")
DESIGNS = (
    AS_IS,
    polled := replace(AS_IS, name="polling instead of change streams", streams=False),
    told := replace(polled, name="and one process counts, the others read", counts=False),
    one_reaps := replace(told, name="and one process reaps", all_reap=False),
    replace(one_reaps, name="and claims over 16 groups", lanes=16),
)


def main() -> None:
    args = parse_flags(__doc__)
    ledger = json.loads((RESULTS / "ledger.json").read_text())
    load, cluster, seconds = Load(), Cluster(), 3.0 if args.quick else 30.0
    print(f"{load}\n{cluster}\n{load.records_per_s:.0f} records per second are asked for")
    print("| design | records/s | cores of the tasks primary, of a shard | claim, ms: 50%, 99% |"
          " conflicts a claim |\n| --- | --- | --- | --- | --- |")  # fmt: skip
    designs = {}
    for design in DESIGNS:
        figures = Simulation(design, load, cluster, ledger["mongod_us"]).run(seconds)
        designs[design.name] = figures
        cores = f"{figures['tasks_primary_cores']}, {figures['shard_cores']}"
        claims = ", ".join(f"{ms:.0f}" for ms in figures["claim_ms"]) or "none came back"
        print(f"| {design.name} | {figures['records_per_s']} | {cores} | {claims} |"
              f" {figures['conflicts_per_claim']} |", flush=True)  # fmt: skip
    print("\n| operation | commands/s | documents/s |\n| --- | --- | --- |")
    for name, count in figures["operations_per_s"].items():
        print(f"| {name} | {count} | {figures['documents_per_s'][name]} |")
    result = {
        "records_per_second_asked": round(load.records_per_s),
        "records_per_second": [figures["records_per_s"] for figures in designs.values()],
        "load": asdict(load),
        "cluster": asdict(cluster),
        "designs": designs,
        "seconds": seconds,
        "costs_of": {key: ledger[key] for key in ("date", "machine", "mongod")},
    }
    finish("scaling", result, (), save=args.save)


if __name__ == "__main__":
    main()
