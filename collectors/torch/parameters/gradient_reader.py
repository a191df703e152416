"""Reads the gradients that optimizers take; one unchanged since an optimizer last took it is stale and has no row."""

import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from torch import Tensor

from trainsentry.collectors.series import GRADIENT
from trainsentry.collectors.torch.rows.local_tensor import version_of
from trainsentry.collectors.torch.rows.step_rows import StepRows
from trainsentry.collectors.torch.sharding.local_shards import Fragment, NamedParameter

MAIN_GRADIENTS: Final = ("decoupled_grad", "main_grad")
"""Attributes of a parameter from which optimizers take the gradient when `grad` is empty, in their order."""


def gradient_of(parameter: Tensor) -> Tensor | None:
    """Return the gradient that an optimizer takes of a parameter."""
    return parameter.grad if parameter.grad is not None else _main_gradient(parameter)


def _main_gradient(parameter: Tensor) -> Tensor | None:
    found = (getattr(parameter, name, None) for name in MAIN_GRADIENTS)
    return next((x for x in found if isinstance(x, Tensor)), None)


_GRAD: Final = operator.attrgetter("grad")
_VERSION: Final = operator.attrgetter("_version")

MOST_LISTS: Final = 64
"""Lists of parameters that are remembered; then all are forgotten. An optimizer has one, a wrapper that steps its
groups in turn one for each."""


@dataclass(eq=False, slots=True)
class _OwnedList:
    """What follows from a list of an optimizer's parameters; `series` has the ids of their rows by micro-step."""

    owned: Sequence[NamedParameter]
    tensors: list[Tensor]
    keys: list[int]
    fragments: "list[Fragment | None] | None"
    series: dict[int, list[int]] = field(default_factory=dict)


def _no_longer_there() -> None:
    """Stand for the gradient of a parameter that no optimizer has taken one of."""


class GradientReader:
    """Reads gradients, and remembers which of them an optimizer has taken.

    Each step asks many parameters the same few things, so that the usual case, in which each has a fresh gradient, asks
    them of the list: nothing of Python runs for a single parameter.
    """

    def __init__(self, rows: StepRows) -> None:
        self.rows = rows
        # By the id of the parameter, as a tensor's own hash is slow.
        self._taken: dict[int, Callable[[], Tensor | None]] = {}
        self._versions: dict[int, int | None] = {}
        self._lists: dict[int, _OwnedList] = {}

    def read(self, parameters: Sequence[tuple[NamedParameter, int]], grad_scale: Tensor | None) -> None:
        """Append a row for each (parameter, micro-step): its gradient divided by `grad_scale`, None for no scaling."""
        ids, owners, gradients = [], [], []
        for named, micro_step in parameters:
            gradient = gradient_of(named.parameter)
            if gradient is not None:
                ids.append(self.rows.parameter_ids.id_of(named, GRADIENT, micro_step))
                owners.append(named)
                gradients.append(gradient)
        self.rows.add_parameters(ids, owners, gradients, grad_scale)

    def read_tensors(
        self, parameters: Sequence[NamedParameter], gradients: Sequence[Tensor], grad_scale: Tensor | None
    ) -> None:
        """Append a row for each parameter's gradient, given as a separate tensor that begins with the local part."""
        ids = [self.rows.parameter_ids.id_of(named, GRADIENT) for named in parameters]
        parts = [
            x.detach().reshape(-1)[: p.fragment.numel] if p.fragment is not None else x
            for p, x in zip(parameters, gradients, strict=True)
        ]
        self.rows.add_many(ids, parts, grad_scale, layouts=self.rows.layouts_of(parameters))

    def read_taken(self, parameters: Sequence[NamedParameter], micro_step: int, grad_scale: Tensor | None) -> None:
        """Append a row for each gradient that an optimizer takes, unless it is stale."""
        known = self._known(parameters)
        gradients = list(map(_GRAD, known.tensors))
        if self._take_all(known.keys, gradients):
            self.rows.add_many(self._series(known, micro_step), gradients, grad_scale, fragments=known.fragments)
        else:
            self.read_fresh([(named, micro_step) for named in parameters], grad_scale)

    def read_fresh(self, parameters: Sequence[tuple[NamedParameter, int]], grad_scale: Tensor | None) -> None:
        """Do the same of pairs of a parameter and its micro-step, some of which may have no fresh gradient."""
        fresh: dict[int, bool] = {}  # a flat parameter holds many
        for named, _ in parameters:
            if id(named.parameter) not in fresh:
                fresh[id(named.parameter)] = self._take(named.parameter)
        self.read([pair for pair in parameters if fresh[id(pair[0].parameter)]], grad_scale)

    def _known(self, parameters: Sequence[NamedParameter]) -> _OwnedList:
        known = self._lists.get(id(parameters))
        if known is None or known.owned is not parameters:
            if len(self._lists) >= MOST_LISTS:
                self._lists.clear()
            tensors, fragments = [p.parameter for p in parameters], [p.fragment for p in parameters]
            known = _OwnedList(parameters, tensors, list(map(id, tensors)), fragments if any(fragments) else None)
            self._lists[id(parameters)] = known
        return known

    def _series(self, known: _OwnedList, micro_step: int) -> list[int]:
        ids = known.series.get(micro_step)
        if ids is None:
            ids = [self.rows.parameter_ids.id_of(named, GRADIENT, micro_step) for named in known.owned]
            known.series[micro_step] = ids
        return ids

    def _take_all(self, keys: list[int], gradients: list[Any]) -> bool:
        """Remember the gradients if all are there and fresh; return whether they are."""
        try:
            versions, references = list(map(_VERSION, gradients)), list(map(weakref.ref, gradients))
        except (AttributeError, RuntimeError):  # there is none, or it is an inference tensor
            return False
        taken = [self._taken.get(key, _no_longer_there)() for key in keys]
        same = list(map(operator.is_, taken, gradients))
        if True in same and any(s and self._versions[k] == v for s, k, v in zip(same, keys, versions, strict=True)):
            return False
        self._taken.update(zip(keys, references, strict=True))
        self._versions.update(zip(keys, versions, strict=True))
        return True

    def _take(self, parameter: Tensor) -> bool:
        """Remember a parameter's gradient if it is there and fresh; return whether it is."""
        gradient = gradient_of(parameter)
        if gradient is None:
            return False
        key, version = id(parameter), version_of(gradient)
        is_same = self._taken.get(key, _no_longer_there)() is gradient
        if is_same and version is not None and self._versions[key] == version:
            return False
        self._taken[key], self._versions[key] = weakref.ref(gradient), version
        return True
