"""msprobe's two rules for a call that passes: one of its PyTorch tool, one of its MindSpore tool."""

from typing import Final

from trainsentry.anomaly.accuracy.output_errors import OutputErrors
from trainsentry.anomaly.accuracy.verdict import ERROR, PASS, WARNING, Judgement

LEAST_COSINE: Final = 0.99
"""Cosine that both rules ask for (no unit). Source: both tools' manuals."""

RUN_UT_ABSOLUTE: Final = 1e-3
"""Absolute error below which the rule for PyTorch passes an output, in the output's unit. Source: its manual."""

MINDSPORE_ABSOLUTE: Final = 1e-4
"""Absolute error below which the rule for MindSpore passes an output, in the output's unit. Source: its manual."""

_HALF_TYPES: Final = ("torch.float16", "torch.bfloat16")

_HUNDREDTH: Final = "share of relative errors below 0.01"
_THOUSANDTH: Final = "share of relative errors below 0.001"
_TEN_THOUSANDTH: Final = "share of relative errors below 0.0001"


def judge_run_ut(errors: OutputErrors, dtype: str) -> Judgement:
    """Judge an output by the rule of `run_ut` and `acc_check` (msprobe 1.x and 26.2, PyTorch).

    The cosine must exceed 0.99. Then an absolute error below 0.001 passes. Else the shares of relative errors decide:
    float16 and bfloat16 need 99 % below 0.01 (else error) and 99.9 % below 0.001 (else warning); others need 99.9 %
    below 0.001 (else error) and 99.99 % below 0.0001 (else warning).
    """
    rule = "run_ut"
    missed = _missed_cosine(errors, rule)
    if missed:
        return missed
    if errors.max_absolute < RUN_UT_ABSOLUTE:
        return Judgement(PASS, rule, f"maximal absolute error {errors.max_absolute:.3g} < {RUN_UT_ABSOLUTE:g}")
    thousandth = (errors.within_thousandth, 1e-3, _THOUSANDTH)
    steps = (
        ((errors.within_hundredth, 1e-2, _HUNDREDTH), thousandth)
        if dtype in _HALF_TYPES
        else (thousandth, (errors.within_ten_thousandth, 1e-4, _TEN_THOUSANDTH))
    )
    for (share, missing, what), status in zip(steps, (ERROR, WARNING), strict=True):
        if not share > 1 - missing:
            reason = f"{what} is {share:.6g}, needs more than {1 - missing:g}"
            return Judgement(status, rule, reason, (1 - share) / missing)
    return Judgement(PASS, rule, f"{steps[1][2]} is {steps[1][0]:.6g}")


def judge_mindspore(errors: OutputErrors) -> Judgement:
    """Judge an output by the rule of msprobe's tool for MindSpore: cosine over 0.99 and absolute error below 1e-4."""
    rule = "mindspore"
    missed = _missed_cosine(errors, rule)
    if missed:
        return missed
    if errors.max_absolute < MINDSPORE_ABSOLUTE:
        return Judgement(PASS, rule, f"maximal absolute error {errors.max_absolute:.3g} < {MINDSPORE_ABSOLUTE:g}")
    reason = f"maximal absolute error {errors.max_absolute:.3g}, needs < {MINDSPORE_ABSOLUTE:g}"
    return Judgement(ERROR, rule, reason, errors.max_absolute / MINDSPORE_ABSOLUTE)


def _missed_cosine(errors: OutputErrors, rule: str) -> Judgement | None:
    if errors.one_is_zero:
        return Judgement(ERROR, rule, "one side is all zeros, the other is not", 1 / (1 - LEAST_COSINE))
    if errors.cosine is not None and not errors.cosine > LEAST_COSINE:
        excess = (1 - errors.cosine) / (1 - LEAST_COSINE)
        return Judgement(ERROR, rule, f"cosine {errors.cosine:.6g}, needs more than {LEAST_COSINE:g}", excess)
    return None
