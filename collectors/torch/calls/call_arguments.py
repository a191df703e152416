"""Which arguments of a call were given by position and which by name.

Functions of torch that are written in Python hand their arguments to a mode in a grouping of their own, with defaults
added; the instruction that made the call knows what was written.
"""

import dis
from collections.abc import Mapping
from types import CodeType, FrameType
from typing import Any, Final

HANDLER: Final = "handle_torch_function"

_WITH_NAMES: Final = frozenset({"CALL_KW", "CALL_FUNCTION_KW"})
_CALLS: Final = frozenset({"CALL", "CALL_FUNCTION", "CALL_METHOD", *_WITH_NAMES})
"""Instructions of Python 3.10 to 3.13; a call with `*args` is written in another, which tells nothing."""

_Written = tuple[int, tuple[str, ...]] | None


class CallArguments:
    """Regroups arguments as they were written; what an instruction says is looked up once."""

    def __init__(self) -> None:
        self._written: dict[tuple[CodeType, int], _Written] = {}

    def as_written(
        self, frame: FrameType | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Return positional and named arguments as the caller gave them; `frame` is who called the mode."""
        if not kwargs or frame is None or frame.f_code.co_name != HANDLER or frame.f_back is None:
            return args, kwargs
        code, caller = frame.f_back.f_code, frame.f_back.f_back
        if caller is not None and caller.f_code.co_name == "fn":  # one of two functions was chosen by an argument
            caller = caller.f_back
        written = self._of(caller)
        if written is None:
            return args, kwargs
        positional, names = written
        order = code.co_varnames[: code.co_argcount]
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
    """Return how many arguments the call under way has by position, and the names of the others."""
    # While a function of Python runs, the place of its call is one of the cells behind the instruction.
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
