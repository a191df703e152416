"""Writes the page of an accuracy check: one HTML file that opens without a network."""

import time
from collections import Counter
from pathlib import Path
from typing import Any, Final

import jinja2

from trainsentry.collectors.series import writable
from trainsentry.exporters.files.json_files import replace_text
from trainsentry.monitor.accuracy.check_run import CheckOptions, CheckSummary
from trainsentry.monitor.accuracy.judged_call import BLANK, JudgedCall

SHOWN_FAILURES: Final = 500
"""Failed calls with all their numbers; the tables have the rest."""

SHOWN_CALLS: Final = 10_000
"""Calls in the list of all: a page with more is slow to search."""

COLUMNS: Final = (
    "output", "better dtype", "dtype", "shape", "cosine", "largest absolute error", "within 1 %", "within 0.1 %",
    "within 0.01 %", "differing", "balance of signs", "root mean square error", "wrong small elements",
    "largest relative error", "mean relative error", "wrong NaN and Inf", "wrong by relative error",
    "wrong by absolute error", "largest ULP error", "mean ULP error", "many ULP", "status", "message",
)  # fmt: skip
"""What the columns of the table of details are called on the page, in their order there."""


def write_page(path: Path, summary: CheckSummary, options: CheckOptions) -> None:
    """Write the page of a check to `path`.

    Raises:
        OSError: when it cannot be written.

    """
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    source = Path(__file__).with_name("check.html.jinja").read_text(encoding="utf-8")
    failures = summary.failures
    text = environment.from_string(source).render(
        summary=summary,
        options=options,
        failures=[(call, _numbers(call)) for call in failures[:SHOWN_FAILURES]],
        more_failures=max(0, len(failures) - SHOWN_FAILURES),
        reasons=Counter(call.message for call in summary.skipped).most_common(),
        calls=summary.calls[:SHOWN_CALLS],
        more_calls=max(0, len(summary.calls) - SHOWN_CALLS),
        made=time.strftime("%Y-%m-%d %H:%M"),
    )
    replace_text(path, writable(text))


def _numbers(call: JudgedCall) -> dict[str, Any]:
    """Return the columns that a call's outputs fill, and their values; nothing for a call of an earlier check."""
    filled = [i for i in range(len(COLUMNS)) if any(row[i].strip(BLANK) for row in call.details)]
    return {"columns": [COLUMNS[i] for i in filled], "rows": [[row[i] for i in filled] for row in call.details]}
