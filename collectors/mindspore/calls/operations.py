"""Sees operations that are called from Python, by standing in for their functions while a dump is taken.

Below them (`MsDispatchMode`) a call's own gradients cannot be had, and one call of a function is many operations. A
compiler would compile the stand-ins, so they are taken away for as long as anything compiled is called.
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
    Make,
    forget_compiled,
    stand_in,
    take_away,
    watch_compiled,
)
from trainsentry.collectors.shared.adapted_torch import adapted_torch

Around = Callable[[str, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

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
"""Prefixes of names, and the modules whose functions carry them."""

HOMES_OF_TORCH: Final = (
    ("Functional", "torch.nn.functional"),
    ("Distributed", "torch.distributed"),
    ("Torch", "torch"),
)
"""The same where torch is MindSpore's: names are torch's."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


LEFT_OUT: Final = _words(
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
"""What computes nothing from values, or runs a whole function of the program's own."""

_IN_PLACE: Final = re.compile(
    r".*[a-z0-9]_|__i\w+__|__setitem__|assign\w*|scatter_(nd_)?(update|add|sub|mul|div|max|min)"
)

_OPERATORS: Final = re.compile(
    r"__(r|i)?(add|sub|mul|truediv|floordiv|mod|pow|matmul)__|__(and|or|xor|eq|ne|lt|le|gt|ge|abs)__"
)


def changes_in_place(stem: str) -> bool:
    """Whether a call writes into what it is given.

    >>> changes_in_place("Tensor.copy_"), changes_in_place("Tensor.__iadd__"), changes_in_place("Mint.add")
    (True, True, False)
    """
    return _IN_PLACE.fullmatch(stem.rpartition(".")[2]) is not None


class Operations:
    """Hands calls to `around(stem, function, args, kwargs)`, which makes them; those inside a call are not seen.

    Seen are functions that are reached through their module (`mint.add`, `ops.relu`), methods and operators of tensors,
    primitives, and functions that are compiled (`Jit`). Not seen is a function that was imported by its name.
    """

    def __init__(self, around: Around) -> None:
        self._around = around
        self._inside = False
        self._thread = 0
        self._undo: list[tuple[Any, str, Make]] = []

    def start(self) -> None:
        """See the calls of this thread from here on.

        Raises:
            RuntimeError: where it is not known how this version of MindSpore calls what is compiled.

        """
        if self._undo:
            return
        self._thread = threading.get_ident()
        watch_compiled(self._compiled)
        for stem, owner, name in _functions():
            make = functools.partial(self._stand_in, stem)
            stand_in(owner, name, make)
            self._undo.append((owner, name, make))

    def stop(self) -> None:
        """Put everything back as it was."""
        while self._undo:
            take_away(*self._undo.pop())
        forget_compiled(self._compiled)

    def _stand_in(self, stem: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def seen(*args: Any, **kwargs: Any) -> Any:
            if not self._sees(sys._getframe(1)):
                return function(*args, **kwargs)
            if stem != PRIMITIVE:
                return self._seen(stem, function, args, kwargs)
            name = type(args[0]).__name__
            if name in _UNSEEN:
                return function(*args, **kwargs)
            return self._seen(f"{PRIMITIVE}.{name}", functools.partial(function, args[0]), args[1:], kwargs)

        return seen

    def _sees(self, frame: types.FrameType) -> bool:
        return not self._inside and threading.get_ident() == self._thread and not is_ours(frame.f_code)

    def _seen(self, stem: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._inside = True
        try:
            return self._around(stem, function, args, kwargs)
        finally:
            self._inside = False

    def _compiled(self, executor: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._inside or threading.get_ident() != self._thread or _is_an_optimizers(executor):
            return run(*args, **kwargs)
        return self._seen(f"Jit.{executor.fn.__name__}", run, args, kwargs)


PRIMITIVE: Final = "Primitive"
_UNSEEN: Final = _words(
    "HookBackward TensorDump Print Shape DType Rank GetitemTensorIndexInfo SetitemTensorIndexInfo typeof"
)
"""Primitives that are ours, or that only ask about tensors."""

Named = tuple[str, Any, str]
"""What a function is called, where it hangs, and by which name."""

_custom: dict[tuple[int, str], Named] = {}
_known: list[Named] = []


def register_custom(owner: Any, name: str, prefix: str | None) -> None:
    """Have a function of a module or class seen as well, in the next dump.

    Raises:
        AttributeError: when there is none of that name.

    """
    if not callable(getattr(owner, name, None)):
        raise AttributeError(f"register_custom_api: {owner!r} has no function {name!r}")  # noqa: TRY004 - not there
    package = prefix or str(getattr(owner, "__name__", type(owner).__name__)).partition(".")[0]
    _custom[id(owner), name] = (f"{package}.{name}", owner, name)


def forget_custom(owner: Any, name: str) -> None:
    """See it no more."""
    _custom.pop((id(owner), name), None)


def _functions() -> Iterator[Named]:
    """Yield what is stood in for."""
    if not _known:
        _known.extend([*_of_modules(), *_of_tensors()])
        _known.extend(_primitives() if adapted_torch() is None else ())
    yield from _known
    yield from _custom.values()


def _of_modules() -> Iterator[Named]:
    """Yield functions under the prefix of the module that they are reached through: mint and ops share many."""
    for prefix, path in HOMES if adapted_torch() is None else HOMES_OF_TORCH:
        try:
            module = importlib.import_module(path)
        except ImportError:
            continue
        for name, function in sorted(vars(module).items()):
            if isinstance(function, types.FunctionType) and name[0] != "_" and name not in LEFT_OUT:
                yield f"{prefix}.{name}", module, name


def _of_tensors() -> Iterator[Named]:
    torch = adapted_torch()
    kind_of_tensor: Any = Tensor if torch is None else torch.Tensor
    for name in sorted(dir(kind_of_tensor)):
        method = getattr(kind_of_tensor, name)
        kind = type(method).__name__
        if kind not in {"function", "method_descriptor"} or name in LEFT_OUT:
            continue
        if name[0] != "_" or _OPERATORS.fullmatch(name):
            yield f"Tensor.{name}", kind_of_tensor, name


def _primitives() -> Iterator[Named]:
    """Yield the calls of primitives: many classes have one of their own."""
    classes: list[Any] = [ops.Primitive]
    while classes:
        kind = classes.pop()
        classes += kind.__subclasses__()
        call = vars(kind).get("__call__")
        if isinstance(call, types.FunctionType) and kind.__name__ not in _UNSEEN:
            yield PRIMITIVE, kind, "__call__"


def _is_an_optimizers(executor: Any) -> bool:
    owner = getattr(executor.fn, "__self__", None) or executor.obj
    return isinstance(owner, nn.Optimizer)
