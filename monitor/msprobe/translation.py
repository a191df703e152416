"""Translates configurations of msprobe's monitors into ours, and says what changes."""

import glob
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from trainsentry.collectors.alignment import ALIGNMENT
from trainsentry.collectors.statistics import STATISTICS
from trainsentry.exporters.msprobe.rows import TEXTS, squashed
from trainsentry.monitor.config.msprobe_keys import SECOND, msprobe_generation
from trainsentry.monitor.errors import ConfigError
from trainsentry.monitor.msprobe.first_keys import NEVER, FirstConfig, read_first
from trainsentry.monitor.msprobe.second_keys import read_second

_ELEMENT: Final = re.compile(r"(?:tuple|list)\[\d+\]:(\d+)")
_LINE: Final = re.compile(r"(.*?)\[(\d+)\]")


@dataclass(frozen=True)
class Translation:
    """Our configuration as plain data, and a sentence for each thing that differs."""

    config: dict[str, Any]
    differences: tuple[str, ...]


def translate(data: Any, where: str, *, files: bool = False) -> Translation:
    """Translate a configuration of either generation; with `files` the first one's own files are written.

    Raises:
        ConfigError: when it is none of msprobe's, or for a value that msprobe does not allow.

    """
    if msprobe_generation(data) == SECOND:
        config, differences = read_second(data, where)
        return Translation(config, tuple(differences))
    if not isinstance(data, Mapping):
        raise ConfigError(f"{where}: got {type(data).__name__}, allowed: an object with msprobe's keys")
    if data and msprobe_generation(data) is None and not set(data) & set(FirstConfig.model_fields):
        raise ConfigError(f"{where}: not a configuration of msprobe's monitor; its keys: {', '.join(data)}")
    first, unknown = read_first(data, where)
    return Translation(translate_first(first, files=files), (*unknown, *_differences(first)))


def translate_first(first: FirstConfig, *, files: bool, framework: str = "pytorch") -> dict[str, Any]:
    """Return our configuration for a first-generation one."""
    every = first.step_interval
    config: dict[str, Any] = {
        "start_step": first.start_step,
        "eps": first.eps,
        "collect": _collect(first, every) if first.collect_times else False,
        "export": _export(first, files=files, framework=framework),
    }
    if 0 < first.collect_times < NEVER:
        begin = -(-first.start_step // every) * every
        config["stop_step"] = begin + (first.collect_times - 1) * every + 1
    if first.mg_direction:
        config["statistics"] = [*STATISTICS, ALIGNMENT]
    if first.module_ranks:
        config["ranks"] = list(first.module_ranks)
    return config


# ---------------------------------------------------------------------- what is collected


def _collect(first: FirstConfig, every: int) -> dict[str, Any]:
    parameters = _parameter_targets(first)
    collect: dict[str, Any] = dict.fromkeys(
        ("gradients", "parameters", "optimizer_state", "updates", "activations", "communication"), False
    )
    if first.wg_distribution:
        collect["gradients"] = {"every": every, "targets": parameters, "before_reduction": True}
    if first.param_distribution:
        collect["parameters"] = {"every": every, "targets": parameters, "after_update": True}
    if first.mv_distribution or first.mg_direction:
        collect["optimizer_state"] = {"every": every, "targets": parameters}
    if first.ur_distribution:
        collect["updates"] = {"every": every, "targets": parameters}
    if first.xy_distribution or first.print_struct:
        collect["activations"] = {
            "every": every,
            "targets": ["*"] if first.print_struct else _module_targets(first),
            "forward": first.print_struct or not first.backward_only,
            "backward": first.print_struct or not first.forward_only,
        }
    communication = first.cc_distribution
    if communication.enable:
        sites = [_call_site(pattern) for pattern in communication.cc_codeline]
        collect["communication"] = {"every": every, "call_sites": sites or ["*"]}
    return collect


def _split(target: str) -> tuple[str, str]:
    """Return the pattern of a target's chunk, and its name."""
    chunk, colon, name = target.partition(":")
    return (chunk, name) if colon and chunk.isdigit() else ("*", target)


def _parameter_targets(first: FirstConfig) -> list[str]:
    """Return patterns of the parameters whose names begin with a target, as msprobe selects them."""
    names = [_split(target)[1] for target in first.targets]
    begin = "*" if first.squash_name else ""
    return [f"{begin}{glob.escape(name)}*" if name else "*" for name in names] or ["*"]


def _module_targets(first: FirstConfig) -> list[str]:
    """Return patterns of the target modules; their sub-modules come along, for the detectors."""
    names = [_split(target)[1] for target in first.targets]
    if first.all_xy or not names or "" in names:
        return ["*"]
    begin = "*" if first.squash_name else ""
    return [f"{begin}{glob.escape(name)}" for name in names]


def _call_site(pattern: str) -> str:
    r"""Return a shell-style pattern for one of msprobe's regular expressions over lines of code.

    >>> _call_site(r"train\.py\[23\]"), _call_site("sync_gradients")
    ('*train.py:23', '*sync_gradients*')
    """
    plain = re.sub(r"\\(.)", r"\1", pattern).replace(".*", "*")
    line = _LINE.fullmatch(plain)
    return f"*{line[1]}:{line[2]}" if line is not None else f"*{plain}*"


# ---------------------------------------------------------------------- what is written


def _export(first: FirstConfig, *, files: bool, framework: str) -> dict[str, Any]:
    if not files:
        tables = {"steps_per_file": max(first.step_count_per_record, 1000)}
        return {"csv": tables, "tensorboard": first.format == "tensorboard"}
    ops = [*(first.ops or ["norm"])]
    written = {
        "format": "csv" if first.format == "api" else first.format,
        "ops": [*ops, *(text for text in TEXTS if text not in ops)],
        "ndigits": first.ndigits,
        "steps_per_file": first.step_count_per_record,
        "squash_name": first.squash_name,
        "activations": _activation_names(first),
        "parameters": _parameter_names(first),
        "micro_step_grads": first.monitor_mbs_grad,
        "communication_inputs": first.cc_distribution.cc_pre_hook,
        "append_output": list(first.append_output),
        "framework": framework,
        **_alerts(first),
    }
    return {"csv": False, "msprobe": written if first.format != "api" else False}


def _activation_names(first: FirstConfig) -> list[str]:
    """Return patterns of the names in msprobe's tables, with the elements that `targets` select."""
    if not first.xy_distribution:
        return ["-"]  # collected for the structure alone
    if first.all_xy or not first.targets:
        return ["*"]
    found: list[str] = []
    for target, selected in first.targets.items():
        chunk, name = _split(target)
        module = glob.escape(squashed(name) if first.squash_name else name)
        sides = selected if isinstance(selected, Mapping) else {}
        for side in ("input", "output"):
            given = [sides[key] for key in (side, f"{side}_grad") if key in sides]
            if sides and not given:
                continue
            found += [f"{chunk}:{module}.{side}{end}" for end in _ends(given)]
    return list(dict.fromkeys(found))


def _ends(selected: list[Any]) -> list[str]:
    """Return the ends of the names of the selected tensors of a call, of all without a selection.

    >>> _ends(["tuple[2]:1"]), _ends(["tensor"])
    (['_1'], [''])
    """
    elements = [_ELEMENT.fullmatch(text) for text in selected if isinstance(text, str)]
    if not selected or any(text in {"", "tuple", "list"} for text in selected):
        return ["", "_*"]
    ends = [f"_{found[1]}" for found in elements if found is not None]
    single = any(found is None or found[1] == "0" for found in elements)
    return [*ends, *([""] if single else [])]


def _parameter_names(first: FirstConfig) -> list[str]:
    found = []
    for target in first.targets:
        chunk, name = _split(target)
        begin = "*" if first.squash_name else ""
        found.append(f"{chunk}:{begin}{glob.escape(squashed(name) if first.squash_name else name)}*")
    return found or ["*"]


def _alerts(first: FirstConfig) -> dict[str, Any]:
    """Return the thresholds of the rules; msprobe's `AnomalyNan` without a threshold finds NaN alone."""
    found: dict[str, Any] = {}
    for rule in first.alert.rules:
        threshold = rule.args.get("threshold")
        if rule.rule_name == "AnomalyTurbulence" and threshold is not None:
            found["turbulence"] = float(threshold)
        elif rule.rule_name == "AnomalyNan":
            found["not_a_number"] = True
            if threshold is not None:
                found["largest"] = float(threshold)
    return found


# ---------------------------------------------------------------------- what differs


def _differences(first: FirstConfig) -> list[str]:
    found = []
    if first.start_step % first.step_interval:
        found.append(
            f"step_interval: the steps that are multiples of {first.step_interval} are sampled, from step "
            f"{first.start_step} on; msprobe counts from start_step"
        )
    if first.stack_info:
        found.append("stack_info: no stack_info.csv is written; a dump (PrecisionDebugger) has stack.json")
    if first.recording_l2_features:
        found.append("recording_l2_features: the interpretability features are not computed")
    if first.ur_distribution:
        found.append(
            "ur_distribution: the norm of each update and its ratio to the weight are recorded, no histogram of Adam's "
            "quotient"
        )
    if first.eps:
        found.append(f"eps: zeros counts |x| <= {first.eps:g}; msprobe counts |x| < {first.eps:g}")
    if first.cc_distribution.cc_log_only:
        found.append("cc_log_only: the operations and their lines are logged after the first step, then training stops")
    if first.append_output and len(first.append_output) != 2:
        found.append("append_output: needs two times; new directories are used")
    if first.alert.rules:
        found.append("alert: the rules' alerts go to anomaly.json; the log shows the incidents of our own detectors")
    return found
