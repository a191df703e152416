"""Level L2: MindSpore itself dumps the kernels of compiled graphs, by a dump configuration written here.

MindSpore reads the configuration when it compiles the first graph; from then on it is fixed for the process.
"""

import json
import logging
import os
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from trainsentry.collectors.mindspore.runtime import on_host

logger = logging.getLogger("trainsentry")

VARIABLE: Final = "MINDSPORE_DUMP_CONFIG"
FILE: Final = "mindspore_dump_config.json"
DEVICES: Final = 8
"""Devices of a node; all of them dump unless ranks are chosen."""

_SAVED: Final = {"statistics": "statistic", "tensor": "tensor", "overflow_check": "tensor"}
_SIDES: Final = {frozenset({"input", "output"}): 0, frozenset({"input"}): 1, frozenset({"output"}): 2}
_OVERFLOWS: Final = {"aicore": 1, "atomic": 2, "all": 3}
"""Values of `op_debug_mode` that save overflows only; MindSpore 2.10 itself turns 1 and 2 into 3, and says so."""


class KernelDump:
    """Writes MindSpore's dump configuration when created; nothing is left to do at a call or a step."""

    def __init__(self, config: Any) -> None:
        self.writer: Any = None
        self.guard: Any = None
        self.running = False
        self.iteration = 0
        self.calls = 0
        self.first: str | None = None
        path = Path(config.dump_path).absolute() / FILE
        _check(config, path)
        path.write_text(json.dumps(configuration(config), indent=1), encoding="utf-8")
        os.environ[VARIABLE] = str(path)
        logger.info("trainsentry: MindSpore dumps kernels as %s says, from the first graph on that is compiled", path)

    def start(self, _: Any, *, window: bool = False) -> None:
        """Do nothing: no call is watched."""

    def stop(self) -> None:
        """Do nothing: no call was watched."""

    def reset(self) -> None:
        """Do nothing: MindSpore counts the steps."""

    def take_counts(self) -> tuple[int, str | None, bool]:
        """Return no counts: no call is watched."""
        return 0, None, False


def configuration(config: Any) -> dict[str, Any]:
    """Return MindSpore's dump configuration that corresponds to the debugger's.

    Keys and values are those of MindSpore 2.10: `iteration` counts from 0 and joins steps and ranges by "|";
    `dump_mode` 1 dumps only `kernels`.
    """
    chosen = config.chosen
    sides = config.selection(lambda _: "CORE").sides
    checks = config.task == "overflow_check"
    extra: dict[str, Any] = {} if chosen.file_format == "npy" else {"file_format": chosen.file_format}
    if checks and config.overflow_check.overflow_nums > 0:
        extra["overflow_number"] = config.overflow_check.overflow_nums
    return {
        "common_dump_settings": {
            "op_debug_mode": _OVERFLOWS[config.overflow_check.check_mode] if checks else 0,
            "dump_mode": int(bool(chosen.calls)),
            "path": str(Path(config.dump_path).absolute()),
            "net_name": "Net",
            "iteration": iterations(config.step),
            "saved_data": _SAVED[config.task],
            "input_output": _SIDES[sides],
            "kernels": list(chosen.calls),
            "support_device": list(config.rank) or list(range(DEVICES)),
            **extra,
        },
        "e2e_dump_settings": {"enable": True, "trans_flag": True},
    }


def iterations(steps: Sequence[int]) -> str:
    """Return steps in MindSpore's notation.

    >>> iterations([]), iterations([0, 2, 3, 4, 9])
    ('all', '0|2-4|9')
    """
    if not steps:
        return "all"
    runs = [[n for _, n in run] for _, run in groupby(enumerate(steps), lambda item: item[1] - item[0])]
    return "|".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _check(config: Any, path: Path) -> None:
    """Check for settings that MindSpore would refuse only at the first graph.

    Raises:
        ValueError: for a setting that level L2 does not support.

    """
    if config.task not in _SAVED:
        raise ValueError(f"task: {config.task!r} at level L2; allowed: {', '.join(_SAVED)}")
    if config.chosen.scope:
        raise ValueError(f"scope: {config.chosen.scope} at level L2; allowed: list, with names of kernels")
    if on_host() and config.task != "tensor":
        raise ValueError(
            f"task: {config.task!r} at level L2 on the CPU; allowed: tensor, as MindSpore saves nothing else there"
        )
    if on_host() and config.chosen.file_format == "bin":
        raise ValueError("file_format: 'bin' at level L2 on the CPU; allowed: npy, as bin is a device's own format")
    if config.chosen.backward_input or config.acl_config is not None:
        given = {"acl_config": config.acl_config, "backward_input": config.chosen.backward_input}
        key, value = next((key, value) for key, value in given.items() if value)
        raise ValueError(f"{key}: {value!r} at level L2 with MindSpore; allowed: with PyTorch")
    other = os.environ.get(VARIABLE)
    if other and Path(other) != path:
        raise ValueError(f"{VARIABLE}: is set to {other!r} already; allowed: not set, as level L2 sets it")
