"""Run by MLflow's Python: an experiment and a run, or the traces of it, by MLflow's client.

python read_traces.py URL begin              {"experiment": ..., "run": ...}
python read_traces.py URL read EXPERIMENT RUN    a list of traces
"""

import json
import sys

import mlflow

url, verb, *given = sys.argv[1:]
mlflow.set_tracking_uri(url)
if verb == "begin":
    experiment = mlflow.set_experiment("demo")
    with mlflow.start_run() as run:
        place = {"experiment": experiment.experiment_id, "run": run.info.run_id}
    print(json.dumps(place))  # last: MLflow prints addresses
else:
    experiment, run_id = given
    found = mlflow.search_traces(
        locations=[experiment], run_id=run_id, return_type="list", max_results=500
    )
    told = [
        {
            "status": str(trace.info.status),
            "metadata": trace.info.trace_metadata,
            "usage": trace.info.token_usage,
            "spans": [
                {
                    "id": span.span_id, "parent": span.parent_id, "name": span.name,
                    "type": span.span_type, "inputs": span.inputs, "outputs": span.outputs,
                    "attributes": span.attributes, "status": str(span.status.status_code),
                    "events": [[event.name, event.attributes] for event in span.events],
                    "start": span.start_time_ns, "end": span.end_time_ns,
                }
                for span in trace.data.spans
            ],
        }
        for trace in found
    ]  # fmt: skip
    print(json.dumps(told, default=str))
