"""Runs one call of a dump, judges it, and turns it into the rows of the tables."""

from dataclasses import asdict, dataclass, field
from typing import Any, Final

from trainsentry.anomaly.accuracy.dtype_limits import limits_of
from trainsentry.anomaly.accuracy.output_errors import OutputErrors, measure, share_of_different
from trainsentry.anomaly.accuracy.pass_rules import judge_mindspore, judge_run_ut
from trainsentry.anomaly.accuracy.standard_lists import ABSOLUTE, BINARY, ULP
from trainsentry.anomaly.accuracy.standards import ROUNDINGS, JudgedOutput, judge_standard
from trainsentry.anomaly.accuracy.verdict import ERROR, NOT_RUN, PASS, SKIP, Judgement, worst
from trainsentry.collectors.calls.call_check import CheckedCall, PairedOutput

RULES: Final = ("standards", "run_ut", "mindspore")
"""Rules that decide: msprobe's standards by dtype and kind of call, or one of its two pass rules."""

UNUSABLE: Final = "cannot be checked: "
NOT_COMPARED: Final = "not compared: "
"""Beginnings of the messages of calls that are listed only."""

BLANK: Final = " "
"""A cell without a value, as msprobe writes it."""

PRECISION: Final = 14
"""Decimal places of numbers in the tables: msprobe's default."""

MOST_ZEROS_APART: Final = 0.1
"""Allowed difference between the shares of zeros of a dropout, which is random. Source: msprobe's `compare.py`."""

FEW_ELEMENTS: Final = 100
"""Elements below which a dropout passes: the share of zeros says nothing. Source: as above."""


@dataclass(frozen=True)
class JudgedCall:
    """A call's rows, and what the summary needs: `excess` orders failures, `unusable` marks bad input."""

    call: str
    forward: str
    backward: str
    message: str
    details: list[list[str]] = field(default_factory=list)
    excess: float = 0.0
    unusable: bool = False

    @property
    def row(self) -> list[str]:
        """The row of the result table."""
        return [self.call, self.forward, self.backward, self.message]

    @property
    def status(self) -> str:
        """The worse of both directions."""
        return worst([self.forward, self.backward])

    def as_json(self) -> dict[str, Any]:
        """Return the members, to be sent to another process."""
        return asdict(self)


def read_back(row: list[str]) -> JudgedCall:
    """Return a call from its row of an earlier check; how far it failed is not in there."""
    call, forward, backward, message = row[:4]
    return JudgedCall(call, forward, backward, message, unusable=message.startswith(UNUSABLE))


def left_out(call: str, reason: str, *, unusable: bool = False) -> JudgedCall:
    """Return a call that is listed with the reason why it is not compared; `unusable` marks bad input."""
    reason = f"{UNUSABLE if unusable else NOT_COMPARED}{reason}"
    details = [[f"{call}.forward.output.0", *[BLANK] * 20, SKIP, reason]]
    return JudgedCall(call, SKIP, SKIP, reason, details, unusable=unusable)


def failed(call: str, reason: str) -> JudgedCall:
    """Return a call that failed as a whole: the device refused it, or its process died."""
    details = [[f"{call}.forward.output.0", *[BLANK] * 20, ERROR, reason]]
    return JudgedCall(call, ERROR, NOT_RUN, reason, details, excess=float("inf"))


def judge_call(call: str, checked: CheckedCall, rule: str) -> JudgedCall:
    """Judge all outputs of a call by a rule of RULES."""
    rows: list[list[str]] = []
    verdicts: list[tuple[str, bool, Judgement]] = []
    for pair in checked.pairs:
        verdict, cells = _judge(checked, pair, rule)
        direction = "backward" if pair.backward else "forward"
        name = f"{call}.{direction}.output.{pair.place}"
        rows.append([name, *cells, verdict.status, verdict.message])
        verdicts.append((name, pair.backward, verdict))
    if checked.backward_problem:
        status = ERROR if checked.device_failed_backward else SKIP
        verdict = Judgement(status, "backward", checked.backward_problem, float("inf") if status == ERROR else 0.0)
        rows.append([f"{call}.backward.output.0", *[BLANK] * 20, status, verdict.message])
        verdicts.append((rows[-1][0], True, verdict))
    wrong = [(v.excess, n.removeprefix(f"{call}."), v.message) for n, _, v in verdicts if v.status not in (PASS, SKIP)]
    wrong.sort(key=lambda item: -item[0])
    sides = [worst(v.status for _, backward, v in verdicts if backward is side) for side in (False, True)]
    excess, message = (wrong[0][0], f"{wrong[0][1]}: {wrong[0][2]}") if wrong else (0.0, "")
    if checked.backward_problem and not message:
        message = f"backward: {checked.backward_problem}"
    return JudgedCall(call, sides[0], sides[1], message, rows, excess)


def _judge(checked: CheckedCall, pair: PairedOutput, rule: str) -> tuple[Judgement, list[str]]:
    """Return the verdict on an output, and its cells between the name and the status."""
    head = [pair.expected_dtype, pair.dtype, str(pair.shape)]
    blank = [*head, *[BLANK] * 17]
    if pair.problem:
        return Judgement(ERROR, "structure", pair.problem, float("inf")), blank
    if not pair.expected.size:
        return Judgement(SKIP, "empty", "the output has no elements"), blank
    if checked.is_dropout:
        return _judge_dropout(pair), blank
    if not pair.floating:
        return _judge_integers(pair, head)
    errors = measure(pair.expected, pair.got, pair.judged_as)
    verdict = _judge_floats(checked, pair, errors, rule)
    return verdict, [*head, *_cells(errors, verdict.rule, pair.judged_as)]


def _judge_floats(checked: CheckedCall, pair: PairedOutput, errors: OutputErrors, rule: str) -> Judgement:
    limits = limits_of(pair.judged_as)
    if rule == "mindspore":
        return judge_mindspore(errors)
    if rule == "run_ut" or limits is None:
        return judge_run_ut(errors, pair.judged_as)
    share = ROUNDINGS * limits.rounding
    output = JudgedOutput(
        checked.operation,
        pair.backward,
        pair.judged_as,
        pair.expected,
        pair.got,
        pair.adds,
        lambda: checked.moved(pair, share),
    )
    return judge_standard(output, errors)


def _judge_integers(pair: PairedOutput, head: list[str]) -> tuple[Judgement, list[str]]:
    """Judge integers, booleans and texts, which must be the same."""
    share = share_of_different(pair.expected, pair.got)
    cells = [*head, *[BLANK] * 5, _number(share), *[BLANK] * 11]
    if share:
        return Judgement(ERROR, BINARY, f"share of elements that differ is {share:.3g}, allowed 0", share / 1e-3), cells
    return Judgement(PASS, BINARY, "all elements are the same"), cells


def _judge_dropout(pair: PairedOutput) -> Judgement:
    apart = abs(float((pair.expected == 0).mean()) - float((pair.got == 0).mean()))
    if pair.expected.size < FEW_ELEMENTS or apart < MOST_ZEROS_APART:
        return Judgement(PASS, "zeros", f"the shares of zeros are {apart:.3g} apart")
    reason = f"the shares of zeros are {apart:.3g} apart, allowed {MOST_ZEROS_APART:g}"
    return Judgement(ERROR, "zeros", reason, apart / MOST_ZEROS_APART)


def _cells(errors: OutputErrors, rule: str, dtype: str) -> list[str]:
    """Return the cells of the measures.

    msprobe's scripts tell from the filled cells which standard was applied: those of another one stay blank.
    """
    known = limits_of(dtype) is not None
    benchmark = (errors.balance, errors.rms, errors.small_wrong, errors.max_relative, errors.mean_relative)
    shares = (errors.non_finite_wrong, errors.relative_wrong, errors.small_wrong)
    ulps = (errors.max_ulps, errors.mean_ulps, errors.many_ulps)
    return [
        BLANK if errors.cosine is None else _number(errors.cosine),
        *map(_number, (errors.max_absolute, errors.within_hundredth, errors.within_thousandth)),
        _number(errors.within_ten_thousandth),
        _number(errors.different) if rule == BINARY else BLANK,
        *(map(_number, benchmark) if known else [BLANK] * 5),
        *(map(_number, shares) if rule == ABSOLUTE else [BLANK] * 3),
        *(map(_number, ulps) if rule == ULP else [BLANK] * 3),
    ]


def _number(value: float) -> str:
    return f"{value:.{PRECISION}f}"
