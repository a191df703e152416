"""Finds the model's parameter of each fp32 master that an optimizer updates in its place.

A master is a copy of a half-precision parameter. The optimizer holds the copies, and the loop, apex or a wrapper copies
gradients to them and weights back.
"""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

MASTER_ATTRIBUTES: Final = ("main_param", "master_param")
"""Attributes in which libraries keep a parameter's master (Megatron, and those after it)."""

APEX_LISTS: Final = ("all_fp16_params", "all_fp32_from_fp16_params")
"""Lists in the `_amp_stash` that apex's amp leaves on an optimizer: parameters, and their masters in the same order."""

_known: "weakref.WeakKeyDictionary[Optimizer, list[tuple[weakref.ref[Tensor], Tensor]]]" = weakref.WeakKeyDictionary()
"""Masters found before: while the loop has not copied the weights back, values differ."""


def masters_of(parameters: Sequence[nn.Parameter], optimizers: Iterable[Any]) -> dict[int, Tensor]:
    """Map the id of each of a model's `parameters` that has a master in one of the optimizers to the master.

    Compares values where the library does not tell, and so waits for the device, once.
    """
    found: dict[int, Tensor] = {}
    for optimizer in optimizers:
        if isinstance(optimizer, Optimizer):
            for owner, master in _pairs(parameters, optimizer):
                found.setdefault(id(owner), master)
    return found


def _pairs(parameters: Sequence[nn.Parameter], optimizer: Optimizer) -> list[tuple[Tensor, Tensor]]:
    own = {id(p) for p in parameters}
    foreign = {id(p): p for group in optimizer.param_groups for p in group["params"] if id(p) not in own}
    if not foreign:
        return []
    found: list[tuple[Tensor, Tensor]] = []
    taken = {id(p) for group in optimizer.param_groups for p in group["params"] if id(p) in own}
    named = (*_remembered(optimizer), *_told(parameters, optimizer))
    equal = _equal([p for p in parameters if p.requires_grad], list(foreign.values()))
    for pairs in (named, equal):
        for owner, master in pairs:
            if id(owner) in own and id(owner) not in taken and id(master) in foreign:
                del foreign[id(master)]
                taken.add(id(owner))
                found.append((owner, master))
        if not foreign:
            break
    if found:
        _known[optimizer] = [(weakref.ref(owner), master) for owner, master in found]
    return found


def _remembered(optimizer: Optimizer) -> Iterator[tuple[Tensor, Tensor]]:
    for ref, master in _known.get(optimizer, ()):
        owner = ref()
        if owner is not None:
            yield owner, master


def _told(parameters: Sequence[nn.Parameter], optimizer: Optimizer) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the pairs that a library has noted on the parameter or on the optimizer."""
    for parameter in parameters:
        for attribute in MASTER_ATTRIBUTES:
            master = getattr(parameter, attribute, None)
            if isinstance(master, Tensor):
                yield parameter, master
    stash = getattr(optimizer, "_amp_stash", None)
    halves, masters = (getattr(stash, name, ()) for name in APEX_LISTS)
    yield from zip(halves, masters, strict=False)


def _equal(parameters: list[nn.Parameter], masters: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each master with the first parameter, from the last pair on, that has its shape and its rounded values."""
    start = 0
    for master in masters:
        for step in range(len(parameters)):
            place = (start + step) % len(parameters)
            if _is_copy(master, parameters[place]):
                start = place + 1
                yield parameters[place], master
                break


def _is_copy(master: Tensor, parameter: Tensor) -> bool:
    ours, theirs = (getattr(x, "_local_tensor", x).detach() for x in (master, parameter))  # a DTensor's own part
    if ours.shape != theirs.shape or ours.device != theirs.device or ours.dtype.itemsize <= theirs.dtype.itemsize:
        return False  # a copy of the same precision is no master: it is another model
    return torch.equal(ours.to(theirs.dtype), theirs)
