"""Series: what is observed over time, and the tables that give each one a small integer id."""

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
UPDATE = "update"

COMMUNICATION_INPUT = "communication_input"
COMMUNICATION_OUTPUT = "communication_output"

COMMUNICATION_CALL = "communication_call"
"""Numbers of a collective call, in the place of statistics: its order in its group, seconds, bytes. It has no table."""

STEP_SECONDS = "step_seconds"
"""The scalar that says how long a step took, with several ranks."""

COMMUNICATION_SECONDS = "communication_seconds"
"""The scalar that says how much of it a rank has waited in collectives."""

COMMUNICATION_ORDER = "communication_order"
"""The scalar that stands for the collectives of a step and their order, equal on all ranks. It has no curve."""

UNKNOWN_REGION = "?"
"""The region of a tensor whose place in the whole is not known."""

TRAINING_MODE = "training_mode"
"""With a dot and a module's name behind it, the scalar of a module that was switched to training (1), or away (0)."""

UPDATED_PARAMETERS = "updated_parameters"
"""The scalar that says of a step whose updates are sampled how many parameters the optimizers took."""

STEP_COUNTER = "step"
"""The optimizer's state that counts the updates of a parameter."""

LEARNING_RATE = "learning_rate"

OPTIMIZER_RATE = "optimizer_learning_rate"
"""The scalar that says at which rate an update was taken, where the training loop logs a `learning_rate` of its own:
many log it behind the step, when it is the next one's."""

FOUND_INF = "found_inf"
"""The scalar by which a fused optimizer tells that the loss scaler makes it skip; 0 or 1."""

SKIPPED = "skipped"
"""The scalar that says that the loss scaler skipped a step; 1 where it did, else no row."""

ACTIVATION_QUANTITIES = frozenset({ACTIVATION_INPUT, ACTIVATION_OUTPUT, ACTIVATION_GRAD_INPUT, ACTIVATION_GRAD_OUTPUT})
"""Quantities whose names are `<module>.input.<i>` or `<module>.output.<i>`."""

COMMUNICATION_QUANTITIES = frozenset({COMMUNICATION_INPUT, COMMUNICATION_OUTPUT, COMMUNICATION_CALL})

TENSOR_QUANTITIES = ACTIVATION_QUANTITIES | COMMUNICATION_QUANTITIES | {GRADIENT, GRADIENT_UNREDUCED, PARAMETER, UPDATE}
"""Every quantity that is not a logged scalar and not the optimizer's own state."""


@dataclass(frozen=True, slots=True)
class Series:
    """One observed quantity over time.

    `name` is what the files say; `module` is the module that owns it ("" for the root). `index` tells apart
    the tensors of one call ("0", "1.hidden"). A logged scalar has its own name as its quantity.
    """

    name: str
    quantity: str
    micro_step: int = 0
    index: str = ""
    module: str = ""
    vpp_stage: int = 0
    scalar: bool = False

    @property
    def is_state(self) -> bool:
        """Whether this is a tensor of the optimizer's state (`exp_avg`, `momentum_buffer`, …)."""
        return not self.scalar and self.quantity not in TENSOR_QUANTITIES


@dataclass(frozen=True, slots=True)
class Layout:
    """Shape and dtype of an observed tensor; a record names them by id because they can change over time.

    `numel` counts elements (of the local shard when sharded); `dtype` is written without the framework's name.
    Of a tensor that several ranks hold together, `whole` is the shape of all of it and `region` says which part this
    is: "" for all, "a:b" for elements of the flattened tensor, "a:b,c:d" for a box, `UNKNOWN_REGION` for what is no
    part of it that could be put together, such as a sum that is still to be reduced.
    """

    shape: tuple[int, ...]
    dtype: str
    numel: int
    whole: tuple[int, ...] | None = None
    region: str = ""


_UNWRITABLE: Final = re.compile("[\x00\ud800-\udfff]")


def writable(name: str) -> str:
    r"""Return a name as every file can have it: NUL and halves of surrogate pairs are spelt out.

    >>> writable("fc\ud800.weight")
    'fc\\ud800.weight'
    """
    if _UNWRITABLE.search(name) is None:
        return name
    return name.replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode()


def _as_written(series: Series) -> Series:
    """Return a series under names that every exporter can write."""
    texts = (series.name, series.quantity, series.index, series.module)
    if _UNWRITABLE.search("".join(texts)) is None:
        return series
    name, quantity, index, module = map(writable, texts)
    return replace(series, name=name, quantity=quantity, index=index, module=module)


class SeriesTable:
    """Gives series and layouts their ids, in the order they are first met.

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
        """Return the id of `series`, defining it on first sight."""
        found = self._series_ids.get(series)
        if found is None:
            found = self._series_ids[series] = len(self.series)
            self.series.append(_as_written(series))
        return found

    def known_id(self, series: Series) -> int | None:
        """Return the id of `series` if it is defined."""
        return self._series_ids.get(series)

    def layout_id(self, layout: Layout) -> int:
        """Return the id of `layout`, defining it on first sight."""
        found = self._layout_ids.get(layout)
        if found is None:
            found = self._layout_ids[layout] = len(self.layouts)
            self.layouts.append(layout)
        return found

    def of_quantity(self, quantity: str) -> Iterator[tuple[int, Series]]:
        """Yield the ids and series of one quantity."""
        return ((i, s) for i, s in enumerate(self.series) if s.quantity == quantity)

    def definitions(self, series_from: int = 0, layouts_from: int = 0, at_most: int | None = None) -> dict[str, Any]:
        """Return what was defined from the given counts on, as plain data for another process."""
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
        """Take over definitions made elsewhere; those already known are skipped."""
        new_series = definitions["series"][len(self.series) - definitions["series_from"] :]
        for item in new_series:
            self.series_id(Series(**item))
        new_layouts: Iterable[Any] = definitions["layouts"][len(self.layouts) - definitions["layouts_from"] :]
        for shape, dtype, numel, whole, region in new_layouts:
            self.layout_id(Layout(tuple(shape), dtype, numel, None if whole is None else tuple(whole), region))
