"""Finds the operation that a name in a dump stands for; anything but an operation on tensors is refused."""

import re
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from trainsentry.collectors.calls.call_check import NotComparableError, UnusableCallError
from trainsentry.collectors.calls.rebuilt_values import split_name
from trainsentry.collectors.torch.device.npu import torch_npu

_HOMES: Final[dict[str, tuple[Any, ...]]] = {
    "Functional": (torch.nn.functional,),
    "Tensor": (Tensor,),
    "Torch": (torch, torch.linalg, torch.fft, torch.special),
    "VF": (torch._VF,),
    "Aten": (torch.ops.aten,),
}
"""Where the functions of each prefix are looked for, in this order."""


def _named(reason: str, text: str) -> dict[str, str]:
    return dict.fromkeys(text.split(), reason)


_NOT_COMPARABLE: Final = {
    **_named(
        "random",
        """alpha_dropout bernoulli bernoulli_ cauchy_ exponential_ feature_alpha_dropout feature_dropout geometric_
        gumbel_softmax log_normal_ multinomial normal normal_ poisson rand rand_like randint randint_like randn
        randn_like random_ randperm uniform_""",
    ),
    **_named(
        "changes the view of its argument in place",
        """as_strided_ resize_ resize_as_ set_ squeeze_ swapaxes_ swapdims_ t_ transpose_ unsqueeze_""",
    ),
    **_named(
        "returns uninitialised memory",
        "empty empty_like empty_permuted empty_quantized empty_strided new_empty new_empty_strided resize",
    ),
    **_named(
        "leaves torch",
        """__array__ __dlpack__ __reduce__ __reduce_ex__ __setstate__ apply_ data_ptr from_file item map2_ map_ numpy
        pin_memory record_stream register_hook share_memory_ storage tolist untyped_storage""",
    ),
}
"""Operations that are not run, with the reason."""

_DROPOUTS: Final = frozenset({"dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "native_dropout"})
"""Random calls that msprobe compares by their share of zeros."""


def is_dropout(operation: str) -> bool:
    """Whether an operation's results are compared by their share of zeros."""
    return operation in _DROPOUTS


def names_an_operation(name: str) -> bool:
    """Whether torch has an operation of this name: `linear`, `Functional.linear` or `Functional.linear.3`.

    Of other prefixes than torch's own nothing is known, so their names are taken as they are.
    """
    stem = re.sub(r"\.\d+$", "", name)
    prefix, _, operation = stem.partition(".")
    if not operation:
        return any(hasattr(home, stem) for homes in _HOMES.values() for home in homes)
    return prefix not in _HOMES or any(hasattr(home, operation) for home in _HOMES[prefix])


def operation_names() -> list[str]:
    """Return the names of torch's operations, with and without their prefixes."""
    found = {(prefix, name) for prefix, homes in _HOMES.items() for home in homes for name in dir(home)}
    public = sorted((prefix, name) for prefix, name in found if not name.startswith("_"))
    return [name for _, name in public] + [f"{prefix}.{name}" for prefix, name in public]


_SAME_IN_LINALG: Final = frozenset({"det", "matmul", "matrix_exp", "matrix_power", "slogdet"})
"""Functions of torch.linalg that do what torch's function of the same name does."""


def is_ambiguous(call: str) -> bool:
    """Whether torch and torch.linalg have functions of this name that do different things, as `svd` of both.

    >>> is_ambiguous("Torch.svd.0"), is_ambiguous("Torch.matmul.0"), is_ambiguous("Functional.linear.0")
    (True, False, False)
    """
    prefix, operation = split_name(call)
    both = hasattr(torch, operation) and hasattr(torch.linalg, operation)
    return prefix == "Torch" and both and operation not in _SAME_IN_LINALG


def function_of(call: str) -> Callable[..., Any]:
    """Return the operation of a call such as `Functional.linear.0`.

    Raises:
        NotComparableError: for collectives, random operations and others that are not run.
        UnusableCallError: when this torch has no such operation.

    """
    prefix, operation = split_name(call)
    if prefix in ("Distributed", "MindSpeed"):
        raise NotComparableError("communicates with other ranks")
    if operation in _NOT_COMPARABLE:
        raise NotComparableError(_NOT_COMPARABLE[operation])
    homes = _homes(prefix)
    for home in homes:
        function: Any = getattr(home, operation, None) if "." not in operation else None
        if function is not None and _is_operation(prefix, operation, function):
            return function  # type: ignore[no-any-return]
    if any(hasattr(home, operation) for home in homes):
        raise NotComparableError("is no operation on tensors")
    raise UnusableCallError(f"torch {torch.__version__} has no {operation} in {_place(homes)}")


def _homes(prefix: str) -> tuple[Any, ...]:
    if prefix == "NPU":
        npu = torch_npu()
        if npu is None:
            raise NotComparableError("needs torch_npu, which is not installed")
        return (npu,)
    homes = _HOMES.get(prefix)
    if homes is None:
        raise NotComparableError(f"calls of {prefix} are not checked")
    return homes


def _place(homes: tuple[Any, ...]) -> str:
    names = (str(getattr(home, "__name__", getattr(home, "name", home))) for home in homes)
    return " or ".join(names)


_OPERATORS: Final = re.compile(
    r"__[ir]?(add|sub|mul|truediv|div|floordiv|mod|pow|matmul|and|or|xor|lshift|rshift)__|__(neg|pos|abs|invert)__"
)
"""Operators of tensors, some of which torch does not list as overridable."""

_ALSO: Final = frozenset(
    {"hardsigmoid", "hardswish", "logsigmoid", "upsample", "upsample_bilinear", "upsample_nearest"}
)
"""Functions of torch.nn.functional that torch does not list either, besides those that work in place."""


def _is_operation(prefix: str, operation: str, function: Any) -> bool:
    """Whether a function computes with tensors: told by its name, so that a replaced function is one too."""
    if prefix == "Aten":
        return isinstance(function, torch._ops.OpOverloadPacket)
    if isinstance(function, type) or not callable(function):
        return False
    if prefix == "NPU" or operation in _overridable() or operation.removesuffix("_") in _overridable():
        return True
    if prefix == "Tensor":
        return _OPERATORS.fullmatch(operation) is not None
    if prefix == "Functional" and operation in _ALSO:
        return True
    modules = (torch.linalg, torch.fft, torch.special)
    known = any(getattr(module, operation, None) is function for module in modules)
    known = known or id(function) in _overridable_objects()
    return known or (prefix == "Torch" and hasattr(torch._C._VariableFunctions, operation))


@cache
def _overridable() -> frozenset[str]:
    """Return the names of the functions that a tensor class can override."""
    return frozenset(getattr(function, "__name__", "") for function in _overrides())


@cache
def _overridable_objects() -> frozenset[int]:
    """Return the identities of these functions, which are kept alive; one that was replaced has another name."""
    return frozenset(map(id, _overrides()))


def _overrides() -> dict[Any, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some names are deprecated
        return torch.overrides.get_testing_overrides()
