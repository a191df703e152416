"""Records calls of cells and operations, forward and backward, in the layout of msprobe's debugger."""

import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from mindspore import Tensor, nn

from trainsentry.collectors.calls.call import Call
from trainsentry.collectors.calls.call_selection import CallSelection
from trainsentry.collectors.calls.call_stacks import CallStacks
from trainsentry.collectors.calls.dump_entries import EntryWriter
from trainsentry.collectors.guard import Guard
from trainsentry.collectors.mindspore.calls.operations import ATTRIBUTES, Operations, attributes_of, changes_in_place
from trainsentry.collectors.mindspore.calls.parameter_gradients import ParameterGradients
from trainsentry.collectors.mindspore.calls.tensor_facts import described, facts_of, is_finite
from trainsentry.collectors.mindspore.hooks.gradient_hooks import Arrived, hooked, hooked_call
from trainsentry.collectors.mindspore.hooks.interception import own_class, unwatch_calls, watch_calls
from trainsentry.collectors.mindspore.rows.tensor_statistics import array_of
from trainsentry.collectors.mindspore.runtime import in_graph_mode, records_gradients, wait
from trainsentry.collectors.mindspore.saving import SUFFIX, save_array
from trainsentry.collectors.shared.adapted_torch import adapted_torch
from trainsentry.collectors.shared.model_graph import NamedModule

MaySave = Callable[[str, Tensor], bool]


def stem_of(named: NamedModule) -> str:
    """Return a cell's name in a dump, such as `Cell.layers.0.Dense`; under MSAdapter it starts with `Module`."""
    prefix = "Cell" if adapted_torch() is None else "Module"
    return ".".join(part for part in (prefix, named.name, own_class(named.module).__name__) if part)


class CallDump:
    """Describes each call to a writer; `save` also writes its tensors to files, and without `values` no tensor is read.

    With `only_overflows`, a call is written only when its results hold NaN or Inf; it made them itself when none of its
    inputs did. With `parameters`, the gradients of cells' own parameters are written too. A backward pass is written
    when recording ends, as a call's gradients arrive one by one. `after_call` is called after each call, outside the
    guard.
    """

    def __init__(
        self,
        guard: Guard,
        part: str,
        selection: CallSelection | None = None,
        *,
        save: bool = True,
        values: bool = True,
        checksum: bool = False,
        may_save: MaySave | None = None,
        only_overflows: bool = False,
        stacks: bool = False,
        parameters: bool = False,
    ) -> None:
        self.guard = guard
        self.part = part
        self.selection = selection or CallSelection(level="L0")
        self.save = save
        self.values = values
        self.checksum = checksum
        self.may_save = may_save
        self.only_overflows = only_overflows
        self.writer: EntryWriter | None = None
        self.calls = 0
        self.first: str | None = None
        self.running = False
        self.after_call: Callable[[], None] | None = None
        self._generation = 0
        self._kept: dict[str, list[tuple[dict[str, Any], Any, str]]] = {}
        self._stacks = CallStacks() if stacks else None
        self._named: dict[int, NamedModule] = {}
        self._numbers: Counter[str] = Counter()
        self._open: list[Call] = []
        self._gradients: dict[str, tuple[Call, dict[str, dict[str, Any]]]] = {}
        self._takes_parameters = parameters and "backward" in self.selection.directions
        self._parameters = ParameterGradients(guard, part, self._take_parameter, self._write_parameters)
        self._operations = Operations(self.operation) if self.selection.sees_operations else None

    # ------------------------------------------------------------------ called by the debugger's session

    def start(self, named: Iterable[NamedModule], *, window: bool = False) -> None:
        """Start watching the selected kinds of calls; in a `window` those of cells whatever the level."""
        self.running = True
        if self._operations is not None and (self.selection.sees_modules or not window):
            self._operations.start()
        for module in named:
            if (self.selection.sees_modules or window) and id(module.module) not in self._named:
                self._named[id(module.module)] = module
                watch_calls(module.module, self)

    def stop(self) -> None:
        """Stop watching calls, and write the recorded backward passes; those to come are written at `reset`."""
        if self._operations is not None:
            self._operations.stop()
        for named in self._named.values():
            unwatch_calls(named.module, self)
        self._named.clear()
        self._open.clear()
        self._write_gradients()
        self.running = False

    def _write_gradients(self) -> None:
        for name in list(self._gradients):
            self.guard.run(self.part, self._write_backward, name)

    def reset(self) -> None:
        """End the step: no backward pass of its calls is recorded any more, and calls are numbered from 0 again."""
        self._generation += 1
        self._parameters.close()
        self._write_gradients()
        self._numbers.clear()
        self._gradients.clear()
        self._kept.clear()
        self.selection.reset()

    def take_counts(self) -> tuple[int, str | None, bool]:
        """Return the number of overflowing calls, the first one, and False (no loss scaler is watched); reset both."""
        found = (self.calls, self.first, False)
        self.calls, self.first = 0, None
        return found

    # ------------------------------------------------------------------ called at each call

    def enter(self, cell: nn.Cell, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Describe a cell's inputs, before the call can change them."""
        if in_graph_mode() or id(cell) not in self._named:
            return None
        wait()
        return self.guard.run(self.part, self._enter, self._named[id(cell)], args, kwargs)

    def leave(self, cell: nn.Cell, output: Any) -> Any:
        """Describe a cell's outputs, and write the call."""
        if in_graph_mode() or id(cell) not in self._named:
            return None
        wait()
        given = self.guard.run(self.part, self._leave, self._named[id(cell)], output)
        if self.after_call is not None:
            self.after_call()
        return given

    def operation(self, stem: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operation, and describe the call if it has tensor arguments."""
        if not self.running or in_graph_mode() or not _takes_tensors(args, kwargs):
            return function(*args, **kwargs)
        wait()
        if stem.startswith("Jit."):
            self._parameters.before_compiled()
        call = Call(stem, self._numbers[stem], is_module=False, parent=self._open[-1] if self._open else None)
        changed = self.guard.run(self.part, self._begin, call, args, kwargs)
        attributes = attributes_of(stem, function)
        if attributes is not None and call.state is not None:
            call.state[ATTRIBUTES] = described(attributes, "", lambda *_: None)
        args, kwargs = changed if changed is not None else (args, kwargs)
        try:
            output = function(*args, **kwargs)
            wait()
        except BaseException:
            self._open = [c for c in self._open if c is not call]
            raise
        given = self.guard.run(self.part, self._end, call, output, None)
        if self.after_call is not None:
            self.after_call()
        return output if given is None else given

    def _enter(self, named: NamedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        stem = stem_of(named)
        call = Call(stem, self._numbers[stem], is_module=True, parent=self._open[-1] if self._open else None)
        return self._begin(call, args, kwargs)

    def _begin(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Describe the inputs; return the arguments to pass instead, with gradient hooks, or None."""
        self._numbers[call.stem] += 1
        self._open.append(call)
        call.recorded = self.selection.begins(call, "forward")
        name = call.name()
        if call.recorded and self.writer is not None:
            self.writer.parent(name, call.parent_name())
            if self._stacks is not None:
                number = self._stacks.here()
                self.writer.stack(name, number, self._stacks.text(number))
            call.state = {}
            if self._reads("input"):
                call.state["input_args"] = self._described(list(args), f"{name}.input")
                call.state["input_kwargs"] = self._described(dict(kwargs), f"{name}.input")
        call.traced = (
            records_gradients()
            and self.selection.may_begin(call, "backward")
            and (call.is_module or not changes_in_place(call.stem))
        )
        if not call.traced:
            return None
        return hooked_call(args, kwargs, self._arrived(call, "output"))

    def _leave(self, named: NamedModule, output: Any) -> Any:
        stem = stem_of(named)
        while self._open and self._open[-1].stem != stem:
            self._open.pop()  # a call inside raised
        return self._end(self._open[-1], output, named.module) if self._open else None

    def _end(self, call: Call, output: Any, cell: nn.Cell | None) -> Any:
        """Describe the outputs, and write the call; return the output to pass on instead, or None."""
        self._open = [c for c in self._open if c is not call]
        self.selection.ends(call, "forward")
        if call.recorded and call.state is not None:
            content, call.state = call.state, None
            name = call.name()
            given = output if isinstance(output, (tuple, list)) else (output,)
            if self._reads("output"):
                content["output"] = self._described(list(given), f"{name}.output")
            if cell is not None and self._reads("input"):
                parameters = {leaf: p for leaf, p in cell._params.items() if isinstance(p, Tensor)}
                content["parameters"] = self._described(parameters, f"{name}.parameters")
            self._write(name, content, ("input_args", "input_kwargs"))
        if call.traced and cell is not None and self._takes_parameters and self._reads("output"):
            self._parameters.guard = self.guard
            self._parameters.watch(call.stem, cell, sees_compiled=self._operations is not None)
        return hooked(output, self._arrived(call, "input")) if call.traced else None

    def _take_parameter(self, gradient: Tensor, stem: str) -> dict[str, Any]:
        wait()
        return self._take(gradient, stem)

    def _write_parameters(self, name: str, gradients: dict[str, Any]) -> None:
        kept = [file for facts in gradients for file in self._kept.pop(f"{name}.{facts}", [])]
        if self.writer is None or (self.only_overflows and is_finite(gradients)):
            return
        for facts, array, file in kept:
            self._save(facts, array, file)
        self.writer.entry(name, gradients)

    def _arrived(self, call: Call, group: str) -> Arrived:
        """Return the function that takes the gradients of a backward pass: `group` is its "input" or "output"."""
        generation = self._generation

        def arrived(path: str, gradient: Tensor) -> None:
            if generation == self._generation:
                self.guard.run(self.part, self._gradient_arrived, call, group, path, gradient)

        return arrived

    def _gradient_arrived(self, call: Call, group: str, path: str, gradient: Tensor) -> None:
        name = call.name("backward")
        wait()
        found = self._gradients.setdefault(name, (call, {"input": {}, "output": {}}))[1]
        found[group][path] = self._take(gradient, f"{name}.{group}.{path}") if self._reads(group) else None

    def _write_backward(self, name: str) -> None:
        call, groups = self._gradients.pop(name)
        content = {
            group: [found[path] for path in sorted(found, key=_in_order)]
            for group, found in groups.items()
            if self._reads(group)
        }
        if self.writer is not None:
            self.writer.parent(name, call.parent_name("backward"))
        self._write(name, content, ("input",))

    # ------------------------------------------------------------------ writing

    def _reads(self, side: str) -> bool:
        return self.values and side in self.selection.sides

    def _write(self, name: str, content: dict[str, Any], input_keys: tuple[str, ...]) -> None:
        if self.only_overflows:
            kept = self._kept.pop(name, [])
            if is_finite(content.get("output")):
                return
            for facts, array, file in kept:
                self._save(facts, array, file)
            self.calls += 1
            self.first = self.first or name
            content["overflow"] = "made" if all(is_finite(content.get(key)) for key in input_keys) else "passed_on"
        if self.writer is not None and self.values:
            self.writer.entry(name, content)

    def _described(self, value: Any, stem: str) -> Any:
        return described(value, "", lambda tensor, path: self._take(tensor, f"{stem}.{path}"))

    def _take(self, tensor: Tensor, stem: str) -> dict[str, Any]:
        facts = facts_of(tensor)
        if self.checksum:
            facts["md5"] = f"{zlib.crc32(np.ascontiguousarray(array_of(tensor)).tobytes()):08x}"
        name = f"{stem}{SUFFIX}"
        if not self.save or self.writer is None or not (self.may_save is None or self.may_save(name, tensor)):
            return facts
        if self.only_overflows:  # only the end of the call decides whether it is written
            self._kept.setdefault(_call_of(stem), []).append((facts, array_of(tensor).copy(), name))
        else:
            self._save(facts, array_of(tensor), name)
        return facts

    def _save(self, facts: dict[str, Any], array: Any, name: str) -> None:
        if self.writer is not None:
            path = self.writer.tensor_path(name)
            save_array(array, path)
            facts["data_name"] = path.name


def _takes_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    given = [*args, *kwargs.values()]
    return any(isinstance(x, Tensor) or (isinstance(x, (list, tuple)) and _takes_tensors(tuple(x), {})) for x in given)


def _in_order(path: str) -> tuple[Any, ...]:
    """Return the sort key of a tensor of a call: numbers before names, 2 before 10."""
    return tuple((not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in path.split("."))


def _call_of(stem: str) -> str:
    """Return the name of the call that a tensor's file belongs to.

    >>> _call_of("Cell.fc.Dense.forward.0.input.0"), _call_of("Mint.add.3.backward.output.0")
    ('Cell.fc.Dense.forward.0', 'Mint.add.3.backward')
    """
    for direction in (".forward.", ".backward."):
        head, found, tail = stem.rpartition(direction)
        if found:
            number = tail.partition(".")[0]
            return f"{head}{direction}{number}" if number.isdigit() else f"{head}{direction[:-1]}"
    return stem
