"""Reads activations of cells and their gradients, by intercepting the calls of cells."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from mindspore import Tensor, nn

from trainsentry.collectors.guard import Guard
from trainsentry.collectors.mindspore.hooks.gradient_hooks import Arrived, hooked, hooked_call
from trainsentry.collectors.mindspore.hooks.interception import unwatch_calls, watch_calls
from trainsentry.collectors.mindspore.hooks.model_inputs import CellInputs
from trainsentry.collectors.mindspore.rows.step_rows import StepRows
from trainsentry.collectors.mindspore.runtime import in_graph_mode, records_gradients, wait
from trainsentry.collectors.shared.forward_passes import ForwardPasses
from trainsentry.collectors.shared.model_graph import DataFlow, NamedModule
from trainsentry.collectors.shared.nested import objects_in, objects_in_call


def tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield `(path, tensor)` for each tensor in nested tuples, lists, mappings and dataclasses."""
    return objects_in(value, Tensor, path)


def tensors_in_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield `(path, tensor)` for each tensor of a call: positional ones by number, keyword ones by name."""
    return objects_in_call(args, kwargs, Tensor)


PART: Final = "activations"


class CellCalls:
    """Watches cells in sampled steps, and reads their inputs, outputs and gradients.

    A pass counts when gradients are recorded as its outermost cell is entered, so an evaluation leaves no rows.
    Compiled cells are not watched: their code does not run as Python.
    """

    def __init__(
        self, rows: StepRows, guard: Guard, flow: DataFlow, *, forward: bool, backward: bool, inputs: bool = False
    ) -> None:
        self.rows = rows
        self.guard = guard
        self.flow = flow
        self.forward = forward
        self.backward = backward
        self.sampling = False
        self.inputs = CellInputs(rows, every_step=inputs and forward)
        self.counts = ForwardPasses(rows.table)
        self.error: Exception | None = None
        self.pass_begins: Callable[[], None] | None = None
        self._generation = 0
        self._named: dict[int, NamedModule] = {}
        self._observed: frozenset[str] = frozenset()
        self._attached: list[nn.Cell] = []

    def choose(self, modules: Sequence[NamedModule], observed: frozenset[str]) -> None:
        """Choose the cells to watch: those named in `observed`, and the roots, which delimit micro-steps."""
        self._detach()
        self._named = {id(m.module): m for m in modules if m.name in observed or not m.name}
        self._observed = observed

    def open_step(self, *, sampling: bool, inputs: bool = False) -> None:
        """Begin a step; when not `sampling`, only the roots are intercepted, whose inputs are read if `inputs`."""
        self._generation += 1
        self.sampling = sampling
        self.counts.open_step()
        self.inputs.open_step(reading=inputs)
        if sampling:
            self.flow.begin()
        self._attach([n.module for n in self._named.values() if sampling or (self.inputs.reading and not n.name)])

    def _attach(self, cells: list[nn.Cell]) -> None:
        """Intercept the calls of these cells and of no others."""
        if len(cells) != len(self._attached):
            self._detach()
            for cell in cells:
                watch_calls(cell, self)
            self._attached = cells

    def close(self) -> None:
        """Stop watching every cell; gradients that still arrive are ignored."""
        self._generation += 1
        self.sampling = False
        self._detach()

    def _detach(self) -> None:
        for cell in self._attached:
            unwatch_calls(cell, self)
        self._attached = []

    # ------------------------------------------------------------------ called at each call of a cell

    def enter(self, cell: nn.Cell, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note that a cell is entered, and read its inputs."""
        if not (self.sampling or self.inputs.reading) or in_graph_mode():
            return None
        if self._reads(cell):
            wait()  # raises errors of the user's own operations here, outside the guard
        if not self.sampling:
            return self.guard.run(PART, self._read_inputs, self._named[id(cell)], args, kwargs)
        if self.pass_begins is not None and not self._named[id(cell)].name:
            self.pass_begins()  # may end the previous step
        return self.guard.run(PART, self._enter, self._named[id(cell)], args, kwargs)

    def leave(self, cell: nn.Cell, output: Any) -> Any:
        """Note that a cell is left, and read its outputs."""
        if not self.sampling or in_graph_mode():
            return None
        if self._reads(cell):
            wait()
        return self.guard.run(PART, self._leave, self._named[id(cell)], output)

    def _reads(self, cell: nn.Cell) -> bool:
        return self.forward and not self.rows.on_device and self._named[id(cell)].name in self._observed

    def _read_inputs(self, named: NamedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Read the model's own inputs in a step that samples no activations."""
        self.counts.begin(named, training=records_gradients())
        if self.counts.recording and named.name in self._observed:
            self.inputs.read(named, tensors_in_call(args, kwargs), self.counts, sampling=False)

    def _enter(self, named: NamedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.flow.entered(named.name)
        if self.counts.begins_with(named):
            self.counts.begin(named, training=records_gradients())
        self.counts.enter()
        if not self.counts.recording or named.name not in self._observed:
            return None
        call = self.counts.call_of(named)
        if call is None:
            return None
        for path, tensor in tensors_in_call(args, kwargs):
            self.flow.consumed(named.name, tensor)
            self._read(named, "input", path, call, tensor)
        if not named.name:
            self.inputs.read(named, tensors_in_call(args, kwargs), self.counts, sampling=True)
        if not self._traces():
            return None
        arrived = self._arrived(named, "input", call)
        return hooked_call(args, kwargs, arrived)

    def _leave(self, named: NamedModule, output: Any) -> Any:
        self.counts.leave()
        if not self.counts.recording or named.name not in self._observed:
            return None
        call = self.counts.call_of(named)
        self.counts.called(named)
        if call is None:
            return None
        for path, tensor in tensors_in(output):
            self._read(named, "output", path, call, tensor)
        if self._traces():
            output = hooked(output, self._arrived(named, "output", call))
        for _, tensor in tensors_in(output):
            self.flow.produced(named.name, tensor)
        return output

    def _traces(self) -> bool:
        return self.backward and records_gradients()

    def _read(self, named: NamedModule, side: str, path: str, call: int, tensor: Tensor) -> None:
        if self.forward:
            series = self.counts.series(named, side, path, call, self.counts.micro_step, gradient=False)
            self.rows.add(series, tensor)

    def _arrived(self, named: NamedModule, side: str, call: int) -> Arrived:
        """Return the function that takes the gradients at a call's inputs or outputs."""
        generation, micro_step = self._generation, self.counts.micro_step

        def arrived(path: str, gradient: Tensor) -> None:
            if generation != self._generation:
                return
            try:
                if not self.rows.on_device:
                    wait()
                series = self.counts.series(named, side, path, call, micro_step, gradient=True)
                self.guard.run(PART, self.rows.add, series, gradient)
            except Exception as error:  # noqa: BLE001 - MindSpore keeps calling a hook that has raised
                self.error = self.error or error

        return arrived
