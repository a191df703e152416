"""Recognises configurations of msprobe's monitors by their keys."""

from collections.abc import Mapping
from typing import Any, Final

FIRST: Final = "V1"
SECOND: Final = "V2"

FIRST_KEYS: Final = frozenset(
    {
        "targets",
        "all_xy",
        "xy_distribution",
        "forward_only",
        "backward_only",
        "wg_distribution",
        "mv_distribution",
        "param_distribution",
        "ur_distribution",
        "mg_direction",
        "monitor_mbs_grad",
        "cc_distribution",
        "print_struct",
        "stack_info",
        "recording_l2_features",
        "l2_targets",
        "sa_order",
        "module_ranks",
        "step_interval",
        "collect_times",
        "dynamic_on",
        "ops",
        "ndigits",
        "format",
        "step_count_per_record",
        "append_output",
        "squash_name",
        "alert",
    }
)
"""Keys of a first-generation configuration that are none of ours."""

SECOND_KEYS: Final = frozenset(
    {
        "framework",
        "format",
        "async_write",
        "rank",
        "step_interval",
        "step_count_per_record",
        "collect_times",
        "patch_optimizer_step",
        "monitors",
    }
)
"""Keys of a second-generation configuration that are none of ours."""


def msprobe_generation(data: Any) -> str | None:
    """Return the generation of msprobe's monitor that a configuration is for; None for any other.

    >>> msprobe_generation({"targets": {}, "wg_distribution": True}), msprobe_generation({"monitors": {}})
    ('V1', 'V2')
    >>> msprobe_generation({"output_dir": "here", "collect": {}}) is None
    True
    """
    if not isinstance(data, Mapping) or {"collect", "export", "detect"} & data.keys():
        return None
    if isinstance(data.get("monitors"), Mapping):
        return SECOND
    return FIRST if FIRST_KEYS & data.keys() else None


def msprobe_advice(data: Mapping[str, Any], where: str) -> str | None:
    """Return the error for a configuration of msprobe's that was given to `TrainMonitor`; None for any other."""
    generation = msprobe_generation(data)
    if generation is None:
        return None
    keys = sorted((FIRST_KEYS if generation == FIRST else SECOND_KEYS) & data.keys())
    shown = ", ".join(keys[:4]) + ", …" * (len(keys) > 4)
    door = "give it to trainsentry.TrainerMon as it is, or " if generation == FIRST else ""
    return (
        f"{where}: this is a configuration of msprobe's monitor, {generation} ({shown}); {door}convert it with "
        "`trainsentry config convert FILE`"
    )
