"""Writes the files of a small run whose one weight's gradient jumps, without any framework."""

import time

from step_records import Records

from trainsentry.anomaly.incident import Incident, Suspect
from trainsentry.collectors.statistics import STATISTICS
from trainsentry.exporters.csv.writer import CsvWriter
from trainsentry.exporters.files.json_files import append_lines, replace_json

CULPRIT = "layers.3.mlp.weight"


def make_run(root, *, steps=40, layers=6, name=CULPRIT, incident=True, ranks=2):
    """Write the files of a run whose one weight jumps at step 30."""
    for rank in range(ranks):
        records = Records(rank=rank)
        writer = CsvWriter(root / f"rank{rank}", records.table, STATISTICS)
        for n in range(steps):
            sizes = {(f"layers.{i}.mlp.weight", "gradient"): 1.0 + i for i in range(layers)}
            if n >= 30 and rank == 0:
                sizes[name, "gradient"] = float("nan") if n == 31 else 500.0
            writer.write(records.step(n, sizes | {("loss", "loss"): 3.0 - n / 100}))
        writer.close()
        status = {"state": "closed", "rank": rank, "step": steps - 1, "anomalies": 3, "gaps": [], "failures": {}}
        status["cost"] = {"share": 0.01, "seconds_a_step": 0.002, "recent_share": 0.01}
        replace_json(root / f"rank{rank}" / "status.json", status)
    replace_json(root / "run.json", {"configuration": {"output_dir": "out"}, "framework": "pytorch", "hosts": ["a"]})
    if incident:
        suspect = Suspect(30, 0, name, "gradient", "norm", "spike", 60.0, "", f"{name} is 100 times its usual")
        summary = f"At step 30 on rank 0: the gradient of {name} jumped."
        found = Incident(
            1, 30, 0, name, "gradient", "norm", "spike", "critical", 60.0, summary, (suspect,), ("stop",), 30, 31
        )
        append_lines(root / "incidents.jsonl", [found.to_json()])
        line = {"step": 30, "name": name, "quantity": "gradient", "score": 60.0, "rank": 0, "kind": "spike"}
        append_lines(
            root / "rank0" / "anomalies.jsonl", [line | {"value": 500.0, "expected": 4.0, "statistic": "norm"}]
        )
    return root


INCIDENT = {"id": 1, "name": "fc.weight", "severity": "warning", "kind": "spike", "first_seen": 7, "last_seen": 7}


def running(root, ranks=2, **more):
    """Write what a run has written before its first incident."""
    for rank in range(ranks):
        status = {"state": "running", "step": 7 + rank, "updated": time.time(), "gaps": [], "failures": {}, **more}
        status["cost"] = {"recent_share": 0.01, "step_seconds": 0.25}
        replace_json(root / f"rank{rank}" / "status.json", status)
    return root
