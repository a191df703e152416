"""The keys of a first-generation `monitor_config.json`, with their types and defaults."""

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from trainsentry.exporters.msprobe.rows import OPS
from trainsentry.monitor.config.files import explain
from trainsentry.monitor.errors import ConfigError

NEVER: Final = 100_000_000
"""msprobe's default of `collect_times`: no end."""


class _Keys(BaseModel):
    """A block of msprobe's keys. Unknown keys are taken out before, as msprobe ignores them."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())


class CommunicationKeys(_Keys):
    """`cc_distribution`."""

    enable: bool = False
    cc_codeline: list[str] = []
    cc_pre_hook: bool = False
    cc_log_only: bool = False


class AlertRule(_Keys):
    """A rule of `alert`."""

    rule_name: Literal["AnomalyTurbulence", "AnomalyNan"]
    args: dict[str, float | int | None] = {}


class Alert(_Keys):
    """`alert`."""

    rules: list[AlertRule] = []
    dump: bool = False


def _whole(value: Any) -> Any:
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


class FirstConfig(_Keys):
    """The configuration of msprobe's first-generation monitor."""

    targets: dict[str, Any] = {}
    all_xy: bool = False
    xy_distribution: bool = False
    forward_only: bool = False
    backward_only: bool = False
    wg_distribution: bool = False
    mv_distribution: bool = False
    param_distribution: bool = False
    ur_distribution: bool = False
    mg_direction: bool = False
    monitor_mbs_grad: bool = False
    cc_distribution: CommunicationKeys = CommunicationKeys()
    print_struct: bool = False
    stack_info: bool = False
    recording_l2_features: bool = False
    l2_targets: dict[str, list[str]] = {}
    sa_order: str = "s,b,h,d"
    module_ranks: list[Annotated[int, Field(ge=0)]] = []
    start_step: Annotated[int, Field(ge=0)] = 0
    step_interval: Annotated[int, Field(ge=1)] = 1
    collect_times: Annotated[int, Field(ge=0)] = NEVER
    dynamic_on: bool = False
    ops: list[Literal[OPS]] = []  # type: ignore[valid-type] # the names stand in one place
    eps: Annotated[float, BeforeValidator(_whole), Field(ge=0)] = 1e-8
    ndigits: Annotated[int, Field(ge=0, le=20)] = 6
    format: Literal["csv", "tensorboard", "api"] = "csv"
    step_count_per_record: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    append_output: Annotated[list[str], Field(max_length=2)] = []
    squash_name: bool = False
    alert: Alert = Alert()


def read_first(data: Mapping[str, Any], where: str) -> tuple[FirstConfig, list[str]]:
    """Return a configuration, and a sentence for each unknown key, which msprobe ignores too.

    Raises:
        ConfigError: for a value that msprobe does not allow; it names every mistake.

    """
    unknown = [key for key in data if key not in FirstConfig.model_fields]
    sentences = []
    for key in unknown:
        close = difflib.get_close_matches(str(key), FirstConfig.model_fields, n=1, cutoff=0.7)
        meant = f"; did you mean {close[0]!r}?" if close else ""
        sentences.append(f"{key}: not a key of msprobe's monitor, which ignores it{meant}")
    try:
        config = FirstConfig.model_validate({key: value for key, value in data.items() if key not in unknown})
    except ValidationError as error:
        lines = [explain(dict(e), FirstConfig) for e in error.errors()]
        raise ConfigError(f"{where}: " + "\n  ".join(dict.fromkeys(lines))) from None
    return config, sentences
