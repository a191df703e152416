"""The targets of the fuzzer: each reader as a function of bytes, with its own errors and its first inputs.

Called by `fuzz_readers.py`, in a process for each reader: `fuzz_targets.py NAME CORPUS [libFuzzer's options]`.
"""

import contextlib
import io
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fuzz_mutators import csv_mutator, json_mutator

ROOT = Path(tempfile.mkdtemp(prefix="fuzz_", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))

LINES = (
    b"vpp_stage,name,step,micro_step,order,min,max,mean,norm,nans,infs,zeros,shape,dtype\n"
    b'0,fc.weight,0,0,0,-1.0,1.0,0.0,2.0,0,0,0.0,"[2, 3]",float32\n'
    b'0,"a ""b"", c",1,0,1,nan,inf,0.0,2.5e-3,1,0,0.5,[],bfloat16\n'
)
SCALARS = b"name,step,micro_step,value\nloss,0,0,2.5\nloss,1,0,nan\n"
MSPROBE = b"vpp_stage,name,step,micro_step,norm,max\n-1,tok.weight,0,0,0.5,1.0\n"
MODULES = b"module_name,vpp_stage,scope,step,norm\ntok,0,forward,0,0.25\n"


def _fresh(name: str) -> Path:
    folder = ROOT / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def csv_tables(data: bytes) -> None:
    """Read CSV tables as rows and as records."""
    from trainsentry.collectors.series import SeriesTable
    from trainsentry.exporters.csv.reader import read_table, table_files
    from trainsentry.monitor.offline.history import records_of

    folder = _fresh("csv") / "rank0"
    folder.mkdir()
    (folder / "gradient_0-9.csv").write_bytes(data)
    (folder / "scalars_0-9.csv").write_bytes(data)
    for files in table_files(folder).values():
        for _ in read_table(files, _quiet):
            pass
    for _ in records_of(folder, SeriesTable(), _quiet):
        pass


def zstd_table(data: bytes) -> None:
    """Read a table compressed by zstd."""
    _one_table("gradient_0-9.csv.zst", data)


def parquet_table(data: bytes) -> None:
    """Read a table in Parquet."""
    _one_table("gradient_0-9.parquet", data)


def _one_table(name: str, data: bytes) -> None:
    from trainsentry.exporters.csv.pieces import line_count
    from trainsentry.exporters.csv.reader import read_table, table_files

    folder = _fresh("table")
    (folder / name).write_bytes(data)
    line_count(folder / name)
    for _ in read_table(table_files(folder)["gradient"], _quiet):
        pass


def conversion(data: bytes) -> None:
    """Convert tables of msprobe's two generations, and continue from a saved state."""
    from trainsentry.exporters.convert.csv2tb import csv2tb

    folder = _fresh("convert")
    for place in ("rank_0", "Dec03_21-34-40-rank1-1a2b3c4d"):
        (folder / place).mkdir()
    (folder / "rank_0" / "module_step0-9.csv").write_bytes(data)
    (folder / "Dec03_21-34-40-rank1-1a2b3c4d" / "grad_reduced_0-9.csv").write_bytes(data)
    csv2tb(folder, folder / "out")
    csv2tb(folder, folder / "out")


def state(data: bytes) -> None:
    """Continue a conversion from the state in a file."""
    from trainsentry.exporters.convert.csv2tb import csv2tb

    folder = ROOT / "state"
    if not folder.exists():
        (folder / "rank0").mkdir(parents=True)
        (folder / "rank0" / "gradient_0-9.csv").write_bytes(LINES)
    csv2tb(folder, folder / "out")
    (folder / "out" / "rank0" / ".csv2tb.gradient.json").write_bytes(data)
    csv2tb(folder, folder / "out")


def run_files(data: bytes) -> None:
    """Watch a run and rank its anomalies."""
    from trainsentry.exporters.run_reader import anomalies_since, read_run
    from trainsentry.monitor.cli.console import PlainConsole
    from trainsentry.monitor.cli.watch import view
    from trainsentry.monitor.offline.history import diagnose

    folder = _fresh("run")
    (folder / "rank0").mkdir()
    for name in ("run.json", "incidents.jsonl", "rank0/status.json", "rank0/anomalies.jsonl", "rank0/graph.json"):
        (folder / name).write_bytes(data)
    run = read_run(folder)
    assert run.is_over in {True, False}
    anomalies_since(folder / "rank0", 0, 5)
    console = PlainConsole()
    console.file = io.StringIO()
    console.print(view(run, 0.0))
    diagnose([folder / "rank0"], _quiet)


def report_page(data: bytes) -> None:
    """Write the report of a run."""
    from trainsentry.exporters.report.page import write_report

    folder = _fresh("report")
    (folder / "rank0").mkdir()
    for name in ("run.json", "incidents.jsonl", "rank0/status.json", "rank0/anomalies.jsonl"):
        (folder / name).write_bytes(data)
    (folder / "rank0" / "gradient_0-9.csv").write_bytes(LINES)
    write_report(folder)


def dumps(data: bytes) -> None:
    """Read a dump, find its first overflow, compare it with itself, and draw the comparison as a graph."""
    from trainsentry.anomaly.dumps.dump_comparison import compare_dumps
    from trainsentry.anomaly.dumps.first_overflow import first_overflows
    from trainsentry.anomaly.dumps.overflow_levels import overflow_level
    from trainsentry.exporters.dumps.dump_reader import read_dumps
    from trainsentry.exporters.graph.call_graph import number_micro_steps
    from trainsentry.exporters.graph.database import write_database
    from trainsentry.exporters.graph.drawing import GraphPair
    from trainsentry.exporters.graph.dumped_graph import graph_of_dump
    from trainsentry.monitor.offline.compared_graphs import compare_graphs

    folder = _fresh("dump") / "step0" / "rank0"
    (folder / "dump_tensor_data").mkdir(parents=True)
    for name in ("dump.json", "stack.json", "construct.json", "dump_tensor_data/mapping.csv"):
        (folder / name).write_bytes(data)
    found = read_dumps(folder)
    assert found[0].stacks is not None
    first_overflows(found)
    for _ in compare_dumps(found[0], found[0], {}):
        pass
    graphs = [graph_of_dump(found[0]) for _ in range(2)]
    compare_graphs(*graphs)
    for call, entry in found[0].calls.items():
        overflow_level(call, entry)
    write_database(folder / "graph.vis.db", [GraphPair(*graphs, number_micro_steps(*graphs))], marked=True)


def replays(data: bytes) -> None:
    """Replay the call of a dump's first overflow where possible, and judge it."""
    from trainsentry.anomaly.dumps.first_overflow import first_overflows
    from trainsentry.exporters.dumps.dump_reader import read_dumps
    from trainsentry.monitor.cli.overflow import verdict_on

    folder = _fresh("replay")
    (folder / "dump.json").write_bytes(data)
    found = read_dumps(folder)
    for overflow in first_overflows(found):
        verdict_on(overflow, found[0])


def numpy_file(data: bytes) -> None:
    """Load an array."""
    from trainsentry.monitor.offline.compare_runs import load_array

    path = _fresh("npy") / "a.npy"
    path.write_bytes(data)
    load_array(path)


def torch_file(data: bytes) -> None:
    """Load a tensor."""
    from trainsentry.monitor.offline.compare_runs import load_array

    path = _fresh("pt") / "a.pt"
    path.write_bytes(data)
    load_array(path)


def configurations(data: bytes) -> None:
    """Read a configuration of the monitor and of the debugger, in each form."""
    from trainsentry.monitor.config.files import load_config
    from trainsentry.monitor.debugger.debugger_config import load_debugger_config
    from trainsentry.monitor.errors import ConfigError

    folder = _fresh("config")
    for suffix in (".json", ".yaml", ".toml"):
        path = folder / f"a{suffix}"
        path.write_bytes(data)
        with contextlib.suppress(ConfigError):
            load_config(path)
        with contextlib.suppress(ConfigError):
            load_debugger_config(str(path), {"dump_path": str(folder / "out")})


def msprobe_files(data: bytes) -> None:
    """Read and translate a configuration of msprobe's monitor, and rank its alerts."""
    from trainsentry.exporters.msprobe.recorded_alerts import alert_files, read_alerts
    from trainsentry.monitor.config.files import parse_config, read_file
    from trainsentry.monitor.errors import ConfigError
    from trainsentry.monitor.msprobe.translation import translate

    folder = _fresh("msprobe")
    for name in ("anomaly.json", "monitor_config.json"):
        (folder / name).write_bytes(data)
    read_alerts(alert_files(folder), _quiet)
    with contextlib.suppress(ConfigError):
        path = folder / "monitor_config.json"
        parse_config(translate(read_file(path), str(path), files=True).config, str(path))


def commands(data: bytes) -> None:
    """Read the commands of a running job."""
    from trainsentry.exporters.files.foreign_files import InputError
    from trainsentry.monitor.config.files import load_config
    from trainsentry.monitor.control.changes import with_settings
    from trainsentry.monitor.control.control_file import ControlFile, parse_command
    from trainsentry.monitor.errors import ConfigError

    path = _fresh("control") / "control.jsonl"
    reader = ControlFile(path)
    path.write_bytes(data)
    path.chmod(0o600)
    for line in reader.new_lines():
        with contextlib.suppress(ConfigError, InputError):
            with_settings(load_config(None), parse_command(line).get("set", {}))


def _quiet(*_: Any) -> None:
    """Ignore a warning."""


TARGETS: dict[str, Callable[[bytes], None]] = {
    "csv": csv_tables,
    "zstd": zstd_table,
    "parquet": parquet_table,
    "csv2tb": conversion,
    "state": state,
    "run": run_files,
    "report": report_page,
    "dump": dumps,
    "replay": replays,
    "npy": numpy_file,
    "pt": torch_file,
    "config": configurations,
    "msprobe": msprobe_files,
    "control": commands,
}


MUTATED = {
    **dict.fromkeys(("csv", "csv2tb"), "csv"),
    **dict.fromkeys(("run", "report", "dump", "replay", "state", "config", "msprobe", "control"), "json"),
}
"""The kind of mutator for each reader whose inputs are JSON or CSV."""


def seeds_of(name: str) -> Iterator[bytes]:
    """Yield the small valid files that a reader begins with."""
    if name == "csv":
        yield from (LINES, SCALARS)
    elif name == "zstd":
        import zstandard

        yield zstandard.ZstdCompressor().compress(LINES)
    elif name == "parquet":
        yield _parquet()
    elif name == "csv2tb":
        yield from (MSPROBE, MODULES)
    elif name in {"run", "report"}:
        yield from _run_seeds()
    elif name in {"dump", "replay"}:
        yield from _dump_seeds()
    elif name == "state":
        yield b'{"version": 4, "choice": {"first": 0}, "files": {"a": [9, 2, 1]}, "last_step": 1, "events": {"e": 9}}'
    elif name in {"npy", "pt"}:
        yield from _array_seeds(name)
    elif name == "msprobe":
        yield b'{"targets": {"0:fc": {"input": "tuple[2]:0"}}, "xy_distribution": true, "ops": ["norm"]}'
        yield b'{"monitors": {"module": {"targets": ["fc"]}}, "rank": [0], "step_interval": 2}'
        yield b'{"0:fc/rank0/actv_step_1_call_2": {"rank": 0, "step": 1, "tag_name": "0:fc/rank0/actv", "call_id": 2}}'
    elif name == "control":
        yield b'{"set": {"collect.activations.every": 1, "export.csv": false}, "for": 9}\n{"stop": "x"}\n'
    elif name == "config":
        yield b'{"output_dir": "out", "ranks": [0, "4-7"], "collect": {"gradients": {"every": 2}}, "detect": true}'
        yield b"output_dir: &a out\nexport: {csv: {steps_per_file: 10}}\non_incident: {dump: {max_bytes: 1GiB}}\n"
        yield b'task = "tensor"\nstep = ["0-4"]\nlevel = "L1"\n[tensor]\nscope = []\nlist = ["relu"]\n'


def _run_seeds() -> Iterator[bytes]:
    seen = {"step": 3, "rank": 0, "name": "fc.weight", "quantity": "gradient", "statistic": "norm", "kind": "spike"}
    anomaly = {**seen, "micro_step": 0, "order": 1, "value": 5.0, "expected": 1.0, "score": 9.0, "detector": "soft"}
    suspect = {**seen, "score": 9.0, "module": "fc", "evidence": "too large"}
    incident = {
        **seen,
        "id": 1,
        "severity": "critical",
        "summary": "a jump",
        "suspects": [suspect],
        "actions": ["stop"],
    }
    status = {"state": "running", "step": 3, "updated": 1.0, "cost": {"share": 0.1, "recent_share": 0.1}, "gaps": [{}]}
    graph = {"parameters": {"fc.weight": "fc"}, "process_groups": [{"name": "0", "ranks": [0, 1]}], "starts": []}
    run = {"configuration": {"a": [1]}, "start_time": 1.0, "starts": [{"restart": 0, "start_step": 0}], "hosts": ["h"]}
    for value in (anomaly, {**incident, "first_seen": 3, "last_seen": 4}, status, graph, run):
        yield json.dumps(value).encode() + b"\n"


def _dump_seeds() -> Iterator[bytes]:
    facts = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [2], "Max": float("inf"), "Min": 0.0}
    facts |= {"Mean": 1.0, "Norm": 2.0, "data_name": "a.pt"}
    entry = {"input_args": [{"type": "float", "value": 2.0}, 3], "input_kwargs": {"b": facts}, "output": [facts]}
    data = {"Torch.relu.0.forward": entry, "Torch.full.1.forward": {"input_args": [2, 1e300], "output": [facts]}}
    yield json.dumps({"task": "tensor", "level": "L1", "framework": "pytorch", "data": data}, indent=1).encode()
    yield json.dumps({"0": [["Torch.relu.0.forward"], ["File a.py"]], "Torch.relu.0.forward": None}).encode()


def _parquet() -> bytes:
    from trainsentry.exporters.csv.finished_blocks import compact

    path = _fresh("made") / "gradient_0-9.csv"
    path.write_bytes(LINES)
    return compact(path, "parquet").read_bytes()


def _array_seeds(name: str) -> Iterator[bytes]:
    held = io.BytesIO()
    if name == "npy":
        import numpy as np

        np.save(held, np.arange(6.0).reshape(2, 3))
        yield held.getvalue()
        return
    import torch

    torch.save(torch.ones(2), held, _use_new_zipfile_serialization=False)
    yield held.getvalue()
    held = io.BytesIO()
    torch.save(torch.ones(2), held)
    yield held.getvalue()


def main() -> None:
    """Fuzz the named reader."""
    import atheris

    name = sys.argv[1]
    with atheris.instrument_imports(include=["trainsentry", "json", "yaml"]):
        import trainsentry.exporters.convert.csv2tb
        import trainsentry.exporters.report.page
        import trainsentry.monitor.cli.app
        import trainsentry.monitor.debugger.debugger_config

        if name in {"pt", "replay"}:  # importing torch takes seconds, which would count against an input
            import trainsentry.collectors.torch.calls.replay_call  # noqa: F401
    from trainsentry.exporters.files.foreign_files import InputError

    target = TARGETS[name]

    def once(data: bytes) -> None:
        with contextlib.suppress(InputError):
            target(data)

    kind = {"csv": csv_mutator, "json": json_mutator}.get(MUTATED.get(name, ""))
    own = {"custom_mutator": kind(lambda data, most: bytes(atheris.Mutate(data, most)))} if kind is not None else {}
    atheris.Setup([sys.argv[0], *sys.argv[2:]], once, **own)
    try:
        atheris.Fuzz()
    finally:
        shutil.rmtree(ROOT, ignore_errors=True)


if __name__ == "__main__":
    main()
