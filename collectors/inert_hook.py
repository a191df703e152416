"""Hooks that die when the object they hang on is copied or pickled."""

import sys
from functools import partial
from typing import Any, Final

INERT: Final = partial(sys.audit, "trainsentry.hook_of_a_copy")
"""What a copy of a watched model carries in the place of a hook.

It takes any arguments, does nothing and returns None. It is made of the standard library alone, so that a
pickled model loads on a machine without trainsentry.
"""


class InertWhenCopied:
    """Base of callable hooks: `copy.deepcopy` and `pickle` put `INERT` in their place."""

    __slots__ = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return INERT

    def __reduce__(self) -> Any:
        return partial, (sys.audit, "trainsentry.hook_of_a_copy")
