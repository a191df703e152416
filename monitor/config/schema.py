"""The configuration: every key, its default, its unit, and what is allowed."""

import re
import sys
from functools import cache
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, create_model, model_validator
from typing_extensions import Self

from trainsentry.collectors.settings import PARTS, CollectSettings
from trainsentry.collectors.statistics import STATISTICS
from trainsentry.exporters.registry import EXPORTERS, table
from trainsentry.monitor.config.blocks import Block, Every, Size, Targets, all_of, as_list, as_text, optional
from trainsentry.monitor.config.export import Export, export_model


def _known_statistics(names: list[str]) -> list[str]:
    unknown = [name for name in names if name not in STATISTICS]
    if unknown or not names:
        raise ValueError(f"{unknown[0] if unknown else 'an empty list'!r}; allowed: some of {', '.join(STATISTICS)}")
    return list(dict.fromkeys(names))


def _known_ranks(ranks: "str | list[int | str]") -> "str | list[int | str]":
    allowed = 'allowed: "all", or a list of ranks and ranges such as [0, "4-7"]'
    if not ranks:
        raise ValueError(f"an empty list; {allowed}")
    for item in [] if isinstance(ranks, str) else ranks:
        match = re.fullmatch(r"(\d{1,9})-(\d{1,9})", item, re.ASCII) if isinstance(item, str) else None
        if isinstance(item, str) and (match is None or int(match[1]) > int(match[2])):
            raise ValueError(f"{item!r}; {allowed}")
        if isinstance(item, int) and item < 0:
            raise ValueError(f"{item!r}; allowed: ranks from 0 on")
    return ranks


class Collected(Block):
    """When a part is sampled, and of which modules and parameters."""

    every: Every = 10
    targets: Targets = ["*"]


class Gradients(Collected):
    """Gradients as the optimizer gets them, unscaled."""

    every: Every = 1
    before_reduction: bool = Field(default=False, description="Also the rank's own gradient before reduction.")
    per_micro_step: bool = Field(default=False, description="Also the running sum after each micro-step.")


class Activations(Collected):
    """Inputs and outputs of modules, and the gradients at them."""

    forward: bool = True
    backward: bool = True
    inside_graphs: bool = Field(
        default=False,
        description="Also inside compiled graphs whose backend fuses, such as inductor's; there it may change the last "
        "bits of results. Graphs of other backends, and what goes into and comes out of any graph, are always read.",
    )


class Communication(Block):
    """Collectives and point-to-point operations; a run of one process has none."""

    every: Every = 10
    reducer: bool = Field(
        default=False, description="Also what DistributedDataParallel's reducer calls in C++ (experimental)."
    )
    call_sites: Annotated[
        list[str],
        BeforeValidator(as_list, json_schema_input_type=list[str]),
        Field(min_length=1, description="Shell-style patterns over <file>:<function> of who calls."),
    ] = ["*"]


class Collect(Block):
    """What is collected; a part set to `false` is not."""

    gradients: Annotated[Gradients | None, optional(Gradients)] = Gradients()
    parameters: Annotated[Collected | None, optional(Collected)] = Collected()
    optimizer_state: Annotated[Collected | None, optional(Collected)] = Collected()
    updates: Annotated[Collected | None, optional(Collected)] = Collected()
    activations: Annotated[Activations | None, optional(Activations)] = Activations()
    communication: Annotated[Communication | None, optional(Communication)] = Communication()


FALSE_ALARMS: Final = 0.05
"""False alarms in a thousand steps unless another rate is given: one in 20,000, a week of steps of half a minute."""


class Detect(Block):
    """Detection of anomalies; how many false alarms the whole run may give, whatever its series and ranks.

    Of the two rates one is given. `detectors`: functions of your own, as `module:function`.
    """

    false_alarms_per_1000_steps: Annotated[float | None, Field(gt=0, le=100)] = None
    false_alarms_per_day: Annotated[float | None, Field(gt=0, le=10000)] = None
    detectors: list[Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]] = []

    @model_validator(mode="after")
    def _one_rate(self) -> Self:
        if self.false_alarms_per_day is not None and self.false_alarms_per_1000_steps is not None:
            raise ValueError(
                "false_alarms_per_day and false_alarms_per_1000_steps are both given; allowed: one of them"
            )
        return self

    def settings(self, ranks: int) -> dict[str, Any]:
        """Return what one rank's detectors may do, as plain data: each rank has its share of the false alarms."""
        a_thousand, a_day = self.false_alarms_per_1000_steps, self.false_alarms_per_day
        if a_thousand is None and a_day is None:
            a_thousand = FALSE_ALARMS
        return {
            "per_step": None if a_thousand is None else a_thousand / 1000 / ranks,
            "per_day": None if a_day is None else a_day / ranks,
            "detectors": self.detectors,
            "folders": [folder for folder in sys.path if folder] if self.detectors else [],
        }


def _not_zero(n: int) -> int:
    if n == 0:
        raise ValueError("allowed: -1 (count only), or a number of steps from 1 on")
    return n


class OverflowCheck(Block):
    """Counts steps with an overflow; training stops at the `overflow_nums`-th, and never with -1."""

    overflow_nums: Annotated[int, Field(ge=-1), AfterValidator(_not_zero)] = -1


class Dump(Block):
    """The targeted dump. `steps`: how many steps it holds; `cooldown_steps`: least distance between two dumps.

    With `replay` the last forward pass is run again, twice, and dumped, to tell data from device.
    """

    steps: Annotated[int, Field(ge=1)] = 1
    max_bytes: Size = 2**30
    cooldown_steps: Annotated[int, Field(ge=0)] = 100
    same_step: bool | Literal["auto"] = "auto"
    replay: bool = False


class OnIncident(Block):
    """What an incident sets off. `sample_every_step_for`: steps of dense sampling; 0 for none."""

    dump: Annotated[Dump | None, optional(Dump)] = Dump()
    overflow_check: bool = True
    sample_every_step_for: Annotated[int, Field(ge=0)] = 20
    stop: bool = False


class HangCheck(Block):
    """Says, with several ranks, which one the others wait for when no step has ended for `seconds`.

    With `abort` the process ends then, so that a launcher can start anew.
    """

    seconds: Annotated[float, Field(gt=0)] = 600.0
    abort: bool = False


class MonitorConfig(Block):
    """The whole configuration. Sizes are bytes or texts such as "1GiB"."""

    output_dir: Annotated[str, BeforeValidator(as_text, json_schema_input_type=str), Field(min_length=1)] = (
        "monitor_output"
    )
    ranks: Annotated[Literal["all"] | list[int | str], AfterValidator(_known_ranks)] = "all"
    start_step: Annotated[int, Field(ge=0)] = 0
    stop_step: Annotated[int, Field(ge=1)] | None = None
    statistics: Annotated[
        list[str], BeforeValidator(as_list, json_schema_input_type=list[str]), AfterValidator(_known_statistics)
    ] = list(STATISTICS)
    eps: Annotated[float, Field(ge=0)] = 0.0
    collect: Annotated[Collect, all_of(Collect)] = Collect()
    export: Annotated[Export, all_of(Export)] = Export()
    detect: Annotated[Detect | None, optional(Detect)] = Detect()
    overflow_check: Annotated[OverflowCheck | None, optional(OverflowCheck)] = OverflowCheck()
    on_incident: Annotated[OnIncident | None, optional(OnIncident)] = OnIncident()
    hang_check: Annotated[HangCheck | None, optional(HangCheck)] = HangCheck()
    ring_size: Annotated[Size, Field(ge=2**20)] = 16 * 2**20
    disk_quota: Size = 20 * 2**30
    overhead_budget: Annotated[
        float | None,
        Field(gt=0, le=1, description="Added time as a share of the training's own; sampling thins out to keep to it."),
    ] = None
    strict: bool = False

    @model_validator(mode="after")
    def _stops_after_it_starts(self) -> Self:
        if self.stop_step is not None and self.stop_step <= self.start_step:
            raise ValueError(
                f"stop_step: {self.stop_step}; allowed: null, or a step after start_step ({self.start_step})"
            )
        return self

    def collect_settings(self) -> CollectSettings:
        """Return what the collectors need to know."""
        blocks = {part: getattr(self.collect, part) for part in PARTS}
        gradients, activations = blocks["gradients"], blocks["activations"]
        return CollectSettings(
            targets={part: list(block.targets) for part, block in blocks.items() if block is not None},
            forward=activations is not None and activations.forward,
            backward=activations is not None and activations.backward,
            inside_graphs=activations is not None and activations.inside_graphs,
            before_reduction=gradients is not None and gradients.before_reduction,
            per_micro_step=gradients is not None and gradients.per_micro_step,
            eps=self.eps,
            reducer=self.collect.communication is not None and self.collect.communication.reducer,
            call_sites=tuple(self.collect.communication.call_sites if self.collect.communication else ()),
        )

    def watched_ranks(self, world_size: int) -> list[int]:
        """Return the ranks that are watched.

        Raises:
            ValueError: when `ranks` names a rank that does not exist.

        """
        if self.ranks == "all":
            return list(range(world_size))
        wanted: set[int] = set()
        for item in self.ranks:
            first, _, last = str(item).partition("-")
            wanted |= set(range(int(first), int(last or first) + 1))
        beyond = [r for r in wanted if r >= world_size]
        if beyond:
            raise ValueError(f"ranks: {min(beyond)} does not exist; allowed: 0 to {world_size - 1}")
        return sorted(wanted)


def config_model() -> type[MonitorConfig]:
    """Return the configuration's class: `MonitorConfig`, with a block for each exporter that is registered by now."""
    names = table()
    return MonitorConfig if names == EXPORTERS else _with_exporters(tuple(names.items()))


@cache
def _with_exporters(names: tuple[tuple[str, str], ...]) -> type[MonitorConfig]:
    export: Any = export_model(dict(names))
    return create_model(
        MonitorConfig.__name__,
        __base__=MonitorConfig,
        __doc__=MonitorConfig.__doc__,
        __module__=__name__,
        export=(Annotated[export, all_of(export)], export()),
    )
