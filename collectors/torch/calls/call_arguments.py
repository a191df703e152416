"""The arguments of a call as the caller wrote them, and those that a call fills or changes.

torch's Python functions pass their arguments to a mode in another grouping, with defaults added; the bytecode
instruction of the call tells which were given by position and which by name. Collectives fill tensors given to them.
"""

import dis
from collections.abc import Mapping
from types import CodeType, FrameType
from typing import Any, Final

HANDLER: Final = "handle_torch_function"

_WITH_NAMES: Final = frozenset({"CALL_KW", "CALL_FUNCTION_KW"})
_CALLS: Final = frozenset({"CALL", "CALL_FUNCTION", "CALL_METHOD", *_WITH_NAMES})
"""Call instructions of Python 3.10 to 3.13; a call with `*args` uses another, which does not tell the arguments."""

_Written = tuple[int, tuple[str, ...]] | None


class CallArguments:
    """Regroups arguments as they were written; each instruction is decoded once."""

    def __init__(self) -> None:
        self._written: dict[tuple[CodeType, int], _Written] = {}

    def as_written(
        self, frame: FrameType | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Return positional and named arguments as the caller wrote them; `frame` is the frame that called the mode."""
        if not kwargs or frame is None or frame.f_code.co_name != HANDLER or frame.f_back is None:
            return args, kwargs
        code, caller = frame.f_back.f_code, frame.f_back.f_back
        if caller is not None and caller.f_code.co_name == "fn":  # torch's wrapper that picks one of two functions
            caller = caller.f_back
        written = self._of(caller)
        if written is None:
            return args, kwargs
        positional, names = written
        order = code.co_varnames[: code.co_argcount]
        if order[:1] == ("self",):  # the instruction of a method's call does not count it
            positional = min(positional + 1, len(order))
        given = {**dict(zip(order, args, strict=False)), **kwargs}
        if positional > len(order) or any(name not in given for name in (*order[:positional], *names)):
            return args, kwargs
        return tuple(given[name] for name in order[:positional]), {name: given[name] for name in names}

    def _of(self, caller: FrameType | None) -> _Written:
        if caller is None:
            return None
        place = (caller.f_code, caller.f_lasti)
        if place not in self._written:
            self._written[place] = _read(caller)
        return self._written[place]


def _read(caller: FrameType) -> _Written:
    """Return the number of positional arguments of the running call, and the names of the others."""
    # While a Python function runs, its caller's position is one of the cache entries after the call instruction.
    done = [i for i in dis.get_instructions(caller.f_code) if i.offset <= caller.f_lasti]
    kept = [i for i in done if i.opname not in {"CACHE", "EXTENDED_ARG", "PRECALL"}]
    return _count(kept[-1], kept[-2] if len(kept) > 1 else None, caller.f_code) if kept else None


def _count(call: dis.Instruction, last: dis.Instruction | None, code: CodeType) -> _Written:
    if call.opname not in _CALLS or call.arg is None:
        return None
    names: tuple[str, ...] = ()
    if last is not None and (last.opname == "KW_NAMES" or (call.opname in _WITH_NAMES and last.opname == "LOAD_CONST")):
        names = code.co_consts[last.arg or 0]
    return call.arg - len(names), names


_FILLED: Final[dict[str, tuple[int, str]]] = {
    "recv": (0, "tensor"),
    "irecv": (0, "tensor"),
    "all_gather": (0, "tensor_list"),
    "gather": (1, "gather_list"),
    "scatter": (0, "tensor"),
    "reduce_scatter": (0, "output"),
    "_reduce_scatter_base": (0, "output"),
    "_all_gather_base": (0, "output_tensor"),
    "all_to_all": (0, "output_tensor_list"),
    "all_to_all_single": (0, "output"),
    "all_gather_into_tensor": (0, "output_tensor"),
    "reduce_scatter_tensor": (0, "output"),
}
"""Collectives that fill a tensor, and the position and name of that argument; its earlier values mean nothing."""


def is_collective(stem: str) -> bool:
    """Whether a call belongs to torch.distributed."""
    return stem.startswith("Distributed.")


def without_buffers(stem: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """Return the arguments, with None for those that the call only fills."""
    filled = _FILLED.get(stem.removeprefix("Distributed.")) if is_collective(stem) else None
    if filled is None:
        return args, kwargs
    kept = tuple(None if i == filled[0] else value for i, value in enumerate(args))
    return kept, {name: None if name == filled[1] else value for name, value in kwargs.items()}


_OPERATORS: Final = "add sub mul matmul truediv floordiv mod pow and or xor lshift rshift"
"""Operators that Python also writes in place, as in `x += y`."""

_CHANGING_METHODS: Final = frozenset({"__setitem__", "__set__", *(f"__i{name}__" for name in _OPERATORS.split())})


def changed_by(stem: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the arguments that a call changes instead of returning a result; None for any other call."""
    if is_collective(stem):
        return [*args, *kwargs.values()]
    return args[0] if stem == "Tensor.__setitem__" and args else None


def may_change_arguments(name: str) -> bool:
    """Whether an operation changes its arguments, judged by its name: `add_`, `__iadd__`, `__setitem__`, or a setter.

    >>> [name for name in ("add", "add_", "__iadd__", "__init__", "_foreach_mul_") if may_change_arguments(name)]
    ['add_', '__iadd__', '_foreach_mul_']
    """
    if name.endswith("__"):
        return name in _CHANGING_METHODS
    return name.endswith("_")


def may_change(stem: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call may change tensors; a flag that is set may be `inplace`."""
    if may_change_arguments(stem.rpartition(".")[2]) or is_collective(stem) or kwargs.get("out") is not None:
        return True
    return any(value is True for value in (*args, *kwargs.values()))


def has_arrived(output: Any) -> bool:
    """Whether a collective has ended, judged by what it returned: nothing, a `Work`, or several."""
    works = output if isinstance(output, (list, tuple)) else [output]
    return all(work.is_completed() for work in works if hasattr(work, "is_completed"))
