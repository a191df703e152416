"""By which modules the passes of a training begin, where it does not call the model itself."""

from collections.abc import Iterable
from typing import Final

from torch import Tensor

from trainsentry.collectors.shared.model_graph import DataFlow, NamedModule

MOST: Final = 4
"""Entrances that are followed, the first of a step: an encoder each for text and images, an actor and a critic."""


class Entrances:
    """The modules by which passes begin: the root, or the first that get data where nobody calls the root to train.

    A policy evaluates its actions in a method of its own, and a LightningModule calls its parts. What enters these is
    the data then: tensors that no module made and that no gradient comes to. The first sampled step shows which modules
    they are. One that is also called inside another is none, as only a sampled step tells both apart, nor is one that
    also gets what another has made: a discriminator would take what its generator learns for data that change.
    """

    def __init__(self) -> None:
        self._found: set[tuple[str, int]] = set()
        self._others: set[tuple[str, int]] = set()  # that are called inside others, or get what these make
        self._is_decided = False

    def is_one(self, named: NamedModule) -> bool:
        """Whether passes begin by this module: a root, or one that was found."""
        return not named.name or (self._is_decided and (named.name, named.vpp_stage) in self._found)

    def may_be_one(self, named: NamedModule) -> bool:
        """Whether passes begin by this module, or it is not known yet by which they do."""
        return not self._is_decided or self.is_one(named)

    def note(self, named: NamedModule, given: Iterable[Tensor], flow: DataFlow) -> None:
        """Note that a pass of training begins by a module, with these tensors."""
        if not named.name:
            self._found.clear()
            self._is_decided = True
        elif not self._is_decided and not _are_data(given, flow):
            self._others.add((named.name, named.vpp_stage))
        elif not self._is_decided and len(self._found) < MOST:
            self._found.add((named.name, named.vpp_stage))

    def note_inner(self, named: NamedModule) -> None:
        """Note that a module is called inside another one."""
        if not self._is_decided:
            self._others.add((named.name, named.vpp_stage))

    def end_step(self) -> None:
        """Note that a sampled step has ended: what its passes began by is known."""
        if self._found and not self._is_decided:
            self._found -= self._others
            self._is_decided = True


def _are_data(given: Iterable[Tensor], flow: DataFlow) -> bool:
    tensors = list(given)
    return bool(tensors) and not any(tensor.requires_grad or flow.is_produced(tensor) for tensor in tensors)
