"""Translates the configuration of msprobe's second-generation monitor."""

from collections.abc import Mapping
from typing import Any, Final

from trainsentry.monitor.errors import ConfigError
from trainsentry.monitor.msprobe.first_keys import NEVER

KEYS: Final = frozenset(
    {
        "framework",
        "output_dir",
        "format",
        "async_write",
        "rank",
        "start_step",
        "stop_step",
        "step_interval",
        "step_count_per_record",
        "collect_times",
        "patch_optimizer_step",
        "monitors",
    }
)
MONITORS: Final = ("module", "weight_grad", "optimizer", "param", "cc")


def read_second(data: Mapping[str, Any], where: str) -> tuple[dict[str, Any], list[str]]:
    """Return our configuration for a second-generation one, and a sentence for each thing that differs.

    Raises:
        ConfigError: for a value that msprobe does not allow.

    """
    differences = [f"{key}: not a key of msprobe's monitor V2, which ignores it" for key in data if key not in KEYS]
    monitors = _monitors(data, where)
    differences += [f"monitors.{name}: unknown" for name in data["monitors"] if name not in MONITORS]
    every = _whole(data, "step_interval", 1, where, least=1)
    start = _whole(data, "start_step", 0, where)
    config: dict[str, Any] = {
        "output_dir": data.get("output_dir", "./"),
        "start_step": start,
        "collect": _collect(monitors, every),
        "export": {"csv": {"steps_per_file": max(_whole(data, "step_count_per_record", 1, where, least=1), 1000)}},
    }
    times = _whole(data, "collect_times", NEVER, where)
    begin = -(-start // every) * every
    ends = [begin + (times - 1) * every + 1] if 0 < times < NEVER else []
    if data.get("stop_step") is not None:
        ends.append(_whole(data, "stop_step", 0, where, least=1))
    if ends:
        config["stop_step"] = min(ends)
    rank = data.get("rank")
    if rank not in (None, []):
        config["ranks"] = list(rank) if isinstance(rank, list) else [rank]
    differences += [
        "files: our tables (`<quantity>_<first>-<last>.csv` in rank<r>/) replace rank_<r>/<monitor>_step….csv",
        "ops: detection needs every statistic, so all are recorded; `statistics` chooses the columns",
    ]
    if start % every:
        differences.append(f"step_interval: the multiples of {every} are sampled, from step {start} on")
    if monitors["module"].get("targets"):
        differences.append("module.targets: the substrings became shell-style patterns")
    return config, differences


def _monitors(data: Mapping[str, Any], where: str) -> dict[str, dict[str, Any]]:
    """Return each monitor's block, {} for one that is off."""
    found: dict[str, dict[str, Any]] = {}
    for name in MONITORS:
        block = data["monitors"].get(name, {"enabled": name == "module"})
        if not isinstance(block, Mapping):
            raise ConfigError(f"{where}: monitors.{name}: got {block!r}, allowed: an object")
        found[name] = {"enabled": True, **block} if block.get("enabled", True) else {}
    return found


def _collect(monitors: Mapping[str, Mapping[str, Any]], every: int) -> dict[str, Any]:
    module, grad, state = monitors["module"], monitors["weight_grad"], monitors["optimizer"]
    param, communication = monitors["param"], monitors["cc"]
    collect: dict[str, Any] = {"updates": False}
    targets = [f"*{name}*" for name in module.get("targets", [])] or ["*"]
    collect["activations"] = {"every": every, "targets": targets} if module else False
    collect["gradients"] = {"every": every, "before_reduction": True} if grad else False
    collect["optimizer_state"] = {"every": every} if state and state.get("mv_distribution", True) else False
    on = param and param.get("param_distribution", True)
    collect["parameters"] = {"every": every, "after_update": True} if on else False
    collect["communication"] = {"every": every} if communication else False
    return collect


def _whole(data: Mapping[str, Any], key: str, default: int, where: str, least: int = 0) -> int:
    value = data.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{where}: {key}: got {value!r}, allowed: a whole number from {least} on")
    return value
