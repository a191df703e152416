"""A call is judged by its own doing: what its inputs explain is not blamed on it."""

import math

import pytest

from trainsentry.anomaly.dumps.call_verdicts import ERROR, PASS, WARNING, ValuePair, judge, measure_statistics

TENSOR = {"dtype": "torch.float32", "shape": [4], "Max": 1.0, "Min": 0.0, "Mean": 0.5, "Norm": 2.0}
CALL = "Functional.linear.0.forward"


def pair(*, output=False, norm=2.0, other=2.0, **changes):
    """Return a value whose norm differs, or whose facts do in the first dump."""
    a, b = {**TENSOR, "Norm": norm, **changes}, {**TENSOR, "Norm": other}
    return ValuePair(output, a, b, measure_statistics(a, b))


def measured(*, output=False, **measures):
    return ValuePair(output, TENSOR, TENSOR, measures)


@pytest.mark.parametrize(
    ("into", "out", "verdict"),
    [
        (2.0, 2.0, PASS),
        (2.0, 2.1, PASS),
        (2.0, 2.3, WARNING),
        (2.0, 3.2, ERROR),
        (2.02, 2.3, WARNING),
        (2.2, 2.5, PASS),
        (2.3, 3.2, PASS),
    ],
)
def test_a_result_is_blamed_by_how_much_more_it_differs_than_the_inputs(into, out, verdict):
    assert judge(CALL, [pair(norm=into), pair(output=True, norm=out)], "summary") == verdict


@pytest.mark.parametrize(
    "changes", [{"dtype": "torch.float16"}, {"shape": [2, 2]}, {"Max": math.nan}, {"Min": -math.inf}]
)
def test_another_dtype_or_shape_and_nan_in_the_first_alone_are_errors(changes):
    found = pair(**changes)
    assert judge(CALL, [found], "summary") == ERROR
    assert found.reasons


def test_nan_in_both_is_no_difference():
    both = {**TENSOR, "Max": math.nan}
    assert judge(CALL, [ValuePair(True, both, both)], "summary") == PASS


def test_another_number_among_the_arguments_is_an_error():
    two, three = ({"dtype": "<class int>", "shape": [], "Max": n} for n in (2, 3))
    assert judge(CALL, [ValuePair(False, two, three)], "summary") == ERROR


@pytest.mark.parametrize(("sums", "verdict"), [(("a", "a"), PASS), (("a", "b"), ERROR), (("a", None), WARNING)])
def test_checksums_decide_where_there_are_some(sums, verdict):
    a, b = ({"md5": text} if text else None for text in sums)
    assert judge(CALL, [ValuePair(True, a, b)], "md5") == verdict


def test_elements_decide_where_tensors_were_saved():
    shares = [
        measured(**{"One Thousandth Err Ratio": 1.0}),
        measured(output=True, **{"One Thousandth Err Ratio": 0.05}),
    ]
    assert judge(CALL, shares, "all") == ERROR
    assert judge(CALL, [measured(Cosine=0.99), measured(output=True, Cosine=0.8)], "all") == WARNING
    assert judge(CALL, [measured(Cosine=0.85), measured(output=True, Cosine=0.5)], "all") == PASS


@pytest.mark.parametrize(
    ("call", "verdict"), [("Torch.empty.0.forward", PASS), ("Distributed.all_to_all_single.0.forward", PASS)]
)
def test_memory_that_nobody_has_written_is_not_judged(call, verdict):
    assert judge(call, [pair(Max=math.nan)], "summary") == verdict


def test_a_call_without_values_has_no_verdict():
    assert judge(CALL, [], "summary") is None
