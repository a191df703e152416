"""Intercepts operations that Python code calls, by patching their functions while a dump is taken.

A lower level (`MsDispatchMode`) does not give a call's own gradients, and splits a function's call into many
operations. A compiler would compile the patches, so they are removed during each compiled call.
"""

import functools
import importlib
import re
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, Final

from mindspore import Tensor, nn, ops

from trainsentry.collectors.calls.call_stacks import is_ours
from trainsentry.collectors.mindspore.hooks.function_patches import (
    Wrap,
    patch,
    unpatch,
    unwatch_compiled,
    watch_compiled,
)
from trainsentry.collectors.shared.adapted_torch import adapted_torch

CallOperation = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

HOMES: Final = (
    ("MintFunctional", "mindspore.mint.nn.functional"),
    ("MintDistributed", "mindspore.mint.distributed"),
    ("Distributed", "mindspore.communication.comm_func"),
    ("Mint", "mindspore.mint.linalg"),
    ("Mint", "mindspore.mint.special"),
    ("Mint", "mindspore.mint"),
    ("Functional", "mindspore.ops.functional"),
    ("Functional", "mindspore.ops"),
)
"""Prefixes of names, each with the module whose functions have it."""

HOMES_OF_TORCH: Final = (
    ("Functional", "torch.nn.functional"),
    ("Distributed", "torch.distributed"),
    ("Torch", "torch"),
)
"""The same under MSAdapter, whose names are torch's."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


LEFT_OUT: Final = _names(
    """
    __array__ __bool__ __contains__ __deepcopy__ __dir__ __float__ __format__ __getitem__ __getstate__ __hash__
    __index__ __init__ __int__ __invert__ __iter__ __len__ __neg__ __pos__ __reduce__ __reduce_ex__ __repr__ __round__
    __setstate__ __sizeof__ __str__ asnumpy assign_value assign_value_cpp contiguous custom_vjp data_ptr data_sync
    derivative dim dtype element_size flush_from_cache from_numpy get_bytes get_grad grad hooks init_data is_complex
    is_contiguous is_floating_point is_init is_pinned is_sequence_shape_unknown is_sequence_value_unknown is_shared
    is_signed is_tensor item itemset jacfwd jacrev jvp move_to ndimension nelement new_empty new_full new_ones new_zeros
    numel numpy offload offload_file_path pin_memory print_ rank register_hook requires_grad_ set_ set_cast_dtype
    set_const_arg set_device_address set_dtype set_init_flag shape size stop_gradient storage storage_offset stride
    to_dlpack tolist type untyped_storage value value_and_grad vjp vmap wait_pipeline"""
)
"""Functions that compute nothing from values, or that run a whole function of the user's program."""

_IN_PLACE: Final = re.compile(
    r".*[a-z0-9]_|__i\w+__|__setitem__|assign\w*|scatter_(nd_)?(update|add|sub|mul|div|max|min)"
)

OPERATORS: Final = re.compile(
    r"__(r|i)?(add|sub|mul|truediv|floordiv|mod|pow|matmul)__|__(and|or|xor|eq|ne|lt|le|gt|ge|abs)__"
)


RANDOM_KERNELS: Final = re.compile(
    r".*(Rand|Dropout|Normal(?!iz)|Uniform|Bernoulli|Multinomial|Poisson|Gamma$|Laplace|Sampler|Exponential|Cauchy).*"
)
"""Kernels that draw random numbers: they keep their state for themselves, where nobody can read or restore it."""


def changes_in_place(stem: str) -> bool:
    """Whether a call writes into its arguments.

    >>> changes_in_place("Tensor.copy_"), changes_in_place("Tensor.__iadd__"), changes_in_place("Mint.add")
    (True, True, False)
    """
    return _IN_PLACE.fullmatch(stem.rpartition(".")[2]) is not None


class Operations:
    """Routes calls through `call_operation(stem, function, args, kwargs)`; calls inside a call are not intercepted.

    It intercepts functions called through their module (`mint.add`, `ops.relu`), methods and operators of tensors,
    primitives, and compiled functions (`Jit`), but not a function that was imported by its name.
    """

    def __init__(self, call_operation: CallOperation) -> None:
        self._call_operation = call_operation
        self._inside = False
        self._thread = 0
        self._undo: list[tuple[Any, str, Wrap]] = []

    def start(self) -> None:
        """Start intercepting the calls of this thread.

        Raises:
            RuntimeError: when this version of MindSpore calls compiled functions in an unknown way.

        """
        if self._undo:
            return
        self._thread = threading.get_ident()
        watch_compiled(self._compiled)
        for stem, owner, name in _functions():
            wrap = functools.partial(self._wrapped, stem)
            patch(owner, name, wrap)
            self._undo.append((owner, name, wrap))

    def stop(self) -> None:
        """Restore every patched function."""
        while self._undo:
            unpatch(*self._undo.pop())
        unwatch_compiled(self._compiled)

    def _wrapped(self, stem: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not self._intercepts(sys._getframe(1)):
                return function(*args, **kwargs)
            if stem != PRIMITIVE:
                return self._call(stem, function, args, kwargs)
            name = type(args[0]).__name__
            if name in _IGNORED:
                return function(*args, **kwargs)
            return self._call(f"{PRIMITIVE}.{name}", functools.partial(function, args[0]), args[1:], kwargs)

        return wrapper

    def _intercepts(self, caller: types.FrameType) -> bool:
        return not self._inside and threading.get_ident() == self._thread and not is_ours(caller.f_code)

    def _call(self, stem: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._inside = True
        try:
            return self._call_operation(stem, function, args, kwargs)
        finally:
            self._inside = False

    def _compiled(self, executor: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._inside or threading.get_ident() != self._thread or _is_an_optimizers(executor):
            return run(*args, **kwargs)
        return self._call(f"Jit.{executor.fn.__name__}", run, args, kwargs)


PRIMITIVE: Final = "Primitive"
ATTRIBUTES: Final = "init_attrs"
"""MindSpore's word for what a primitive was made with, and the member of a dump's entry that has it."""

_IGNORED: Final = _names(
    "HookBackward TensorDump Print Shape DType Rank GetitemTensorIndexInfo SetitemTensorIndexInfo typeof"
)
"""Primitives that the monitor itself calls, or that only query tensors."""


def attributes_of(stem: str, function: Any) -> dict[str, Any] | None:
    """Return what the primitive of a call was made with; None for other calls. Without it `MatMul` is half a name."""
    if not stem.startswith(f"{PRIMITIVE}.") or not isinstance(function, functools.partial):
        return None
    found = getattr(function.args[0], ATTRIBUTES, None) if function.args else None
    return dict(found) if isinstance(found, dict) else None


PatchedFunction = tuple[str, Any, str]
"""A function's name in a dump, its owner, and its attribute name there."""

_custom: dict[tuple[int, str], PatchedFunction] = {}
_known: list[PatchedFunction] = []


def register_custom(owner: Any, name: str, prefix: str | None) -> None:
    """Also intercept a function of a module or class, from the next dump on.

    Raises:
        AttributeError: when there is no such function.

    """
    if not callable(getattr(owner, name, None)):
        raise AttributeError(f"register_custom_api: {owner!r} has no function {name!r}")  # noqa: TRY004 - not there
    package = prefix or str(getattr(owner, "__name__", type(owner).__name__)).partition(".")[0]
    _custom[id(owner), name] = (f"{package}.{name}", owner, name)


def forget_custom(owner: Any, name: str) -> None:
    """Undo `register_custom`, from the next dump on."""
    _custom.pop((id(owner), name), None)


def _functions() -> Iterator[PatchedFunction]:
    """Yield the functions to patch."""
    if not _known:
        _known.extend([*_of_modules(), *_of_tensors()])
        _known.extend(_primitives() if adapted_torch() is None else ())
    yield from _known
    yield from _custom.values()


def _of_modules() -> Iterator[PatchedFunction]:
    """Yield the functions of each module under the module's prefix; mint and ops share many."""
    for prefix, path in HOMES if adapted_torch() is None else HOMES_OF_TORCH:
        try:
            module = importlib.import_module(path)
        except ImportError:
            continue
        for name, function in sorted(vars(module).items()):
            if isinstance(function, types.FunctionType) and name[0] != "_" and name not in LEFT_OUT:
                yield f"{prefix}.{name}", module, name


def _of_tensors() -> Iterator[PatchedFunction]:
    torch = adapted_torch()
    kind_of_tensor: Any = Tensor if torch is None else torch.Tensor
    for name in sorted(dir(kind_of_tensor)):
        method = getattr(kind_of_tensor, name)
        kind = type(method).__name__
        if kind not in {"function", "method_descriptor"} or name in LEFT_OUT:
            continue
        if name[0] != "_" or OPERATORS.fullmatch(name):
            yield f"Tensor.{name}", kind_of_tensor, name


def _primitives() -> Iterator[PatchedFunction]:
    """Yield `__call__` of primitives: many classes define their own."""
    classes: list[Any] = [ops.Primitive]
    while classes:
        kind = classes.pop()
        classes += kind.__subclasses__()
        call = vars(kind).get("__call__")
        if isinstance(call, types.FunctionType) and kind.__name__ not in _IGNORED:
            yield PRIMITIVE, kind, "__call__"


def _is_an_optimizers(executor: Any) -> bool:
    owner = getattr(executor.fn, "__self__", None) or executor.obj
    return isinstance(owner, nn.Optimizer)
