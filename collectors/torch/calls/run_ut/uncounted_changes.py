"""Finds tensors that changed between a call and its backward pass in a way that autograd does not count."""

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor, nn

from trainsentry.collectors.torch.calls.fact_values import KEYS
from trainsentry.collectors.torch.calls.tensor_facts import TensorFacts
from trainsentry.collectors.torch.rows.local_tensor import version_of

MOST_TENSORS: Final = 64
"""Tensors of a call that are read again at most: of lists of hundreds, the first ones tell."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """A tensor as a call saw it; without a reference, which would keep its memory in use."""

    tensor: "weakref.ref[Tensor]"
    version: int | None
    address: int
    facts: Mapping[str, Any]


Pair = tuple[Mapping[str, Any], Mapping[str, Any]]
"""What is known of a tensor from the call, and from its backward pass; statistics may arrive later."""


class UncountedChanges:
    """Reads the tensors of a call again at its backward pass, which computes with what they hold by then.

    A change through `.data`, or through an array that shares the memory, leaves autograd's count as it was, and no
    error is raised. Tensors that are gone, that were counted as changed (autograd would have refused), and parameters
    (whose memory belongs to the strategy of sharding) are not read again.
    """

    def __init__(self) -> None:
        self._facts = TensorFacts()
        self._seen: dict[str, list[_Seen]] = {}

    def note(self, call: str, tensors: Iterable[tuple[Tensor, Mapping[str, Any]]]) -> None:
        """Note tensors of a call, and what is known of each."""
        seen = self._seen.setdefault(call, [])
        for tensor, facts in tensors:
            if len(seen) < MOST_TENSORS and type(tensor) is not nn.Parameter and tensor.is_floating_point():
                seen.append(_Seen(weakref.ref(tensor), version_of(tensor), tensor.data_ptr(), facts))

    def read_again(self, call: str) -> list[Pair]:
        """Return what is known of the call's tensors from then and from now."""
        pairs: list[Pair] = []
        for seen in self._seen.pop(call, ()):
            tensor = seen.tensor()
            if tensor is None or version_of(tensor) != seen.version or tensor.data_ptr() != seen.address:
                continue
            if tensor.untyped_storage().nbytes():
                pairs.append((seen.facts, self._facts.describe(tensor)))
        self._facts.forget()
        return pairs

    def settle(self) -> None:
        """Fill in what was read on devices."""
        self._facts.settle()

    def forget(self) -> None:
        """Forget all calls: their step is over."""
        self._seen.clear()
        self._facts.forget()


def differ(pairs: Iterable[Pair]) -> bool:
    """Whether a tensor of the pairs has changed; NaN equals NaN."""
    return any(str(then[key]) != str(now[key]) for then, now in pairs for key in KEYS)
