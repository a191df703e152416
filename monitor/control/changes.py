"""Changes of a configuration while a run goes on: which keys may change, and what a change gives."""

import json
from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Final

from trainsentry.monitor.config.files import parse_config
from trainsentry.monitor.config.schema import MonitorConfig
from trainsentry.monitor.errors import ConfigError

CHANGEABLE: Final = (
    "start_step",
    "stop_step",
    "collect",
    "export",
    "detect.false_alarms_per_1000_steps",
    "detect.false_alarms_per_day",
    "on_incident.stop",
    "on_incident.sample_every_step_for",
)
"""Keys that may change, with those below them."""

FIXED: Final = (
    "collect.activations.inside_graphs",
    "collect.communication.reducer",
    "collect.communication.call_sites",
    "export.max_wait",
)
"""Keys below them that take effect at the next start."""


def may_change(key: str) -> bool:
    """Whether a key may change in a running job.

    >>> may_change("collect.activations.every"), may_change("output_dir"), may_change("export.max_wait")
    (True, False, False)
    """
    return key not in FIXED and any(key == known or key.startswith(f"{known}.") for known in CHANGEABLE)


def parse_settings(texts: "list[str]") -> dict[str, Any]:
    """Return the keys and values in texts such as `collect.activations.every=1`; a value is JSON, or else a text.

    Raises:
        ConfigError: for a text without `=`, or a key that may not change.

    """
    found: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not may_change(key):
            allowed = ", ".join(CHANGEABLE)
            raise ConfigError(f"{text}: allowed: KEY=VALUE with a key that may change while a run goes on: {allowed}")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found


def with_settings(config: MonitorConfig, values: Mapping[str, Any]) -> MonitorConfig:
    """Return a configuration with other values under dotted keys; a part that is off is switched on by its keys.

    Raises:
        ConfigError: for a key that may not change, or a value that is not allowed.

    """
    data = config.model_dump(mode="json")
    for key, value in values.items():
        if not may_change(key):
            raise ConfigError(f"{key}: cannot change while the run goes on; allowed: {', '.join(CHANGEABLE)}")
        *path, last = key.split(".")
        place = data
        for name in path:
            if not isinstance(place.get(name), dict):
                place[name] = {}
            place = place[name]
        place[last] = deepcopy(value)
    return parse_config(data, "change")


def adopted(old: MonitorConfig, new: MonitorConfig) -> tuple[MonitorConfig, list[str]]:
    """Return `old` with everything of `new` that may change, and the keys that differ and may not.

    Raises:
        ConfigError: when the result is not allowed.

    """
    before, after = _leaves(old.model_dump(mode="json")), _leaves(new.model_dump(mode="json"))
    different = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    refused = sorted(key for key in different if not may_change(key))
    data, wanted = old.model_dump(mode="json"), new.model_dump(mode="json")
    for name in ("start_step", "stop_step", "collect", "export"):
        data[name] = deepcopy(wanted[name])
    for block in ("detect", "on_incident"):
        if isinstance(data[block], dict) and isinstance(wanted[block], dict):
            keys = [known.partition(".")[2] for known in CHANGEABLE if known.startswith(f"{block}.")]
            data[block].update({key: wanted[block][key] for key in keys})
    for key in FIXED:
        _keep(data, before, key)
    return parse_config(data, "change"), refused


def described(old: MonitorConfig, new: MonitorConfig) -> dict[str, Any]:
    """Return the keys that differ with their new values, `{"collect.activations.every": 1}`."""
    before, after = _leaves(old.model_dump(mode="json")), _leaves(new.model_dump(mode="json"))
    return {key: value for key, value in after.items() if key not in before or before[key] != value}


def _leaves(value: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {path: value}
    found: dict[str, Any] = {}
    for key, inner in value.items():
        found.update(_leaves(inner, f"{path}.{key}" if path else str(key)))
    return found


def _keep(data: dict[str, Any], before: Mapping[str, Any], key: str) -> None:
    *path, last = key.split(".")
    place: Any = data
    for name in path:
        place = place.get(name) if isinstance(place, dict) else None
    if isinstance(place, dict) and key in before:
        place[last] = before[key]
