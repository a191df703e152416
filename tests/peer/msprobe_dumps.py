"""Dumps with msprobe, in the environment of the peers: `python msprobe_dumps.py FOLDER MODEL TASK LEVEL`."""

import json
import sys
import types
from pathlib import Path


def main(folder, kind, task, level):
    """Train a model of the tests for a step under msprobe's debugger."""
    sys.modules["trainsentry"] = types.SimpleNamespace(PrecisionDebugger=None)  # the models alone are wanted
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))
    import debugged
    from msprobe.pytorch import PrecisionDebugger

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    chosen = {"scope": [], "list": [], "data_mode": ["all"]}
    config = {"task": task, "dump_path": str(folder / "dump"), "rank": [], "step": [], "level": level, task: chosen}
    (folder / "config.json").write_text(json.dumps(config))
    debugged.train(debugged.make(getattr(debugged, kind)), 1, PrecisionDebugger(str(folder / "config.json")))


if __name__ == "__main__":
    main(*sys.argv[1:])
