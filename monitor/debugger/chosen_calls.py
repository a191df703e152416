"""The keys by which a task chooses calls, and the base of the blocks of the debugger's configuration."""

import re
from typing import Final

from pydantic import BaseModel, ConfigDict, Field, model_validator
from typing_extensions import Self

_OPERATION: Final = re.compile(r"[A-Za-z_]\w*\..+\.\d+\.(forward|backward)$")
_MODULE: Final = re.compile(r"(Module|Cell)\..+\.(forward|backward)\.\d+$")


KERNELS: Final = "name-regex("
"""Begins a name of `list` that chooses kernels by a regular expression, at level L2."""


class DebuggerBlock(BaseModel):
    """A block of the configuration: its keys are checked, and it does not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ChosenCalls(DebuggerBlock):
    """The calls of a task. Give `scope` or `list`, not both."""

    scope: list[str] = Field(
        default=[],
        description="Full names of the first call and the last, such as `Functional.linear.0.forward`; one name is "
        "both. Empty: all.",
    )
    calls: list[str] = Field(
        default=[],
        alias="list",
        description="Names or parts of names. At level mix a module brings all inside it along. Empty: all that "
        "`risk_level` leaves. At level L2 on PyTorch the full name of one call, unless `scope` has it, and "
        "`name-regex(…)` for the kernels to keep; on MindSpore names of kernels.",
    )

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if self.scope and any(not name.startswith(KERNELS) for name in self.calls):
            raise ValueError(f"scope {self.scope} and list {self.calls} are both given; allowed: one of them")
        if len(self.scope) > 2:
            raise ValueError(f"scope: {self.scope}; allowed: two full names, the first call and the last, or one")
        for name in self.scope:
            if not (_OPERATION.fullmatch(name) or _MODULE.fullmatch(name)):
                raise ValueError(
                    f"scope: {name!r}; allowed: full names such as Functional.linear.0.forward or "
                    "Module.fc.Linear.forward.0"
                )
        return self
