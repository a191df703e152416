"""Series, each a quantity over time, and the table that numbers them."""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

ACTIVATION_INPUT = "activation_input"
ACTIVATION_OUTPUT = "activation_output"
ACTIVATION_GRAD_INPUT = "activation_grad_input"
ACTIVATION_GRAD_OUTPUT = "activation_grad_output"
GRADIENT = "gradient"
GRADIENT_UNREDUCED = "gradient_unreduced"
PARAMETER = "parameter"
PARAMETER_UPDATED = "parameter_updated"
"""Weights just after the update, for tables that want them in the same step; detectors read `PARAMETER`."""

BUFFER = "buffer"
"""What a module holds besides its parameters: running statistics, masks, position tables, router biases."""

UPDATE = "update"

MOMENT_DIRECTION = "moment_direction"
"""How a parameter's gradient and first moment point: the statistics are of the share of elements whose signs agree
(½ for one that is zero), the value is the cosine of the angle between them."""

VALUE_NAMES = {UPDATE: "ratio", MOMENT_DIRECTION: "alignment"}
"""What the value of a tensor's row is called in files and tables, for the quantities that have one."""

COMMUNICATION_INPUT = "communication_input"
COMMUNICATION_OUTPUT = "communication_output"

COMMUNICATION_CALL = "communication_call"
"""A collective call; its row holds the number of the call in its group, seconds and bytes. It has no CSV table."""

STEP_SECONDS = "step_seconds"
"""The scalar of a step's seconds, with several ranks."""

OUTSIDE_SECONDS = "outside_seconds"
"""The scalar of the seconds from the end of a step to the model's first pass in the next, with several ranks: loading
data, logging, evaluating."""

COMMUNICATION_SECONDS = "communication_seconds"
"""The scalar of the seconds of a step that a rank waited for collectives."""

COMMUNICATION_ORDER = "communication_order"
"""The scalar of a hash of a step's sequence of collectives, equal on all ranks. It has no curve."""

UNKNOWN_REGION = "?"
"""The region of a tensor whose place in the whole tensor is unknown."""

TRAINING_MODE = "training_mode"
"""Prefix of `training_mode.<module>`, the scalar of a module switched to training (1) or evaluation (0)."""

UPDATED_PARAMETERS = "updated_parameters"
"""The scalar of how many parameters the optimizers updated, in steps that sample updates."""

STEP_COUNTER = "step"
"""The optimizer-state key that counts a parameter's updates."""

LEARNING_RATE = "learning_rate"

OPTIMIZER_RATE = "optimizer_learning_rate"
"""The scalar of an update's learning rate, where the training loop logs its own `learning_rate`: many loops log that
after the scheduler has already set the next step's."""

OPTION = "option"
"""Prefix of the scalars of optimizers' options, which have a row in each step in which they change."""

SETTING = "setting"
"""Prefix of `setting.<module>.<key>`, the scalar of a module's own number (epsilon, dropout's share) that changed."""

SETTING_BEFORE = "setting_before"
"""Prefix of `setting_before.<module>.<key>`, what a constant of the framework's own was until it changed."""

OPERATIONS = "operations"
"""Prefix of `operations.<module>: <change>`, the scalar of a module whose forward pass computes something else than in
all passes before; it has a row in each pass until the change has lasted, and none after that."""

OTHER_OPERATIONS, OTHER_ARGUMENT, MOVED_ARGUMENT, PASSING = 1.0, 2.0, 3.0, 4.0
"""Values of `operations`: other operations or inputs of them; another constant; a number that has moved by less than a
fifth, as schedules do; a change that has not lasted yet."""

EULER_GAP = "euler_gap"
"""Prefix of `euler_gap.<module>.<side>`, the scalar of how far inner products are apart that a module's backward pass
keeps where it computes what it should; `side` is its first parameter, `input`, or `gradients` for both."""

GRADIENT_WRITES = "gradient_writes"
"""Prefix of `gradient_writes.<optimizer>`, the scalar of how often an update's gradients were written in place beyond
once for each micro-step after the first; it has a row where it changes. `gradient_writes.<optimizer>.<parameter>` is of
one that is written more often than most others, as it never was: 0 where that begins, and by how many times after the
backward pass where it has lasted for `LASTING_WRITES` updates."""

LOOKED_AT_EVERY = 4
"""Updates of which one looks at single gradients, until something is found: a look takes a core of a server 0.5 µs for
each parameter."""

STALE_UPDATE = "stale_update"
"""Prefix of `stale_update.<optimizer>`, the scalar, 1, of an update whose gradients were not written since the update
before it."""

OWN_STEP = "own_step"
"""Prefix of `own_step.<optimizer>`, the scalar, 1, of an optimizer whose `step` is none of the framework's, so that it
may change gradients before it uses them; it has one row."""

BUFFER_WRITES = "buffer_writes"
"""Prefix of `buffer_writes.<buffer>`, the scalar of how many times more a buffer was written since the update before
than those that were written like it; it has a row where it changes."""

STOPPED_WRITES = "stopped_writes"
"""Prefix of `stopped_writes.<tensor>`, the scalar of a buffer, or of a parameter without a gradient or of one of
several optimizers, that was written again and again and is no more; its value is the number of steps since."""

UNWRITTEN = "unwritten"
"""Prefix of `unwritten.<parameter>`, the scalar of a weight that an update has left as it was, where those before wrote
to it. `unwritten` itself speaks of all that an optimizer has, or of most of it."""

KEPT, FROZEN_WEIGHT, MOST_FROZEN, MADE_CONSTANT, UNHELD, REPLACED = 1.0, 2.0, 3.0, 4.0, 5.0, 6.0
"""Values of `unwritten`: a weight has a gradient; it requires none any more; most of an optimizer's do not; its module
has made it without one, as a table of positions; no optimizer holds it; its optimizer holds one that the model had."""

UNHELD_UPDATES = 8
"""Updates at which a parameter has had a gradient, and no optimizer that held it, as its row comes: an optimizer of its
own may step more seldom than others, and is known from its first step on."""

NO_OPTION = -math.inf
"""The value of an option's row where it has turned out to be the optimizer's own state."""

OUTSIDE_WRITES = "outside_writes"
"""Prefix of `outside_writes.<parameter>`, the scalar, 1, of a weight that something other than its optimizer's update
has written to more often than ever. `outside_writes` itself counts them where they are most of an optimizer's."""

WRITTEN_NORM = "written_norm"
WRITTEN_LARGEST = "written_largest"
"""Prefixes of the scalars of such a weight's norm and largest magnitude, at a few updates once that has lasted for
`LASTING_WRITES` updates."""

LASTING_WRITES = 8
"""Updates in a row before which a tensor is written more often than ever, as that may become an alarm: who changes one
by hand now and then does so at fewer."""

LOST_STATE = "lost_state"
"""The scalar of an optimizer that has fewer states than after its last update; its weights are read at once."""

REPEATED_SAMPLES = "repeated_samples"
"""Prefix of `repeated_samples.<input>`, the scalar of the share of a batch's samples that are copies of another one,
where activations are sampled."""

REPEATED_RANDOM = "repeated_random"
"""Prefix of `repeated_random.<device>`, the scalar of how many steps ago a forward pass began with the same state of
that device's random numbers; it has a row where one did."""

PASSES_WITHOUT_GRADIENTS = "passes_without_gradients"
"""The scalar of how many forward passes without gradients came before a step's training: those of an evaluation, or of
a policy that gathers its data. A step without any has no row."""

RECOMPUTED = "recomputed"
"""Prefix of `recomputed.<module>`, the scalar of how many elements of a module's output came out otherwise when its
call was computed again; NaN where its kernel is not repeatable."""

RECOMPUTED_GRADIENT = "recomputed_gradient"
"""Prefix of `recomputed_gradient.<module>`, the same of the gradients that its backward pass computes, of inputs and
weights together."""

FOUND_INF = "found_inf"
"""The scalar of whether the loss scaler makes a fused optimizer skip; 0 or 1."""

OVERFLOW_FLAG = "overflow_flag"
"""The scalar of a device's overflow flag at the end of a step, where results saturate: not 0 after an overflow."""

SKIPPED = "skipped"
"""The scalar of a step that the loss scaler skipped: 1; other steps have no row."""

ACTIVATION_QUANTITIES = frozenset({ACTIVATION_INPUT, ACTIVATION_OUTPUT, ACTIVATION_GRAD_INPUT, ACTIVATION_GRAD_OUTPUT})
"""Quantities whose names are `<module>.input.<i>` or `<module>.output.<i>`."""

COMMUNICATION_QUANTITIES = frozenset({COMMUNICATION_INPUT, COMMUNICATION_OUTPUT, COMMUNICATION_CALL})

NOT_JUDGED = frozenset({PARAMETER_UPDATED, MOMENT_DIRECTION})
"""Quantities that repeat what others say: they are written, and no baseline follows them."""

TENSOR_QUANTITIES = (
    ACTIVATION_QUANTITIES
    | COMMUNICATION_QUANTITIES
    | {GRADIENT, GRADIENT_UNREDUCED, PARAMETER, BUFFER, UPDATE}
    | NOT_JUDGED
)
"""Every quantity that is neither a logged scalar nor optimizer state."""


@dataclass(frozen=True, slots=True)
class Series:
    """One quantity of one tensor or scalar over time.

    `name` is its name in files; `module` is the module that owns it ("" for the root). `index` distinguishes the
    tensors of one call ("0", "1.hidden"). The quantity of a logged scalar is its name.
    """

    name: str
    quantity: str
    micro_step: int = 0
    index: str = ""
    module: str = ""
    vpp_stage: int = 0
    scalar: bool = False

    @property
    def is_model_input(self) -> bool:
        """Whether this is an input of the whole model, or the part of a large one that is read at every step."""
        return self.quantity == ACTIVATION_INPUT and self.module == ""

    @property
    def is_state(self) -> bool:
        """Whether this is a tensor of optimizer state (`exp_avg`, `momentum_buffer`, …)."""
        return not self.scalar and self.quantity not in TENSOR_QUANTITIES


@dataclass(frozen=True, slots=True)
class Layout:
    """Shape and dtype of a tensor; a record refers to them by id because they can change over time.

    `numel` counts the elements of the tensor, or of its local shard; `dtype` omits the framework's name. For a sharded
    tensor, `whole` is the shape of the whole tensor and `region` the part of it on this rank: "" for all, "a:b" for
    elements of the flattened tensor, "a:b,c:d" for a box, `UNKNOWN_REGION` for a tensor that cannot be assembled with
    others, such as a partial sum before reduction.
    """

    shape: tuple[int, ...]
    dtype: str
    numel: int
    whole: tuple[int, ...] | None = None
    region: str = ""


def option_name(optimizer: int, group: int, key: str) -> str:
    """Return the name of the scalar of an option; `option_parts` takes it apart.

    >>> option_name(0, 1, "betas.0"), option_parts("option.0.1.betas.0")
    ('option.0.1.betas.0', (0, 1, 'betas.0'))
    """
    return f"{OPTION}.{optimizer}.{group}.{key}"


def option_parts(name: str) -> tuple[int, int, str] | None:
    """Return the optimizer, the group and the key of an option's scalar; None for another series."""
    prefix, _, rest = name.partition(".")
    parts = rest.split(".", 2)
    if prefix != OPTION or len(parts) < 3 or not (parts[0].isdecimal() and parts[1].isdecimal()):
        return None
    return int(parts[0]), int(parts[1]), parts[2]


_UNWRITABLE: Final = re.compile("[\x00\ud800-\udfff]")


def writable(name: str) -> str:
    r"""Return a name that every file format can hold: NUL and halves of surrogate pairs are escaped.

    >>> writable("fc\ud800.weight")
    'fc\\ud800.weight'
    """
    if _UNWRITABLE.search(name) is None:
        return name
    return name.replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode()


def _as_written(series: Series) -> Series:
    """Return a series whose names every exporter can write."""
    texts = (series.name, series.quantity, series.index, series.module)
    if _UNWRITABLE.search("".join(texts)) is None:
        return series
    name, quantity, index, module = map(writable, texts)
    return replace(series, name=name, quantity=quantity, index=index, module=module)


class SeriesTable:
    """Numbers series and layouts in the order of their first use.

    >>> table = SeriesTable()
    >>> table.series_id(Series("fc.weight", "gradient"))
    0
    >>> table.series_id(Series("fc.weight", "gradient"))
    0
    """

    def __init__(self) -> None:
        self.series: list[Series] = []
        self.layouts: list[Layout] = []
        self._series_ids: dict[Series, int] = {}
        self._layout_ids: dict[Layout, int] = {}

    def series_id(self, series: Series) -> int:
        """Return the id of `series`; the first call defines it."""
        found = self._series_ids.get(series)
        if found is None:
            found = self._series_ids[series] = len(self.series)
            self.series.append(_as_written(series))
        return found

    def known_id(self, series: Series) -> int | None:
        """Return the id of `series` if it is defined."""
        return self._series_ids.get(series)

    def layout_id(self, layout: Layout) -> int:
        """Return the id of `layout`; the first call defines it."""
        found = self._layout_ids.get(layout)
        if found is None:
            found = self._layout_ids[layout] = len(self.layouts)
            self.layouts.append(layout)
        return found

    def of_quantity(self, quantity: str) -> Iterator[tuple[int, Series]]:
        """Yield the ids and series of one quantity."""
        return ((i, s) for i, s in enumerate(self.series) if s.quantity == quantity)

    def definitions(self, series_from: int = 0, layouts_from: int = 0, at_most: int | None = None) -> dict[str, Any]:
        """Return the definitions from the given ids on, `at_most` of each kind, as plain data for another process."""
        series_to, layouts_to = None, None
        if at_most is not None:
            series_to, layouts_to = series_from + at_most, layouts_from + at_most
        return {
            "series_from": series_from,
            "series": [asdict(s) for s in self.series[series_from:series_to]],
            "layouts_from": layouts_from,
            "layouts": [[x.shape, x.dtype, x.numel, x.whole, x.region] for x in self.layouts[layouts_from:layouts_to]],
        }

    def define(self, definitions: dict[str, Any]) -> None:
        """Add another process's definitions; skip the known ones."""
        new_series = definitions["series"][len(self.series) - definitions["series_from"] :]
        for item in new_series:
            self.series_id(Series(**item))
        new_layouts: Iterable[Any] = definitions["layouts"][len(self.layouts) - definitions["layouts_from"] :]
        for shape, dtype, numel, whole, region in new_layouts:
            self.layout_id(Layout(tuple(shape), dtype, numel, None if whole is None else tuple(whole), region))
