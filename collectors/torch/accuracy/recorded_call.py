"""The results that a training step recorded: outputs, and gradients at the arguments, as its device computed them."""

from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor

from trainsentry.collectors.calls.both_sides import CallResults
from trainsentry.collectors.calls.call_check import NotComparableError, UnusableCallError
from trainsentry.collectors.torch.accuracy.call_inputs import InputBuilder
from trainsentry.collectors.torch.accuracy.call_run import BuiltCall, flat_values

FIRST_PLACES: Final = "first_places"
"""The member of a forward entry that becomes `BuiltCall.first_places`."""


def first_places_in(forward: Mapping[str, Any]) -> list[int] | None:
    """Return the recorded `BuiltCall.first_places`; None where every tensor is passed once.

    Raises:
        UnusableCallError: when the entry holds anything else.

    """
    places = forward.get(FIRST_PLACES)
    if places is None:
        return None
    if not isinstance(places, list) or not all(isinstance(p, int) and 0 <= p < len(places) for p in places):
        raise UnusableCallError(f"{FIRST_PLACES} is {places!r}, expected a list of places")
    return places


def recorded_results(
    builder: InputBuilder, call: BuiltCall, forward: Mapping[str, Any], backward: Mapping[str, Any] | None
) -> CallResults:
    """Return the results that a dump holds.

    Raises:
        NotComparableError: for a call without a recorded result.
        UnusableCallError: for tensors that are missing or damaged.

    """
    described = [value for value in forward.get("output") or [] if value is not None]
    if not described:
        raise NotComparableError("returned nothing that was recorded")
    outputs = flat_values(builder.build(described))
    if call.gradients is None or backward is None:
        return CallResults(outputs, [])
    found = builder.build(backward.get("output") or [])
    gradients = [g if isinstance(g, Tensor) else None for g in found]
    if call.first_places is not None and len(call.first_places) == len(gradients):  # each place shows the whole sum
        gradients = [
            g if first == i else None for i, (first, g) in enumerate(zip(call.first_places, gradients, strict=True))
        ]
    return CallResults(outputs, gradients)
