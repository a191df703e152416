"""What an optimizer of MindSpore holds: its parameters, its state, its learning rate."""

from collections.abc import Iterator
from typing import Any

from mindspore import Parameter, ParameterTuple, Tensor

from trainsentry.collectors.shared.host_rows import state_quantity


def parameters_of(optimizer: Any) -> tuple[Parameter, ...]:
    """Return the parameters of an optimizer, in the order of the gradients that it takes."""
    return tuple(optimizer.parameters)


def state_of(optimizer: Any) -> Iterator[tuple[str, tuple[Parameter, ...]]]:
    """Yield the name (`moment1`, `exp_avg`, …) and the tensors of each kind of state, in the order of the parameters.

    State is what an optimizer holds as tuples of parameters of its own, as many as it moves.
    """
    parameters = parameters_of(optimizer)
    own = {id(parameter) for parameter in parameters}
    for name, value in vars(optimizer).items():
        is_state = isinstance(value, ParameterTuple) and len(value) == len(parameters)
        if is_state and not any(id(x) in own for x in value) and name != "learning_rate":
            yield state_quantity(name), tuple(value)


def learning_rate_of(optimizer: Any) -> "float | Tensor | None":
    """Return the (first group's) learning rate, as it stands; None where it is not a plain one."""
    groups = getattr(optimizer, "param_groups", None)
    rate = groups[0].get("lr") if groups else getattr(optimizer, "learning_rate", None)
    if isinstance(rate, (tuple, ParameterTuple)):
        rate = rate[0] if rate else None
    if isinstance(rate, (int, float)):
        return float(rate)
    return rate if isinstance(rate, Tensor) and rate.size == 1 else None


def scale_of(optimizer: Any) -> float:
    """Return what an optimizer divides its gradients by (its argument `loss_scale`)."""
    scale = getattr(optimizer, "loss_scale", 1.0)
    return float(scale) if isinstance(scale, (int, float)) and scale > 0 else 1.0
