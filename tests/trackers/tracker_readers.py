"""What a tracker has of a run, as its own package reads it.

Weights & Biases has no reader of a file that was written offline, but its format in protobuf; the
frames around that are read by SwanLab's converter.
"""

import glob
import json
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

Figures = dict[str, list[tuple[int, float]]]


@dataclass
class Written:
    """A run in a tracker: its project and name, its flags, its figures by step, and its table."""

    project: str
    name: str
    flags: dict[str, Any]
    figures: Figures = field(default_factory=lambda: defaultdict(list))
    rows: list[dict[str, Any]] = field(default_factory=list)


def tensorboard(output: Path, name: str) -> Written:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    [folder] = (output / "tensorboard").iterdir()
    events = EventAccumulator(str(folder))
    events.Reload()
    [flags] = folder.glob("*/hparams.yml")
    written = Written("agentrl", folder.name, yaml.safe_load(flags.read_text()))
    for name in events.Tags()["scalars"]:
        written.figures[name] = [(event.step, event.value) for event in events.Scalars(name)]
    texts = events.Tags()["tensors"]
    for event in events.Tensors("rollouts/text_summary") if texts else ():
        for part in event.tensor_proto.string_val[0].decode().split("\n\n**"):
            head, _, text = part.partition("\n\n")
            told = head.replace("*", "").replace("`", "")
            which, score, _, task, rest = told.split(", ", 4)
            written.rows.append({
                "step": event.step, "which": which, "score": float(score.removeprefix("score ")),
                "task": task.removeprefix("task "), "look": rest.partition(": ")[2].strip("<>"),
                "text": text.replace("\n    ", "\n").removeprefix("    "),
            })  # fmt: skip
    return written


def wandb(output: Path, name: str) -> Written:
    from swanlab.converter.wb.wbdatastore import WBDataStoreReader
    from wandb.proto.wandb_internal_pb2 import Record

    [file] = glob.glob("wandb/offline-run-*/*.wandb")
    reader, records = WBDataStoreReader(), []
    reader.open(file)
    while (data := reader.scan()) is not None:
        record = Record()
        record.ParseFromString(data)
        records.append(record)
    [run] = [record.run for record in records if record.HasField("run")]
    updates = [item for record in records for item in record.config.update]
    flags = {item.key: json.loads(item.value_json) for item in updates if item.key}
    written = Written(run.project, run.display_name, flags)
    for record in records:
        values = {
            "/".join(item.nested_key or [item.key]): json.loads(item.value_json)
            for item in record.history.item
        }
        for name, value in values.items():
            if isinstance(value, int | float):
                written.figures[name].append((values["_step"], value))
        if path := values.get("rollouts/path"):
            table = json.loads((Path(file).parent / "files" / path).read_text())
            rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
            written.rows += rows
    return written


def mlflow(output: Path, name: str) -> Written:
    import mlflow

    client = mlflow.MlflowClient()
    [project] = [each for each in client.search_experiments() if each.name != "Default"]
    [run] = client.search_runs([project.experiment_id])
    written = Written(project.name, run.info.run_name, run.data.params)
    for name in run.data.metrics:
        history = client.get_metric_history(run.info.run_id, name)
        written.figures[name] = [(each.step, each.value) for each in history]
    for file in client.list_artifacts(run.info.run_id, "rollouts"):
        table = client.load_table(project.experiment_id, file.path, [run.info.run_id])
        written.rows += table.to_dict("records")
    return written


def swanlab(output: Path, name: str) -> Written:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    [file] = glob.glob("swanlog/run-*/*.swanlab")
    folder, reader = Path(file).parent, DataStoreReader()
    reader.open(file)
    records = []
    for data in reader:
        record = Record()
        record.ParseFromString(data)
        records.append(record)
    [start] = [record.start for record in records if record.HasField("start")]
    kept = yaml.safe_load((folder / "files/config.yaml").read_text())
    flags = {name: value["value"] for name, value in kept.items()}
    written = Written(start.project, start.name, flags)
    for record in records:
        if record.HasField("scalar"):
            scalar = record.scalar
            written.figures[scalar.key].append((scalar.step, scalar.value.number))
        if record.HasField("media"):
            [item] = record.media.value.items
            table = json.loads((folder / "media/echarts" / item.filename).read_text())
            written.rows += table["rowData"]
    return written


def trackio(output: Path, name: str) -> Written:
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    project = os.environ.get("TRACKIO_PROJECT", "agentrl")
    [run] = [run for run in trackio.Api().runs(project) if run.name == name]
    written = Written(project, run.name, run.config)
    for line in SQLiteStorage.get_logs(project, name):
        for figure, value in line.items():
            if figure == "rollouts":
                written.rows += value["_value"]
            elif isinstance(value, int | float):
                written.figures[figure].append((line["step"], value))
    return written


READERS = {
    "tensorboard": tensorboard, "wandb": wandb, "mlflow": mlflow, "swanlab": swanlab,
    "trackio": trackio,
}  # fmt: skip


def numbers(written: Written, name: str) -> Iterator[float]:
    """A figure, step after step."""
    return (value for _, value in sorted(written.figures[name]))
