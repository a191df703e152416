"""Which parameters an optimizer moves, in the order in which the backward pass reaches them."""

from collections.abc import Iterable, Mapping, Sequence

from torch import nn
from torch.optim import Optimizer

from trainsentry.collectors.settings import GRADIENTS
from trainsentry.collectors.targets import Selection
from trainsentry.collectors.torch.parameters.readers import parameters_of
from trainsentry.collectors.torch.sharding.local_shards import NamedParameter
from trainsentry.collectors.torch.sharding.model_names import ModelNames


class OptimizedParameters:
    """Finds the parameters of an optimizer that a part of the configuration selects.

    `order` is filled, while the first step runs, with each parameter's place in the backward pass.
    """

    def __init__(self, names: ModelNames, order: Mapping[nn.Parameter, int]) -> None:
        self.names = names
        self.order = order
        self._selections: Mapping[str, Selection] = {}
        self._lists: dict[tuple[str, int, int, int, int], list[NamedParameter]] = {}

    def choose(self, selections: Mapping[str, Selection]) -> None:
        """Take what each part selects."""
        self._selections = selections
        self._lists.clear()

    def selected(self, part: str, among: Iterable[NamedParameter] | None = None) -> list[NamedParameter]:
        """Return the parameters that a part selects, of all or of some."""
        chosen = self._selections[part].parameters
        return [p for p in (self.names.parameters if among is None else among) if p.name in chosen]

    def owned(self, part: str, optimizer: Optimizer) -> list[NamedParameter]:
        """Return the optimizer's parameters that `part` selects, in backward order once that is known; "" for all.

        The list is made anew only when the optimizer's groups or the known order have changed.
        """
        size = sum(len(group["params"]) for group in optimizer.param_groups)
        # A wrapper that steps one group after the other shows its optimizer another flat parameter each time.
        first = id(next(parameters_of(optimizer), None))
        key = (part, id(optimizer), size, len(self.order), first)
        found = self._lists.get(key)
        if found is None:
            names = self.names.by_parameter()
            owned = [named for p in parameters_of(optimizer) for named in names.get(p, ())]
            if part == GRADIENTS:
                owned.sort(key=lambda p: self.order.get(p.own, len(self.order)))
            found = self._lists[key] = self.selected(part, owned) if part else owned
        return found

    def nobodys(self, part: str, optimizers: Sequence[Optimizer]) -> list[NamedParameter]:
        """Return the parameters that `part` selects and no optimizer moves."""
        owned = {p for optimizer in optimizers for p in parameters_of(optimizer)}
        return [p for p in self.selected(part) if p.owner is None and p.parameter not in owned]
