"""The framework-free part of free_benchmark: its settings, its thresholds and its table, with msprobe's words."""

import csv
import io
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trainsentry.collectors.series import writable

PART: Final = "free_benchmark"
FILE: Final = "free_benchmark.csv"
MODE_COLUMN: Final = "pert_mode"
COLUMNS: Final = ("rank", MODE_COLUMN, "stage", "step", "api_name", "max_rel", "dtype", "shape", "output_index")

NO_CHANGE: Final = "no_change"
TO_CPU: Final = "to_cpu"
IMPROVE_PRECISION: Final = "improve_precision"

RATIOS: Final = {"float16": 1.002, "bfloat16": 1.004}
RATIO: Final = 1.0002
"""Largest ratio of two results that counts as equal, by dtype: msprobe's, some 2 (float16) and 1/2 (bfloat16) ulp."""

NOISE: Final = {"bfloat16": 1e-4, "float16": 1e-6, "float32": 1e-8, "float64": 1e-16}
"""What `add_noise` adds to elements that are larger than its square root, by dtype, as in msprobe."""

BACKWARD_SMALL: Final = 1e-3
"""Gradients smaller than this count as this, as in msprobe."""

CPU_RATIOS: Final = {"float32": 2**-14, "float16": 2**-11, "bfloat16": 2**-8}
"""Largest relative difference of a device from the CPU by dtype; below 1.0 it is absolute (msprobe's standard)."""

CPU_BALANCE: Final = 1e-4
"""Largest mean of the signed differences from the CPU: errors of a right device point in both directions."""

CHUNK: Final = 2**22
"""Elements that are compared at once, so that the intermediate results stay small (some 100 MB)."""

FIRST_RATIO: Final = 2.05
"""The ratio that preheating starts from, as msprobe's."""

SYMBOL_FLIPPING: Final = "symbol_flipping"
NAN: Final = "nan"
"""Values of `max_rel` where no ratio says it: two results differ in sign, or one of them is NaN."""


@dataclass(frozen=True)
class BenchmarkSettings:
    """What is perturbed and how results are handled; the words are those of the configuration's keys.

    `mode_column` is msprobe's word for the mode in the table, which differs between its frameworks.
    """

    rank: int
    folder: Path
    mode: str
    fixes: bool
    stage: str
    preheats: bool
    preheat_steps: int
    max_samples: int
    mode_column: str = MODE_COLUMN


@dataclass(frozen=True)
class ResultDifference:
    """How far two results are apart: the largest ratio of two elements (1: equal), or a word in its place."""

    ratio: float
    word: str = ""

    @property
    def max_rel(self) -> float | str:
        """The value of the column `max_rel`."""
        return self.word or self.ratio - 1.0


class BenchmarkTable:
    """Appends rows to `free_benchmark.csv`, which all ranks share: a row is one write of the operating system."""

    def __init__(self, settings: BenchmarkSettings) -> None:
        self.settings = settings
        self.path = settings.folder / FILE
        self.rows = 0

    def add(self, step: int, call: str, difference: ResultDifference, found: tuple[str, list[int], int]) -> None:
        """Add a result: `found` are its dtype, its shape and its number among the call's results.

        Raises:
            OSError: when it cannot be written.

        """
        dtype, shape, index = found
        head = [self.settings.rank, self.settings.mode, self.settings.stage, step, writable(call)]
        self._begin()
        self._append([*head, difference.max_rel, dtype, shape, index])
        self.rows += 1

    def _begin(self) -> None:
        try:
            os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640))
        except FileExistsError:
            return
        self._append([self.settings.mode_column if name == MODE_COLUMN else name for name in COLUMNS])

    def _append(self, row: Any) -> None:
        text = io.StringIO(newline="")
        csv.writer(text).writerow(row)
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(file, text.getvalue().encode())
        finally:
            os.close(file)


class RatioThresholds:
    """The ratio from which a result is inconsistent, for each operation and dtype.

    Without preheating it is `RATIOS`. With it, the ratio starts at `FIRST_RATIO`, and in the first steps each sampled
    call is also compared with the CPU. A ratio above the threshold although the CPU agrees doubles the distance from 1;
    one below its half, or below it although the CPU disagrees, halves it, never below that of `RATIOS`.
    """

    def __init__(self, settings: BenchmarkSettings) -> None:
        self.settings = settings
        self._ratios: dict[tuple[str, str], float] = {}
        self._samples: Counter[tuple[int, str]] = Counter()

    def preheats(self, step: int) -> bool:
        """Whether a step serves to find thresholds, and writes no rows."""
        return self.settings.preheats and step < self.settings.preheat_steps

    def takes_sample(self, step: int, operation: str) -> bool:
        """Whether another call of an operation is compared with the CPU in this step."""
        self._samples[step, operation] += 1
        return self._samples[step, operation] <= self.settings.max_samples

    def of(self, operation: str, dtype: str) -> float:
        """Return the largest ratio that is consistent."""
        if self.settings.mode == NO_CHANGE:
            return 1.0
        start = FIRST_RATIO if self.settings.preheats else RATIOS.get(dtype, RATIO)
        return self._ratios.get((operation, dtype), start)

    def learn(self, operation: str, dtype: str, difference: ResultDifference, cpu_agrees: bool) -> None:
        """Move the threshold of an operation after one sample."""
        now = self.of(operation, dtype)
        ratio = float("inf") if difference.word else difference.ratio
        if cpu_agrees and ratio > now:
            self._ratios[operation, dtype] = 1.0 + 2.0 * (now - 1.0)
        elif (ratio <= now and not cpu_agrees) or ratio <= 1.0 + (now - 1.0) / 2.0:
            self._ratios[operation, dtype] = max(1.0 + (now - 1.0) / 2.0, RATIOS.get(dtype, RATIO))
