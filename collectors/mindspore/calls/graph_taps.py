"""Taps in compiled cells: the graph itself dumps a cell's inputs and outputs, forward and backward.

MindSpore's compiler reads the source of `construct` and the constants and operations in its closure, so the `construct`
below uses only what a graph supports. It works in PyNative mode as well.
"""

import types
from collections.abc import Callable
from typing import Any, Final

from mindspore import Tensor, nn, ops

MOST: Final = 16
"""Arguments and results of a call that are dumped."""

Dump = Callable[[str, Tensor], Any]


def tap(cell: nn.Cell, path: str, make_dump: Callable[[], Dump] = ops.TensorDump) -> None:
    """Make a cell dump its calls to `<path>.<direction>.@.<side>.<place>`, until `untap`."""
    inner = cell.construct
    dump = make_dump()
    input_names = _names(path, "forward.@.input")
    output_names = _names(path, "forward.@.output")
    at_inputs = _at_gradients(path, "backward.@.output", make_dump)
    at_outputs = _at_gradients(path, "backward.@.input", make_dump)

    def construct(self: nn.Cell, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG001 - read by a compiler
        taken = args[:0]
        for i in range(len(args)):
            if isinstance(args[i], Tensor) and i < MOST:
                dump(input_names[i], args[i])
                taken = taken + (at_inputs[i](args[i]),)  # noqa: RUF005
            else:
                taken = taken + (args[i],)  # noqa: RUF005
        out = inner(*taken, **kwargs)
        if isinstance(out, Tensor):
            out = at_outputs[0](out)
            dump(output_names[0], out)
            return out
        if not isinstance(out, tuple):
            return out
        given = out[:0]
        for i in range(len(out)):
            if isinstance(out[i], Tensor) and i < MOST:
                dump(output_names[i], out[i])
                given = given + (at_outputs[i](out[i]),)  # noqa: RUF005
            else:
                given = given + (out[i],)  # noqa: RUF005
        return given

    cell.construct = types.MethodType(construct, cell)


def untap(cell: nn.Cell) -> None:
    """Restore a cell's own `construct`; a graph that is already compiled goes on dumping."""
    vars(cell).pop("construct", None)


def _names(path: str, of: str) -> tuple[str, ...]:
    return tuple(f"{path}.{of}.{i}" for i in range(MOST))


def _at_gradients(path: str, of: str, make_dump: Callable[[], Dump]) -> tuple[Any, ...]:
    """Return operations that pass a tensor on unchanged and dump its gradient."""
    dump = make_dump()

    def at(name: str) -> Any:
        def dump_gradient(gradient: Tensor) -> Tensor:
            dump(name, gradient)
            return gradient

        return ops.InsertGradientOf(dump_gradient)

    return tuple(at(name) for name in _names(path, of))
