"""The configuration of a monitor: every key with its default, its unit and its meaning."""

import re
import sys
from functools import cache
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, create_model, model_validator
from typing_extensions import Self

from trainsentry.collectors.alignment import ALIGNMENT
from trainsentry.collectors.histogram import HISTOGRAM
from trainsentry.collectors.settings import PARTS, READ_TOGETHER, READ_TOGETHER_BYTES, CollectSettings
from trainsentry.collectors.statistics import STATISTICS
from trainsentry.exporters.registry import EXPORTERS, table
from trainsentry.monitor.config.blocks import Block, Every, Size, Targets, Unit, all_of, as_list, as_text, optional
from trainsentry.monitor.config.export import Export, export_model

BESIDE: Final = (HISTOGRAM, ALIGNMENT)
"""Statistics that are no column of every table."""


def _known_statistics(names: list[str]) -> list[str]:
    unknown = [name for name in names if name not in {*STATISTICS, *BESIDE}]
    if unknown or not {*names} - {*BESIDE}:
        wrong = repr(unknown[0]) if unknown else f"{' and '.join(names)} alone" if names else "an empty list"
        raise ValueError(f"{wrong}; allowed: some of {', '.join(STATISTICS)}, and {' or '.join(BESIDE)} beside them")
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
    """One kind of tensor: at which steps it is sampled, and of which modules and parameters."""

    every: Every = 10
    targets: Targets = ["*"]


class Gradients(Collected):
    """Gradients as the optimizer receives them: reduced, clipped and unscaled."""

    every: Every = 1
    before_reduction: bool = Field(
        default=False, description="Also record each rank's own gradient before reduction (`gradient_unreduced`)."
    )
    per_micro_step: bool = Field(
        default=False, description="Also record the accumulated gradient after each micro-step."
    )


class Parameters(Collected):
    """Weights, read just before the update."""

    buffers: bool = Field(
        default=True, description="Also record the modules' buffers, such as running statistics and masks (`buffer`)."
    )
    after_update: bool = Field(
        default=False, description="Also record them just after the update (`parameter_updated`), in the same step."
    )


class Activations(Collected):
    """Inputs and outputs of modules, and the gradients at them."""

    forward: bool = Field(default=True, description="Record inputs and outputs.")
    backward: bool = Field(default=True, description="Record the gradients at inputs and outputs.")
    inputs: bool = Field(
        default=True,
        description="Record the model's own inputs at every step, so that a batch which comes again and again is seen. "
        "Of an input with more than 65,536 elements, the first samples are read (`input.<i>.part`).",
    )
    recompute: bool = Field(
        default=True,
        description="At each of these steps compute one module's call again, and its gradients, the modules in turn, "
        "and compare to the bit (`recomputed.<module>`, `recomputed_gradient.<module>`): a device that computes "
        "wrongly shows. In a sixteenth of the modules compare inner products of tensors and gradients "
        "(`euler_gap.<module>.…`), with `backward`: a wrong kernel shows.",
    )
    operations: bool = Field(
        default=True,
        description="At each of these steps compare what a torch model's forward pass computes (operations, their "
        "order and constants, from autograd's graph) with the passes before: code that was changed in the run shows "
        "(`operations.<module>: <change>`).",
    )
    inside_graphs: bool = Field(
        default=False,
        description="Also record inside compiled graphs of backends that fuse operations, such as inductor. This may "
        "change the last bits of results. Other backends, and the inputs and outputs of every graph, are always read.",
    )
    read_together: int = Field(
        default=READ_TOGETHER,
        ge=1,
        description="On an accelerator: tensors read in one launch, which costs more than reading a small tensor. They "
        "are kept until then. 1 reads each at once: code needs that which overwrites tensors without telling autograd.",
    )
    read_together_bytes: Size = Field(
        default=READ_TOGETHER_BYTES,
        description="On an accelerator: most memory that tensors keep in use while they wait to be read together.",
    )


class Communication(Block):
    """Collectives and point-to-point operations between ranks. A run of one process has none."""

    every: Every = 10
    reducer: bool = Field(
        default=False,
        description="Also record the collectives that DistributedDataParallel's reducer calls in C++ (experimental).",
    )
    call_sites: Annotated[
        list[str],
        BeforeValidator(as_list, json_schema_input_type=list[str]),
        Field(
            min_length=1,
            description="Shell-style patterns over `<file>:<function>` of the caller, or over `<file>:<line>` of "
            "any line of its call stack.",
        ),
    ] = ["*"]


class Collect(Block):
    """The kinds of tensors that are sampled. A kind set to `false` is not sampled."""

    gradients: Annotated[Gradients | None, optional(Gradients)] = Gradients()
    parameters: Annotated[Parameters | None, optional(Parameters)] = Parameters()
    optimizer_state: Annotated[Collected | None, optional(Collected)] = Field(
        default=Collected(), description="The optimizer's state, such as `exp_avg`, read just before the update."
    )
    updates: Annotated[Collected | None, optional(Collected)] = Field(
        default=Collected(), description="The change of each weight by the update, and its ratio to the weight."
    )
    activations: Annotated[Activations | None, optional(Activations)] = Activations()
    communication: Annotated[Communication | None, optional(Communication)] = Communication()


FALSE_ALARMS: Final = 0.05
"""Default false alarms per 1,000 steps: one in 20,000 steps, or in a week of steps of 30 s."""


class Detect(Block):
    """Detection of anomalies. The rate of false alarms holds for the whole job, whatever its series and ranks.

    Give one of the two rates. Without either, it is 0.05 false alarms per 1,000 steps.
    """

    false_alarms_per_1000_steps: Annotated[
        float | None,
        Field(gt=0, le=100, description="Allowed rate. A smaller number needs larger or longer changes for an alarm."),
        Unit("false alarms per 1,000 steps"),
    ] = None
    false_alarms_per_day: Annotated[
        float | None,
        Field(gt=0, le=10000, description="Allowed rate by the clock."),
        Unit("false alarms per day"),
    ] = None
    detectors: list[Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]] = Field(
        default=[], description="Detectors of your own, as `module:name` of a function or a rule."
    )

    @model_validator(mode="after")
    def _one_rate(self) -> Self:
        if self.false_alarms_per_day is not None and self.false_alarms_per_1000_steps is not None:
            raise ValueError(
                "false_alarms_per_day and false_alarms_per_1000_steps are both given; allowed: one of them"
            )
        return self

    def settings(self, ranks: int) -> dict[str, Any]:
        """Return the settings of one rank's detectors as plain data; each rank has its share of the false alarms."""
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
    """Counts the steps with an overflow. A step that the loss scaler skips is counted apart."""

    overflow_nums: Annotated[
        int,
        Field(ge=-1, description="Stop training at this many steps with an overflow. -1: count, never stop."),
        AfterValidator(_not_zero),
        Unit("steps"),
    ] = -1


class Dump(Block):
    """The tensors of an incident's suspects, written to `dump/step<N>/rank<R>/`."""

    steps: Annotated[int, Field(ge=1, description="Whole steps in one dump."), Unit("steps")] = 1
    max_bytes: Size = Field(default=2**30, description="Largest dump of one incident on one rank.")
    cooldown_steps: Annotated[
        int, Field(ge=0, description="Least distance between the starts of two dumps."), Unit("steps")
    ] = 100
    same_step: bool | Literal["auto"] = Field(
        default="auto",
        description="Judge a step before its update, so that the dump and the stop come at that very step. On an "
        'accelerator this costs one synchronisation per step. "auto": on for CPU, off elsewhere.',
    )
    replay: bool = Field(
        default=False,
        description="Run the last forward pass twice more, dump both, and compare them with the step's own outputs, "
        "which are kept until the update: equal results blame data or numerics, different ones the device.",
    )


class OnIncident(Block):
    """The actions that an incident triggers."""

    dump: Annotated[Dump | None, optional(Dump)] = Dump()
    overflow_check: bool = Field(
        default=True, description="After NaN or Inf, write every overflowing call of the next steps to `overflow/`."
    )
    sample_every_step_for: Annotated[
        int, Field(ge=0, description="Sample everything at this many steps in a row. 0: do not."), Unit("steps")
    ] = 20
    stop: bool = Field(default=False, description="Stop training on all ranks with `TrainingStopped`.")


class HangCheck(Block):
    """With several ranks: says which rank the others wait for when no step ends."""

    seconds: Annotated[float, Field(gt=0, description="Time without the end of a step."), Unit("seconds")] = 600.0
    abort: bool = Field(
        default=False, description="End the process then, with exit status 75, so that a launcher can restart it."
    )


class MonitorConfig(Block):
    """The configuration of `trainsentry.TrainMonitor`: a path to a .json, .yaml or .toml file, a mapping, or nothing.

    Every key is optional. A block is `true` (on, with its defaults), `false` (off) or an object with keys of its own.
    A size is a number of bytes or a text such as "1GiB". An unknown key is an error that names the closest known one;
    `trainsentry config check FILE` finds it before the run does.
    """

    output_dir: Annotated[
        str,
        BeforeValidator(as_text, json_schema_input_type=str),
        Field(min_length=1, description="Folder of all files of the run."),
    ] = "monitor_output"
    ranks: Annotated[Literal["all"] | list[int | str], AfterValidator(_known_ranks)] = Field(
        default="all",
        description='Ranks that are watched: "all", or a list of ranks and ranges such as [0, "4-7"]. With "all" and '
        "at least 64 ranks, only one rank per host writes tables; others start when an incident names them.",
    )
    start_step: Annotated[int, Field(ge=0, description="First step that is sampled."), Unit("step")] = 0
    stop_step: Annotated[int, Field(ge=1), Unit("step")] | None = Field(
        default=None, description="Sampling ends before this step. `null`: never."
    )
    statistics: Annotated[
        list[str], BeforeValidator(as_list, json_schema_input_type=list[str]), AfterValidator(_known_statistics)
    ] = Field(
        default=list(STATISTICS),
        description="Columns of the tables, in this order. Detection uses all seven of the default. Also allowed: "
        "`histogram`, which counts each tensor's values, and `alignment`, which compares each gradient with its first "
        "moment wherever optimizer state is sampled (table `moment_direction`: the cosine of the angle between them in "
        "`alignment`, the share of elements with the same sign in `mean`).",
    )
    eps: Annotated[
        float, Field(ge=0, description="`zeros` is the share of elements whose absolute value is at most this.")
    ] = 0.0
    collect: Annotated[Collect, all_of(Collect)] = Collect()
    export: Annotated[Export, all_of(Export)] = Export()
    detect: Annotated[Detect | None, optional(Detect)] = Detect()
    overflow_check: Annotated[OverflowCheck | None, optional(OverflowCheck)] = OverflowCheck()
    on_incident: Annotated[OnIncident | None, optional(OnIncident)] = OnIncident()
    hang_check: Annotated[HangCheck | None, optional(HangCheck)] = HangCheck()
    ring_size: Annotated[Size, Field(ge=2**20)] = Field(
        default=16 * 2**20,
        description="Memory between the training process and its recorder. The newest records are kept in as much "
        "again, for `records()`.",
    )
    disk_quota: Size = Field(
        default=20 * 2**30,
        description="Largest size of a rank's tables, and of its dumps. The oldest finished tables are deleted first, "
        "those of an incident last.",
    )
    overhead_budget: Annotated[
        float | None,
        Field(
            gt=0,
            le=1,
            description="Largest share of the training's own time that the monitor may add; 0.01 is one percent. "
            "Sampling thins out to stay inside.",
        ),
        Unit("ratio"),
    ] = None
    strict: bool = Field(
        default=False, description="A fault of the monitor is raised in the training process. For tests."
    )

    @model_validator(mode="after")
    def _stops_after_it_starts(self) -> Self:
        if self.stop_step is not None and self.stop_step <= self.start_step:
            raise ValueError(
                f"stop_step: {self.stop_step}; allowed: null, or a step after start_step ({self.start_step})"
            )
        return self

    def detect_settings(self, ranks: int) -> dict[str, Any] | None:
        """Return the settings of one rank's detection as plain data, None without detection."""
        if self.detect is None:
            return None
        gradients = self.collect.gradients
        per_micro_step = gradients is not None and gradients.per_micro_step
        return {**self.detect.settings(ranks), "per_micro_step": per_micro_step}

    def collect_settings(self) -> CollectSettings:
        """Return the settings of the collectors."""
        blocks = {part: getattr(self.collect, part) for part in PARTS}
        gradients, activations = blocks["gradients"], blocks["activations"]
        parameters = blocks["parameters"]
        return CollectSettings(
            targets={part: list(block.targets) for part, block in blocks.items() if block is not None},
            forward=activations is not None and activations.forward,
            backward=activations is not None and activations.backward,
            inside_graphs=activations is not None and activations.inside_graphs,
            before_reduction=gradients is not None and gradients.before_reduction,
            per_micro_step=gradients is not None and gradients.per_micro_step,
            eps=self.eps,
            read_together=READ_TOGETHER if activations is None else activations.read_together,
            read_together_bytes=READ_TOGETHER_BYTES if activations is None else activations.read_together_bytes,
            reducer=self.collect.communication is not None and self.collect.communication.reducer,
            call_sites=tuple(self.collect.communication.call_sites if self.collect.communication else ()),
            after_update=parameters is not None and parameters.after_update,
            alignment=ALIGNMENT in self.statistics,
            buffers=parameters is not None and parameters.buffers,
            recompute=activations is not None and activations.recompute,
            operations=activations is not None and activations.operations,
            inputs=activations is not None and activations.inputs,
            histograms=HISTOGRAM in self.statistics,
        )

    @property
    def numbers(self) -> tuple[str, ...]:
        """The statistics that every table has a column of numbers for, in their order."""
        return tuple(name for name in self.statistics if name in STATISTICS)

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
    """Return the configuration's class: `MonitorConfig`, with a block for each exporter registered so far."""
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
