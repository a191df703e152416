"""The configuration of the task run_ut: msprobe's keys, and the limit of what a step may write."""

import difflib
from collections.abc import Callable
from typing import Any, Final

from pydantic import Field, model_validator
from typing_extensions import Self

from trainsentry.monitor.accuracy.judged_call import RULES
from trainsentry.monitor.config.blocks import Size
from trainsentry.monitor.debugger.chosen_calls import DebuggerBlock

NAMES: Final = "operations such as linear or Functional.linear, or calls such as Functional.linear.3"


class RunUtBlock(DebuggerBlock):
    """Settings of the task run_ut: the calls whose accuracy is checked at the end of each step."""

    white_list: list[str] = Field(
        default=[],
        description="The calls that are checked: `linear`, `Functional.linear`, or a single `Functional.linear.3`. "
        "Empty: all.",
    )
    black_list: list[str] = Field(default=[], description="Calls that are left out, also of those in `white_list`.")
    error_data_path: str | None = Field(
        default=None,
        min_length=1,
        description="Folder for the tensors of failed calls, in `step<N>/rank<R>/ut_error_data<time>`, up to "
        "`max_bytes` in a run. `null`: they are not kept.",
    )
    rule: str = Field(default="standards", description=f"What decides, as of `trainsentry check`: {', '.join(RULES)}.")
    max_bytes: Size = Field(
        default=4 * 2**30,
        description="Tensors of one step on one rank, on disk until the step is checked: half of it for inputs and "
        "results, half for gradients. Calls beyond are listed as not compared.",
    )

    @model_validator(mode="after")
    def _has_a_meaning(self) -> Self:
        if self.white_list and set(self.white_list) <= set(self.black_list):
            raise ValueError(
                f"white_list {self.white_list} lies within black_list {self.black_list}, so that no call is checked; "
                "allowed: a white_list with other names too"
            )
        if self.rule not in RULES:
            raise ValueError(f"rule: {self.rule!r}; allowed: {', '.join(RULES)}")
        return self

    def check_names(self, is_known: Callable[[str], bool], known: Callable[[], Any]) -> None:
        """Check the two lists against the operations of a framework.

        Raises:
            ValueError: for a name that no operation has.

        """
        for key, names in (("white_list", self.white_list), ("black_list", self.black_list)):
            for name in names:
                if not is_known(name):
                    close = difflib.get_close_matches(name, known(), 1)
                    hint = f"; the closest known one is {close[0]!r}" if close else ""
                    raise ValueError(f"run_ut.{key}: {name!r} is no operation of torch{hint}; allowed: {NAMES}")
