"""Keeps named tensors by reference with what shows a later change, and compares tensors to the bit."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from trainsentry.collectors.torch.hooks.nested_tensors import tensors_in
from trainsentry.collectors.torch.rows.local_tensor import is_readable, version_of

SAMPLED: Final = 64
"""Elements of a tensor that are copied: an update that autograd does not count changes nearly every element."""

DIGITS: Final = (5, 9, 17)
"""Significant digits to try until two numbers look different; 9 tell all float32 apart, 17 all float64."""

_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has strided values of its own, and autograd counts its changes."""
    if type(tensor) not in {Tensor, torch.nn.Parameter} or not is_readable(tensor):
        return False
    return tensor.layout is torch.strided and not tensor.is_nested and version_of(tensor) is not None


def few_of(tensor: Tensor, most: int = SAMPLED) -> Tensor:
    """Return a view of at most `most` elements that are spread over the tensor: all of them where it has no more."""
    values = tensor.detach()
    if values.numel() <= most:
        return values
    if values.is_contiguous():
        return values.view(-1)[:: -(-values.numel() // most)]
    side = max(1, int(most ** (1 / values.dim())))
    return values[tuple(slice(None, None, -(-size // side)) for size in values.shape)]


def copies_of(views: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Return the views' values in one new tensor for each device and dtype: few launches, no waiting."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for view in views:
        groups.setdefault((view.device, view.dtype), []).append(view if view.dim() == 1 else view.reshape(-1))
    return tuple(torch.cat(group) for group in groups.values())


def _as_integers(values: Tensor) -> Tensor:
    return values.contiguous().view(_INTEGERS[values.element_size()])


def differing(a: Tensor, b: Tensor) -> Tensor | None:
    """Return where two tensors of one dtype, shape and device differ in a bit; None where they do nowhere.

    A NaN equals any other: which of them an operation makes says nothing.
    """
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    where = _as_integers(a.resolve_neg()) != _as_integers(b.resolve_neg())
    if a.is_floating_point() and a.element_size() > 1:
        where &= ~(a.isnan() & b.isnan())
    return where if bool(where.any()) else None


def are_equal(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    """Whether two lists of tensors have equal forms and bits."""
    return len(a) == len(b) and all(form(x) == form(y) and differing(x, y) is None for x, y in zip(a, b, strict=True))


def form(tensor: Tensor) -> tuple[Any, ...]:
    """Return what two tensors must share to be compared."""
    return tensor.shape, tensor.dtype, tensor.device


@dataclass(frozen=True)
class KeptTensors:
    """Tensors by name and by reference, detached, with what shows a later change.

    `states` are address and version of each. `few` are copies of some elements: a kernel of another library that
    overwrites a tensor is not counted in its version. `plain` tells whether all of this is known for every tensor.
    """

    names: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    states: tuple[Any, ...]
    few: tuple[Tensor, ...]
    plain: bool

    @classmethod
    def of(cls, value: Any) -> "KeptTensors":
        """Keep the tensors in nested results or arguments."""
        found = named_tensors(value)
        plain = all(is_plain(tensor) for _, tensor in found)
        return cls(
            tuple(name for name, _ in found),
            tuple(tensor.detach() for _, tensor in found) if plain else (),
            tuple(state_of(tensor) for _, tensor in found),
            copies_of(few_of(tensor) for _, tensor in found) if plain else (),
            plain,
        )

    def replaced_or_counted(self, value: Any) -> bool:
        """Whether the value has other tensors now, or autograd has counted a change in place."""
        now = named_tensors(value)
        return (self.names, self.states) != (tuple(n for n, _ in now), tuple(state_of(t) for _, t in now))

    def is_unchanged(self) -> bool:
        """Whether nothing shows a change of the kept tensors; False where nothing could show it. Waits for a device."""
        if not self.plain or self.states != tuple(state_of(tensor) for tensor in self.tensors):
            return False
        return are_equal(self.few, copies_of(few_of(tensor) for tensor in self.tensors))


def named_tensors(value: Any) -> list[tuple[str, Tensor]]:
    """Return the tensors in a value by name, or those in its attributes where it is an object of a class of its own."""
    found = list(tensors_in(value))
    return found or list(tensors_in(getattr(value, "__dict__", None)))


def state_of(tensor: Tensor) -> tuple[int | None, int | None]:
    """Return a tensor's address and version, each None where it has none."""
    try:
        return tensor.data_ptr(), version_of(tensor)
    except RuntimeError:  # a tensor without storage, as a subclass may be
        return None, version_of(tensor)


def first_difference(step: KeptTensors, again: KeptTensors) -> str | None:
    """Return the first output that a re-run gives otherwise than the step, in words; None where all are equal.

    Raises:
        ValueError: when the outputs have other names or forms, so that they cannot be compared.

    """
    if step.names != again.names or [form(t) for t in step.tensors] != [form(t) for t in again.tensors]:
        raise ValueError("a re-run gives outputs of another form")
    for name, old, new in zip(step.names, step.tensors, again.tensors, strict=True):
        where = differing(old, new)
        if where is not None:
            return _in_words(_name_of(name, len(step.names)), old, new, where)
    return None


def _name_of(name: str, count: int) -> str:
    if not name.isdigit():
        return name
    return f"output {name}" if count > 1 else "the output"


def _in_words(name: str, old: Tensor, new: Tensor, where: Tensor) -> str:
    if old.is_complex():
        where = where.any(-1)
    first = int(where.reshape(-1).to(torch.uint8).argmax())
    numbers = [tensor.reshape(-1)[first].item() for tensor in (new, old)]
    given, had = _told_apart(*numbers)
    if old.numel() == 1:
        return f"the re-run gives {name} {given}, the step had {had}"
    index = [int(i) for i in torch.unravel_index(torch.tensor(first, device="cpu"), old.shape)]
    count = int(where.sum())
    return (
        f"{count} of {old.numel()} elements of {name} {'differs' if count == 1 else 'differ'}: "
        f"at {index} the re-run gives {given}, the step had {had}"
    )


def _told_apart(a: Any, b: Any) -> tuple[str, str]:
    """Return two numbers with as few digits as show that they differ."""
    if not isinstance(a, float):
        return str(a), str(b)
    texts = [(f"{a:.{digits}g}", f"{b:.{digits}g}") for digits in DIGITS]
    return next(((x, y) for x, y in texts if x != y), texts[-1])
