"""Finds the operation of MindSpore that a name in a dump stands for; anything else is refused."""

import importlib
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, Final

import mindspore as ms
from mindspore import Tensor, ops

from trainsentry.collectors.calls.call_check import NotComparableError, UnusableCallError
from trainsentry.collectors.calls.rebuilt_values import split_name
from trainsentry.collectors.mindspore.calls.operations import (
    HOMES,
    HOMES_OF_TORCH,
    LEFT_OUT,
    OPERATORS,
    PRIMITIVE,
    RANDOM_KERNELS,
)
from trainsentry.collectors.shared.adapted_torch import adapted_torch


def _named(reason: str, text: str) -> dict[str, str]:
    return dict.fromkeys(text.split(), reason)


_NOT_COMPARABLE: Final = {
    **_named(
        "random",
        """alpha_dropout bernoulli bernoulli_ choice_with_mask dropout1d dropout2d dropout3d exponential_
        feature_alpha_dropout gamma gumbel_softmax laplace log_normal_ log_uniform_candidate_sampler multinomial
        multinomial_with_replacement normal normal_ poisson rand rand_ext rand_like randint randint_like randn
        randn_like random_ random_categorical random_gamma random_poisson randperm rrelu shuffle standard_laplace
        standard_normal uniform uniform_ uniform_candidate_sampler""",
    ),
    **_named("returns uninitialised memory", "empty empty_like new_empty"),
    **_named("changes the view of its argument in place", "resize_ squeeze_ swapaxes_ unsqueeze_"),
}
"""Operations that are not run, with the reason."""

_DROPOUTS: Final = frozenset({"dropout", "Dropout"})
"""Random calls that msprobe compares by their share of zeros."""


def is_dropout(operation: str) -> bool:
    """Whether an operation's results are compared by their share of zeros."""
    return operation in _DROPOUTS


def function_of(call: str, attributes: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """Return the operation of a call such as `Mint.matmul.0`; `attributes` are those a primitive was made with.

    Raises:
        NotComparableError: for collectives, random operations and others that are not run.
        UnusableCallError: when this MindSpore has no such operation.

    """
    prefix, operation = split_name(call)
    if prefix in ("Distributed", "MintDistributed"):
        raise NotComparableError("communicates with other ranks")
    if operation in _NOT_COMPARABLE:
        raise NotComparableError(_NOT_COMPARABLE[operation])
    if prefix == PRIMITIVE:
        return _primitive(operation.rpartition(".")[2], attributes)
    homes = _homes(prefix)
    for home in homes:
        function = getattr(home, operation, None) if "." not in operation else None
        if function is not None and _is_operation(prefix, operation, function):
            return function  # type: ignore[no-any-return]
    if any(hasattr(home, operation) for home in homes):
        raise NotComparableError("is no operation on tensors")
    places = " or ".join(getattr(home, "__name__", str(home)) for home in homes)
    raise UnusableCallError(f"MindSpore {ms.__version__} has no {operation} in {places}")


def _homes(prefix: str) -> list[Any]:
    torch = adapted_torch()
    if prefix == "Tensor":
        return [Tensor if torch is None else torch.Tensor]
    known = HOMES if torch is None else HOMES_OF_TORCH
    found = [_module(path) for name, path in known if name == prefix]
    homes = [module for module in found if module is not None]
    if not homes:
        raise NotComparableError(f"calls of {prefix} are not checked")
    return homes


def _module(path: str) -> Any:
    try:
        return importlib.import_module(path)
    except ImportError:
        return None


def _is_operation(prefix: str, operation: str, function: Any) -> bool:
    """Whether the debugger records a function as an operation, told as it does."""
    if operation in LEFT_OUT:
        return False
    if prefix == "Tensor":
        kind = type(function).__name__
        return kind in {"function", "method_descriptor"} and (operation[0] != "_" or _is_operator(operation))
    return isinstance(function, types.FunctionType) and operation[0] != "_"


def _is_operator(name: str) -> bool:
    return OPERATORS.fullmatch(name) is not None


def _primitive(name: str, attributes: Mapping[str, Any] | None) -> Callable[..., Any]:
    """Return a primitive; msprobe's dumps do not say what it was made with."""
    kind = getattr(ops, name, None)
    if not (isinstance(kind, type) and issubclass(kind, ops.Primitive)):
        raise UnusableCallError(f"MindSpore {ms.__version__} has no primitive {name}")
    if RANDOM_KERNELS.fullmatch(name):
        raise NotComparableError("random")
    needed = len(inspect.signature(vars(kind).get("__init__", kind)).parameters) > 1
    if attributes is None and needed:
        raise NotComparableError("is a primitive whose attributes were not recorded")
    try:
        return kind(**(attributes or {}))  # type: ignore[no-any-return]
    except (TypeError, ValueError) as error:
        raise UnusableCallError(f"{name} cannot be made: {error}".splitlines()[0]) from None
