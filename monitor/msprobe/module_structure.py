"""What each module gets and gives, as msprobe's `print_struct` writes it: `module_struct.json`."""

from collections.abc import Iterable
from typing import Any, Final

from trainsentry.collectors.record import StepRecord
from trainsentry.collectors.series import (
    ACTIVATION_GRAD_INPUT,
    ACTIVATION_GRAD_OUTPUT,
    ACTIVATION_INPUT,
    ACTIVATION_OUTPUT,
    SeriesTable,
)
from trainsentry.exporters.msprobe.rows import dtype_name

_SIDES: Final = {
    ACTIVATION_INPUT: "input",
    ACTIVATION_OUTPUT: "output",
    ACTIVATION_GRAD_INPUT: "input_grad",
    ACTIVATION_GRAD_OUTPUT: "output_grad",
}
_NONE: Final = "<class 'NoneType'>"


def module_structure(records: Iterable[StepRecord], table: SeriesTable, framework: str) -> dict[str, Any]:
    """Return `{"<chunk>:<module>": {"input": {"config": "list[1]", "0": "size=…, dtype=…"}, …}}` of the first pass.

    Inputs are a list, outputs a tensor or a tuple, gradients a tuple with `None` where none was seen.
    """
    seen: dict[str, dict[str, dict[str, str]]] = {}
    for record in records:
        for series_id, layout_id in zip(record.ids.tolist(), record.layouts.tolist(), strict=True):
            series, layout = table.series[series_id], table.layouts[layout_id]
            if series.quantity not in _SIDES or series.micro_step:
                continue
            sides = seen.setdefault(f"{series.vpp_stage}:{series.module}", {})
            text = f"size={tuple(layout.shape)}, dtype={dtype_name(layout.dtype, framework)}"
            sides.setdefault(_SIDES[series.quantity], {})[series.index or "0"] = text
    return {module: _described(sides) for module, sides in seen.items()}


def _described(sides: dict[str, dict[str, str]]) -> dict[str, Any]:
    described: dict[str, Any] = {}
    for side in _SIDES.values():
        tensors = sides.get(side, {})
        if side.endswith("_grad"):
            whole = sides.get(side.removesuffix("_grad"), {})
            tensors = {index: tensors.get(index, _NONE) for index in (whole or tensors)}
        if side == "output" and len(tensors) == 1:
            described[side] = {"config": "tensor", "tensor": next(iter(tensors.values()))}
        else:
            kind = "list" if side == "input" else "tuple"
            described[side] = {"config": f"{kind}[{len(tensors)}]", **tensors}
    return described
