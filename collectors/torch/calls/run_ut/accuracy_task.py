"""Records the calls of a step for the check of their accuracy: inputs, results and gradients, in files."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from trainsentry.collectors.calls.call import Call
from trainsentry.collectors.calls.call_check import NotComparableError, UnusableCallError
from trainsentry.collectors.calls.call_selection import CallSelection, is_listed
from trainsentry.collectors.torch.accuracy.call_functions import function_of, is_ambiguous
from trainsentry.collectors.torch.accuracy.recorded_call import FIRST_PLACES
from trainsentry.collectors.torch.calls.call_arguments import may_change
from trainsentry.collectors.torch.calls.dump_task import DumpTask
from trainsentry.collectors.torch.calls.run_ut.shared_casts import SharedCasts
from trainsentry.collectors.torch.calls.run_ut.uncounted_changes import Pair, UncountedChanges, differ
from trainsentry.collectors.torch.calls.tensor_facts import TensorFacts
from trainsentry.collectors.torch.hooks.nested_tensors import list_tensors
from trainsentry.collectors.torch.saving import stored_bytes

MOST_CALLS: Final = 20_000
"""Calls of a step that are recorded or listed: each takes about 1 kB of a file; later ones are counted only."""

NOT_SAVED: Final = "takes or returns a tensor that is no plain one: sharded, sparse, or of another class"

CHANGED: Final = "its tensors were changed in place between the call and its backward pass, uncounted by autograd"

_CHANGE_BUFFERS: Final = ("Functional.batch_norm.", "Functional.instance_norm.")
"""Operations that change their running statistics by themselves."""


class AccuracyTask(DumpTask):
    """Writes the whole tensors of each call, so that nothing that changes them later changes what is judged.

    `calls` are the chosen calls of the step in their order, each with the reason why it is not recorded ("": it is).
    `without_backward` are those whose forward pass alone is recorded, with the reason. Files take up to `most_bytes` a
    step: a half for inputs and results, and a half for gradients. A tensor that calls share counts once, as it is one
    file where the file system has hard links. `only` and `without` are those of `is_listed`.
    """

    def __init__(
        self, selection: CallSelection, only: frozenset[str], without: frozenset[str], most_bytes: int
    ) -> None:
        super().__init__(TensorFacts(), selection, save=True, may_save=self._may_save)
        self.only = only
        self.without = without
        self.most_bytes = most_bytes
        self.calls: dict[str, str] = {}
        self.without_backward: dict[str, str] = {}
        self.uncounted = 0
        self._written = {"forward": 0, "backward": 0}
        self._cut: dict[str, str] = {}
        self._changes = UncountedChanges()
        self._again: dict[str, list[Pair]] = {}
        self._casts = SharedCasts()

    def begin_step(self) -> None:
        """Forget the calls of the last step."""
        for known in (self.calls, self.without_backward, self._cut, self._again):
            known.clear()
        self._written = {"forward": 0, "backward": 0}
        self.uncounted = 0
        self._changes.forget()
        self._casts.forget()

    def shared_gradients(self, name: str) -> list[int]:
        """Return the places of a call's tensors whose gradient is not its own; see `SharedCasts`."""
        return self._casts.places(name)

    def before(self, call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Write the inputs, before the call can change them."""
        call.state = None
        name, tensors = _name_of(call), list_tensors((*args, *kwargs.values()))
        self._casts.note(name, tensors)
        if not is_listed(name, self.only, self.without):
            return
        if len(self.calls) >= MOST_CALLS:
            self.uncounted += 1
            return
        self.calls[name] = _obstacle(name)
        if self.calls[name]:
            return
        super().before(call, args, kwargs)
        reason = self._cut.pop(call.name(), "")
        if reason:
            self.calls[name], call.state = reason, None
            return
        if not may_change(call.stem, args, kwargs) and not name.startswith(_CHANGE_BUFFERS):
            self._changes.note(name, zip(tensors, _facts_in(call.state), strict=False))
        places = _first_places(tensors)
        if places:
            call.state[FIRST_PLACES] = places

    def after(self, call: Call, output: Any, module: nn.Module | None) -> None:
        """Write the results: of a call that returns none, what it has changed."""
        if call.state is None:
            return
        content = call.state
        super().after(call, call.changed if output is None else output, module)
        if self._is_recorded(call):
            self._changes.note(_name_of(call), zip(list_tensors([output]), _facts_in(content["output"]), strict=False))

    def gradient_arrived(self, call: Call, place: int, gradient: Tensor) -> Any:
        """Write the gradient at an output, before the backward pass can change it."""
        return super().gradient_arrived(call, place, gradient) if self._is_recorded(call) else None

    def gradients(self, call: Call, inputs: Sequence[Any], outputs: Sequence[Tensor | None]) -> None:
        """Write the gradients at a call's inputs, and read again what they were computed from."""
        self._casts.end(_name_of(call))
        if self._is_recorded(call):
            self._again[call.name("backward")] = self._changes.read_again(_name_of(call))
            super().gradients(call, inputs, outputs)

    def before_change(self, uncounted: Sequence[Tensor]) -> None:
        """Forget what is known of tensors: a change may come through another view, which autograd does not count."""
        self.forget()

    def _write_entries(self) -> None:
        """Write the entries that were kept, but for backward passes of tensors that changed uncounted."""
        self.facts.settle()
        self._changes.settle()
        for name in [name for name, _ in self._entries]:
            if differ(self._again.pop(name, ())):
                self.without_backward[name.rpartition(".")[0]] = CHANGED
                self._entries = [entry for entry in self._entries if entry[0] != name]
        super()._write_entries()

    def _is_recorded(self, call: Call) -> bool:
        return self.calls.get(_name_of(call)) == ""

    def _emit(self, name: str, content: dict[str, Any]) -> None:
        reason = self._cut.pop(name, "")
        stem, _, direction = name.rpartition(".")
        if not reason:
            super()._emit(name, content)
        elif direction == "forward":
            self.calls[stem] = reason
        else:
            self.without_backward[stem] = reason

    def _take(self, tensor: Tensor, stem: str) -> dict[str, Any]:
        facts = super()._take(tensor, stem)
        plain = "data_name" in facts and not tensor.is_nested
        if not plain or bool(is_traceable_wrapper_subclass(tensor)):
            self._cut.setdefault(_entry_of(stem)[0], NOT_SAVED)
        return facts

    def _may_save(self, file_name: str, tensor: Tensor) -> bool:
        """Whether a file still fits into its half."""
        entry, direction = _entry_of(file_name)
        size = stored_bytes(tensor)
        if self._written[direction] + size > self.most_bytes // 2:
            self._cut[entry] = f"max_bytes: the step's {direction} tensors take more than {self.most_bytes // 2} bytes"
            return False
        self._written[direction] += size
        return True


def _facts_in(described: Any) -> list[dict[str, Any]]:
    """Return the descriptions of tensors in nested descriptions, in their order."""
    if isinstance(described, dict):
        if "dtype" in described and "shape" in described:
            return [described]
        described = list(described.values())
    return [facts for item in described for facts in _facts_in(item)] if isinstance(described, list) else []


def _name_of(call: Call) -> str:
    return f"{call.stem}.{call.number}"


def _obstacle(name: str) -> str:
    """Return why the results of an operation are never compared, "" when they are: its tensors are not written."""
    try:
        function_of(name)
        if is_ambiguous(name):
            return "is the name of a function of torch and of another one of torch.linalg"
    except (NotComparableError, UnusableCallError) as reason:
        return str(reason)
    return ""


def _first_places(tensors: Sequence[Tensor]) -> list[int]:
    """Return for each tensor the place of the first that is the same one; [] when none is passed twice."""
    first: dict[int, int] = {}
    places = [first.setdefault(id(tensor), place) for place, tensor in enumerate(tensors)]
    return places if len(first) < len(tensors) else []


def _entry_of(file_name: str) -> tuple[str, str]:
    """Return the entry that a tensor's file belongs to, and its direction.

    >>> _entry_of("Functional.linear.0.forward.input.0.pt")
    ('Functional.linear.0.forward', 'forward')
    """
    for direction in ("forward", "backward"):
        entry, found, _ = file_name.partition(f".{direction}.")
        if found:
            return f"{entry}.{direction}", direction
    raise ValueError(f"{file_name!r} is no file of a call")
