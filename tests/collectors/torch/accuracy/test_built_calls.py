"""Calls are built as they were dumped: every kind of argument, drawn tensors of the recorded range, nothing unsafe."""

import math

import pytest
import torch
from checked import call, tensor

from trainsentry.collectors.calls.call_check import DeviceRefusedError, NotComparableError, UnusableCallError
from trainsentry.collectors.calls.rebuilt_values import TensorSource
from trainsentry.collectors.torch.accuracy.call_functions import function_of
from trainsentry.collectors.torch.accuracy.call_inputs import InputBuilder
from trainsentry.collectors.torch.accuracy.checking import TorchChecks

RANDOM = TensorSource(None)


def build(described, name="Torch.exp.0", seed=1234):
    return InputBuilder(name, TensorSource(None, seed)).build(described)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64", "int64", "int32", "uint8", "int8"])
def test_a_drawn_tensor_has_shape_dtype_minimum_and_maximum(dtype):
    drawn = build(tensor(40, 5, low=2, high=90, dtype=f"torch.{dtype}"))
    assert (drawn.shape, drawn.dtype) == ((40, 5), getattr(torch, dtype))
    assert (float(drawn.min()), float(drawn.max())) == (2, 90)
    assert drawn.unique().numel() > 20


def test_drawing_depends_on_seed_and_call_and_on_nothing_else():
    first = build(tensor(8))
    torch.rand(3)
    assert torch.equal(first, build(tensor(8)))
    assert not torch.equal(first, build(tensor(8), seed=1))
    assert not torch.equal(first, build(tensor(8), name="Torch.exp.1"))
    state = torch.get_rng_state()
    build(tensor(8))
    assert torch.equal(state, torch.get_rng_state())


def test_masks_nan_and_inf_of_the_range_come_back():
    masked = build(tensor(3, 3, low=-math.inf, high=1.0))
    assert (masked.min(), masked.max(), masked.isnan().any()) == (-math.inf, 1.0, False)
    assert build(tensor(4, low="nan", high="nan")).isnan().any()
    flags = build(tensor(50, low=False, high=True, dtype="torch.bool"))
    assert 0 < int(flags.sum()) < 50
    assert build(tensor(0, 3)).shape == (0, 3)
    assert build(tensor(low=0.5, high=0.5)).item() == 0.5


def test_every_kind_of_argument_is_built():
    described = [
        {"type": "int", "value": 3},
        [{"type": "float", "value": 0.5}, None],
        {"type": "torch.Size", "value": [2, 3]},
        {"type": "slice", "value": [0, None, 2]},
        {"type": "ellipsis", "value": "..."},
        {"type": "torch.dtype", "value": "torch.float16"},
        {"type": "torch.device", "value": "npu:3"},
        {"type": "complex", "value": "(1+2j)"},
        {"type": "torch.memory_format", "value": "torch.channels_last"},
    ]
    expected = [
        3,
        [0.5, None],
        torch.Size([2, 3]),
        slice(0, None, 2),
        ...,
        torch.float16,
        torch.device("cpu"),
        1 + 2j,
        torch.channels_last,
    ]
    assert build(described) == expected


@pytest.mark.parametrize(
    ("described", "reason"),
    [
        (tensor(3, low=None), "Min of a tensor is None"),
        (tensor(3, low=2.0, high=1.0), "exceeds"),
        (tensor(3, dtype="torch.float99"), "no dtype torch.float99"),
        (tensor(-1), "expected a list of sizes"),
        (tensor(1 << 40, 1 << 20), "takes more than"),
        (tensor(2, low=0, high=300, dtype="torch.uint8"), "no range of torch.uint8"),
        ({"type": "slice", "value": 3}, "a slice is 3"),
        ({"type": "torch.dtype", "value": "torch.save"}, "no torch.dtype 'torch.save'"),
        ("text", "described by a str"),
    ],
)
def test_a_damaged_description_is_refused_with_a_reason(described, reason):
    with pytest.raises(UnusableCallError, match=reason):
        build(described)


def check(name, *args, backward=None, source=None, **kwargs):
    folder = source
    return TorchChecks("cpu", folder, 1234).check(name, call(*args, **kwargs), backward)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Distributed.all_reduce.0", "communicates"),
        ("Torch.rand.0", "random"),
        ("Tensor.transpose_.0", "in place"),
        ("Torch.empty.0", "uninitialised"),
        ("Torch.load.0", "no operation on tensors"),
        ("Torch.save.0", "no operation on tensors"),
        ("Torch.compile.0", "no operation on tensors"),
        ("Torch.from_file.0", "leaves torch"),
        ("Aten.from_file.0", "leaves torch"),
        ("Tensor.numpy.0", "leaves torch"),
        ("Functional.boolean_dispatch.0", "no operation on tensors"),
        ("Other.relu.0", "calls of Other are not checked"),
        ("NPU.npu_rms_norm.0", "torch_npu"),
    ],
)
def test_calls_that_say_nothing_or_reach_out_of_torch_are_not_run(name, reason):
    with pytest.raises(NotComparableError, match=reason):
        function_of(name)


@pytest.mark.parametrize("name", ["Torch.vanished.0", "Functional.gone.3", "Tensor.__nothing__.0", "Torch", "a.b", ""])
def test_a_function_that_this_torch_lacks_is_bad_input(name):
    if name.count(".") >= 2:
        with pytest.raises(UnusableCallError, match=r"torch .* has no"):
            function_of(name)
    else:
        with pytest.raises(UnusableCallError, match="no name of a call"):
            function_of(name)


def test_a_call_that_turns_out_to_be_random_is_not_compared():
    with pytest.raises(NotComparableError, match="draws random numbers"):
        check("Functional.rrelu.0", tensor(8), training={"type": "bool", "value": True})


def test_arguments_that_only_random_data_makes_impossible_are_no_bad_input(tmp_path):
    with pytest.raises(NotComparableError, match="random data"):
        check("Torch.cholesky.0", tensor(3, 3))
    with pytest.raises(UnusableCallError, match="TypeError"):
        check("Torch.exp.0", tensor(3), speed={"type": "int", "value": 1})
    torch.save(torch.zeros(3, 3), tmp_path / "x.pt")
    with pytest.raises(UnusableCallError, match="does not run"):
        check("Torch.cholesky.0", tensor(3, 3, data_name="x.pt"), source=tmp_path)


def test_the_better_precision_is_float64_and_float32_for_half_types():
    for dtype, better in (("float32", "float64"), ("float16", "float32"), ("bfloat16", "float32"), ("int64", "int64")):
        [pair] = check("Torch.abs.0", tensor(4, low=-3, high=3, dtype=f"torch.{dtype}")).pairs
        assert (pair.dtype, pair.expected_dtype) == (f"torch.{dtype}", f"torch.{better}")
    mixed = check("Torch.add.0", tensor(4, dtype="torch.bfloat16"), tensor(4)).pairs[0]
    assert (mixed.dtype, mixed.expected_dtype) == ("torch.float32", "torch.float64")


def test_in_place_calls_and_lists_of_results_are_compared_and_inputs_are_kept():
    gradient = {"input": [tensor(4)], "output": []}
    in_place = check("Tensor.mul_.0", tensor(4, requires_grad=True), {"type": "float", "value": 3.0}, backward=gradient)
    assert [(p.backward, p.place) for p in in_place.pairs] == [(False, 0), (True, 0)]
    written = check("Tensor.__setitem__.0", tensor(4), {"type": "int", "value": 1}, {"type": "int", "value": 7})
    assert written.pairs[0].got[1] == 7
    split = check("Torch.split.0", tensor(6), {"type": "int", "value": 2})
    assert [p.shape for p in split.pairs] == [(2,)] * 3
    fused = check("Torch._foreach_norm.0", [tensor(2), tensor(3)])
    assert len(fused.pairs) == 2


def test_the_gradients_of_all_results_are_passed_on():
    entry = {"input": [tensor(3), tensor(2)], "output": []}
    sizes = [{"type": "int", "value": 3}, {"type": "int", "value": 2}]
    found = check("Torch.split.0", tensor(5, requires_grad=True), sizes, backward=entry)
    gradient = found.pairs[-1]
    assert (gradient.backward, gradient.shape, found.backward_problem) == (True, (5,), "")
    assert not (gradient.got == 0).any()


def test_a_gradient_of_another_shape_is_told(tmp_path):
    found = check("Torch.exp.0", tensor(3, requires_grad=True), backward={"input": [tensor(7)], "output": []})
    assert "shape" in found.backward_problem
    assert [p.backward for p in found.pairs] == [False]


def test_a_device_that_refuses_is_told_from_a_call_that_cannot_run(monkeypatch):
    def refuse(x, f=torch.exp):
        if x.dtype is torch.float32:
            raise RuntimeError("refused")
        return f(x)

    monkeypatch.setattr(torch, "exp", refuse)
    with pytest.raises(DeviceRefusedError, match="refused"):
        check("Torch.exp.0", tensor(3))


def test_plain_numbers_of_a_float32_call_are_rounded_as_a_device_rounds_them():
    [pair] = check("Tensor.__add__.0", tensor(1000, low=-0.1001, high=-0.0999), {"type": "float", "value": 0.1}).pairs
    assert abs(pair.got - pair.expected).max() < 1e-11
