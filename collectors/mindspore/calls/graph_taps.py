"""Taps in cells that are compiled: what goes in and comes out is dumped by the graph itself, forward and backward.

MindSpore's compiler reads the source of `construct`, and knows the constants and operations that its closure holds: so
the one below is written in what a graph may say. It works in PyNative mode as well.
"""

import types
from collections.abc import Callable
from typing import Any, Final

from mindspore import Tensor, nn, ops

MOST: Final = 16
"""Arguments and results of a call that are looked at."""

Dump = Callable[[str, Tensor], Any]


def tap(cell: nn.Cell, path: str, make_dump: Callable[[], Dump] = ops.TensorDump) -> None:
    """Have the calls of a cell dumped to `<path>.<direction>.@.<side>.<place>`, until `untap`."""
    inner = cell.construct
    dump = make_dump()
    took = _names(path, "forward.@.input")
    gave = _names(path, "forward.@.output")
    at_inputs = _at_gradients(path, "backward.@.output", make_dump)
    at_outputs = _at_gradients(path, "backward.@.input", make_dump)

    def construct(self: nn.Cell, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG001 - read by a compiler
        taken = args[:0]
        for i in range(len(args)):
            if isinstance(args[i], Tensor) and i < MOST:
                dump(took[i], args[i])
                taken = taken + (at_inputs[i](args[i]),)  # noqa: RUF005
            else:
                taken = taken + (args[i],)  # noqa: RUF005
        out = inner(*taken, **kwargs)
        if isinstance(out, Tensor):
            out = at_outputs[0](out)
            dump(gave[0], out)
            return out
        if not isinstance(out, tuple):
            return out
        given = out[:0]
        for i in range(len(out)):
            if isinstance(out[i], Tensor) and i < MOST:
                dump(gave[i], out[i])
                given = given + (at_outputs[i](out[i]),)  # noqa: RUF005
            else:
                given = given + (out[i],)  # noqa: RUF005
        return given

    cell.construct = types.MethodType(construct, cell)


def untap(cell: nn.Cell) -> None:
    """Give a cell its own `construct` back; what is compiled already goes on dumping."""
    vars(cell).pop("construct", None)


def _names(path: str, of: str) -> tuple[str, ...]:
    return tuple(f"{path}.{of}.{i}" for i in range(MOST))


def _at_gradients(path: str, of: str, make_dump: Callable[[], Dump]) -> tuple[Any, ...]:
    """Return operations that pass a tensor on as it is and have its gradient dumped."""
    dump = make_dump()

    def at(name: str) -> Any:
        def seen(gradient: Tensor) -> Tensor:
            dump(name, gradient)
            return gradient

        return ops.InsertGradientOf(seen)

    return tuple(at(name) for name in _names(path, of))
