"""The framework-free part of the task free_benchmark: compares the results of a call with those of its repetition."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

from trainsentry.collectors.calls.call import Call
from trainsentry.collectors.calls.free_benchmark import (
    NO_CHANGE,
    TO_CPU,
    BenchmarkSettings,
    BenchmarkTable,
    RatioThresholds,
    ResultDifference,
)

Again = Callable[[str], "list[Any] | None"]
"""Makes a call again in a mode and returns its results; None when the mode changes nothing."""

REFUSED: Final = (
    ArithmeticError, AssertionError, LookupError, MemoryError, RuntimeError, TypeError, ValueError
)  # fmt: skip
"""What an operation may raise for arguments of another dtype or device, or with other values."""

NOT_PERTURBED: Final = "not perturbed"


class LeftOutError(Exception):
    """A call that is not compared; the text says why, after a number of calls."""


class BenchmarkTask(ABC):
    """Compares results, writes what is inconsistent, and counts the calls that are left out, by reason."""

    def __init__(self, settings: BenchmarkSettings) -> None:
        self.settings = settings
        self.table = BenchmarkTable(settings)
        self.thresholds = RatioThresholds(settings)
        self.iteration = 0
        self.checked = 0
        self.left_out: Counter[str] = Counter()

    @abstractmethod
    def pairs(self, first: Any, second: Any, *, integers: bool) -> list[tuple[int, Any, Any]]:
        """Return the comparable tensors of two flat lists of results, with their numbers."""

    @abstractmethod
    def difference(self, one: Any, other: Any) -> ResultDifference:
        """Return how far two results are apart."""

    @abstractmethod
    def agrees_with_cpu(self, one: Any, cpu: Any) -> tuple[bool, ResultDifference]:
        """Return whether a result is as near to the CPU's as its dtype allows, and the largest relative error."""

    @abstractmethod
    def facts(self, tensor: Any) -> tuple[str, list[int]]:
        """Return a result's dtype, as the framework writes it, and its shape."""

    def summary(self) -> str:
        """Say what was done so far."""
        reasons = "".join(f", {count} {reason}" for reason, count in self.left_out.most_common())
        done = "passed on" if self.settings.fixes else f"compared, {self.table.rows} inconsistent"
        return f"{self.checked} results {done}{reasons}"

    def check(self, call: Call, results: Sequence[Any], again: Again) -> None:
        """Compare results with those of the repetition; one that the operation refuses is left out."""
        mode = self.settings.mode
        try:
            changed = again(mode)
            if changed is None:
                self.left_out[NOT_PERTURBED] += 1
                return
            found = self.pairs(results, changed, integers=mode == NO_CHANGE)
            if self.thresholds.preheats(self.iteration):
                self._preheat(call, results, found, again)
                return
            for index, one, other in found:
                self._compare(call, index, one, other)
        except LeftOutError as reason:
            self.left_out[str(reason)] += 1
        except REFUSED as error:
            self.left_out[f"failed again ({type(error).__name__})"] += 1

    def _compare(self, call: Call, index: int, one: Any, other: Any) -> None:
        self.checked += 1
        dtype, shape = self.facts(one)
        if self.settings.mode == TO_CPU:
            agrees, found = self.agrees_with_cpu(one, other)
        else:
            found = self.difference(one, other)
            agrees = not found.word and found.ratio <= self.thresholds.of(call.stem, plain_dtype(dtype))
        if not agrees:
            self.table.add(self.iteration, f"{call.stem}.{call.number}", found, (dtype, shape, index))

    def _preheat(self, call: Call, results: Sequence[Any], found: Sequence[Any], again: Again) -> None:
        """Let the comparison with the CPU move the thresholds of the call."""
        if not self.thresholds.takes_sample(self.iteration, call.stem):
            return
        on_cpu = {index: cpu for index, _, cpu in self.pairs(results, again(TO_CPU) or (), integers=False)}
        for index, one, other in found:
            if index in on_cpu:
                agrees, _ = self.agrees_with_cpu(one, on_cpu[index])
                dtype = plain_dtype(self.facts(one)[0])
                self.thresholds.learn(call.stem, dtype, self.difference(one, other), agrees)


def plain_dtype(dtype: str) -> str:
    """Return the name of a dtype without its framework.

    >>> plain_dtype("torch.float16"), plain_dtype("BFloat16")
    ('float16', 'bfloat16')
    """
    return dtype.rpartition(".")[2].lower()
