"""Finds weights whose cast several calls under autocast share: autograd has one gradient for all of them."""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor


class SharedCasts:
    """Counts the calls under autocast that use a weight.

    Autocast keeps the cast of a float32 leaf until its region ends, so a second call that uses the weight adds its part
    to the gradient of the same cast, and what a call's backward pass sends to the weight is the sum of all. A backward
    pass uses the cast up: the calls after it, as of the next micro-step, have another one.
    """

    def __init__(self) -> None:
        self._casts: dict[int, int] = {}
        self._uses: Counter[tuple[int, int]] = Counter()
        self._weights: dict[str, list[tuple[int, tuple[int, int]]]] = {}
        self._kept: list[Tensor] = []

    def note(self, call: str, tensors: Sequence[Tensor]) -> None:
        """Note the weights among a call's tensors."""
        for place, tensor in enumerate(tensors):
            if _is_cast_once(tensor):
                if id(tensor) not in self._casts:
                    self._casts[id(tensor)] = 0
                    self._kept.append(tensor)  # so that no other tensor gets its identity
                cast = (id(tensor), self._casts[id(tensor)])
                self._uses[cast] += 1
                self._weights.setdefault(call, []).append((place, cast))

    def end(self, call: str) -> None:
        """Note that the backward pass of a call is over."""
        for _, (weight, number) in self._weights.get(call, ()):
            if self._casts[weight] == number:
                self._casts[weight] += 1

    def places(self, call: str) -> list[int]:
        """Return the places of a call's tensors whose gradient is that of several calls."""
        return [place for place, cast in self._weights.get(call, ()) if self._uses[cast] > 1]

    def forget(self) -> None:
        """Forget all calls: their step is over."""
        for known in (self._casts, self._uses, self._weights, self._kept):
            known.clear()


def _is_cast_once(tensor: Tensor) -> bool:
    """Whether autocast would keep the cast of a tensor."""
    if tensor.dtype is not torch.float32 or not tensor.is_leaf or not tensor.requires_grad:
        return False
    return torch.is_autocast_enabled(tensor.device.type) and torch.is_autocast_cache_enabled()
