"""Writes the calls of cells, forward and backward, in the layout of msprobe's debugger."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from mindspore import Tensor, nn

from trainsentry.collectors.call_entries import EntryWriter
from trainsentry.collectors.guard import Guard
from trainsentry.collectors.mindspore.gradient_hooks import Arrived, followed
from trainsentry.collectors.mindspore.interception import own_class, unwatch_calls, watch_calls
from trainsentry.collectors.mindspore.runtime import in_graph_mode, records_gradients, wait
from trainsentry.collectors.mindspore.saving import SUFFIX, save_tensor
from trainsentry.collectors.mindspore.tensor_facts import described, facts_of, is_finite
from trainsentry.collectors.named_module import NamedModule

MaySave = Callable[[str, Tensor], bool]


def stem_of(named: NamedModule) -> str:
    """Return how a cell is called in a dump, such as `Cell.layers.0.Dense`."""
    kind = own_class(named.module).__name__
    return f"Cell.{named.name}.{kind}" if named.name else f"Cell.{kind}"


class CellDump:
    """Describes the calls of cells to a writer; with `save`, their tensors are written to files.

    With `only_overflows` a call is written when its results hold NaN or Inf; it has made them when nothing that went in
    did. `calls` and `first` tell of those.
    """

    def __init__(
        self,
        guard: Guard,
        part: str,
        writer: EntryWriter,
        *,
        save: bool = True,
        may_save: MaySave | None = None,
        only_overflows: bool = False,
    ) -> None:
        self.guard = guard
        self.part = part
        self.writer = writer
        self.save = save
        self.may_save = may_save
        self.only_overflows = only_overflows
        self.calls = 0
        self.first: str | None = None
        self._named: dict[int, NamedModule] = {}
        self._numbers: Counter[str] = Counter()
        self._open: list[tuple[str, int, dict[str, Any]]] = []
        self._gradients: dict[str, dict[str, dict[int, Any]]] = {}

    def start(self, named: Iterable[NamedModule]) -> None:
        """Watch cells."""
        for module in named:
            self._named[id(module.module)] = module
            watch_calls(module.module, self)

    def stop(self) -> None:
        """Leave every cell, and write the backward passes that were seen."""
        for named in self._named.values():
            unwatch_calls(named.module, self)
        self._named.clear()
        for name in list(self._gradients):
            self._write_backward(name)

    def take_counts(self) -> tuple[int, str | None, bool]:
        """Return overflowing calls, the first of them, and that no loss scaler was seen; begin anew."""
        found = (self.calls, self.first, False)
        self.calls, self.first = 0, None
        return found

    def enter(self, cell: nn.Cell, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Describe a call's inputs, as they are before it."""
        if in_graph_mode() or id(cell) not in self._named:
            return None
        wait()
        return self.guard.run(self.part, self._enter, self._named[id(cell)], args, kwargs)

    def leave(self, cell: nn.Cell, output: Any) -> Any:
        """Describe a call's outputs, and write it."""
        if in_graph_mode() or id(cell) not in self._named:
            return None
        wait()
        return self.guard.run(self.part, self._leave, self._named[id(cell)], output)

    def _enter(self, named: NamedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        stem = stem_of(named)
        number = self._numbers[stem]
        self._numbers[stem] += 1
        name = f"{stem}.forward.{number}"
        self.writer.parent(name, self._open[-1][0] if self._open else None)
        content = {
            "input_args": self._described(list(args), f"{name}.input"),
            "input_kwargs": self._described(dict(kwargs), f"{name}.input"),
        }
        self._open.append((name, number, content))
        if not records_gradients():
            return None
        arrived = self._arrived(f"{stem}.backward.{number}", "output")
        return followed(args, arrived), {key: followed(value, arrived, key) for key, value in kwargs.items()}

    def _leave(self, named: NamedModule, output: Any) -> Any:
        stem = stem_of(named)
        while self._open and not self._open[-1][0].startswith(f"{stem}.forward."):
            self._open.pop()  # a call inside raised
        if not self._open:
            return None
        name, number, content = self._open.pop()
        given = output if isinstance(output, tuple) else (output,)
        content["output"] = self._described(list(given), f"{name}.output")
        parameters = {leaf: p for leaf, p in named.module._params.items() if isinstance(p, Tensor)}
        content["parameters"] = self._described(parameters, f"{name}.parameters")
        self._write(name, content, ("input_args", "input_kwargs"))
        if not records_gradients():
            return None
        return followed(output, self._arrived(f"{stem}.backward.{number}", "input"))

    def _arrived(self, name: str, group: str) -> Arrived:
        """Return what takes the gradients at a call's inputs (its backward pass's output) or outputs."""
        places: dict[str, int] = {}

        def arrived(path: str, gradient: Tensor) -> None:
            place = places.setdefault(path, int(path.partition(".")[0]) if path[:1].isdigit() else len(places))
            self.guard.run(self.part, self._gradient_arrived, name, group, place, gradient)

        return arrived

    def _gradient_arrived(self, name: str, group: str, place: int, gradient: Tensor) -> None:
        wait()
        facts = self._take(gradient, f"{name}.{group}.{place}")
        self._gradients.setdefault(name, {"input": {}, "output": {}})[group][place] = facts

    def _write_backward(self, name: str) -> None:
        groups = self._gradients.pop(name)
        content = {
            group: [found.get(i) for i in range(max(found) + 1)] if found else [] for group, found in groups.items()
        }
        self._write(name, content, ("input",))

    def _write(self, name: str, content: dict[str, Any], taken: tuple[str, ...]) -> None:
        if self.only_overflows:
            if is_finite(content["output"]):
                return
            self.calls += 1
            self.first = self.first or name
            content["overflow"] = "made" if all(is_finite(content[key]) for key in taken) else "passed_on"
        self.writer.entry(name, content)

    def _described(self, value: Any, stem: str) -> Any:
        return described(value, "", lambda tensor, path: self._take(tensor, f"{stem}.{path}"))

    def _take(self, tensor: Tensor, stem: str) -> dict[str, Any]:
        facts = facts_of(tensor)
        name = f"{stem}{SUFFIX}"
        if self.save and (self.may_save is None or self.may_save(name, tensor)):
            path = self.writer.tensor_path(name)
            save_tensor(tensor, path)
            facts["data_name"] = path.name
        return facts
