"""A clean MindSpore dump passes whole; a worse operation is named; what says nothing about accuracy is listed so."""

import json
import sys
import types

import mindspore as ms
import numpy as np
import pytest
from dump_checks import call, check, tables, tensor, write_dump
from mindspore import Tensor, mint, ops
from recorded import dumped
from typer.testing import CliRunner

from trainsentry.collectors.calls.both_sides import SideValue
from trainsentry.collectors.calls.call_check import NotComparableError, UnusableCallError
from trainsentry.collectors.calls.rebuilt_values import TensorSource
from trainsentry.collectors.mindspore.accuracy import checking
from trainsentry.collectors.mindspore.accuracy.call_inputs import InputBuilder
from trainsentry.collectors.mindspore.accuracy.checking import MindSporeChecks
from trainsentry.collectors.mindspore.accuracy.precise_runs import RunsApart, RunsHere
from trainsentry.monitor.cli.app import app


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    return dumped(tmp_path_factory.mktemp("drawn"))


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    return dumped(tmp_path_factory.mktemp("real"), "tensor")


def x32(*shape, **more):
    return tensor(*shape, dtype="Float32", **more)


def write(folder, calls, **head):
    return write_dump(folder, calls, framework="mindspore", **head)


@pytest.mark.parametrize("kind", ["dump", "real"])
def test_a_clean_dump_passes_forward_and_backward(kind, request, tmp_path):
    summary = check(request.getfixturevalue(kind), tmp_path)
    assert summary.failures == []
    found = {c.call: (c.forward, c.backward) for c in summary.calls}
    for name in (
        "Primitive.MatMul.0",
        "MintFunctional.relu.0",
        "Functional.softmax.0",
        "Mint.matmul.0",
        "Tensor.__matmul__.0",
        "Functional.split.0",
        "Mint.concat.0",
        "Tensor.reshape.0",
        "Tensor.astype.0",
        "Tensor.mean.0",
    ):
        assert found[name] == ("pass", "pass"), name
    assert found["Functional.max.0"] == ("pass", " ")
    left = {c.call: c.message for c in summary.calls if c.status == "SKIP"}
    assert left == {}
    row = tables(summary)[1]["Functional.softmax.0.forward.output.0"]
    assert (row["Bench Dtype"], row["DEVICE Dtype"], row["Shape"]) == ("Float64", "Float32", "(16, 2)")


def worse(function):
    def lossy(x, *args, **kwargs):
        given = (x * 64).round() / 64 if x.dtype == ms.float32 else x
        return function(given, *args, **kwargs)

    return lossy


@pytest.mark.parametrize("kind", ["dump", "real"])
def test_an_operation_that_loses_precision_is_named(kind, request, tmp_path, monkeypatch):
    monkeypatch.setattr(ops.functional, "softmax", worse(ops.softmax))
    [found] = check(request.getfixturevalue(kind), tmp_path).failures
    assert (found.call, found.forward) == ("Functional.softmax.0", "error")
    assert found.message.split(": ")[1] == "benchmark"


def test_a_wrong_backward_pass_is_told_from_a_wrong_forward_pass(dump, tmp_path, monkeypatch):
    relu = mint.nn.functional.relu

    def wrong(x):
        y = relu(x)
        return y + (y - ops.stop_gradient(y)) * 0.01 if x.dtype == ms.float32 else y

    monkeypatch.setattr(mint.nn.functional, "relu", wrong)
    [found] = check(dump, tmp_path).failures
    assert (found.call, found.forward, found.backward) == ("MintFunctional.relu.0", "pass", "error")


def test_what_a_kernel_of_float64_computes_in_float32_is_no_reference(tmp_path):
    calls = {"Functional.softplus.0.forward": call(x32(40)), "Functional.relu.0.forward": call(x32(40))}
    found = {c.call: c for c in check(write(tmp_path, calls), tmp_path / "out").calls}
    assert found["Functional.softplus.0"].message == "not compared: float64 is computed in float32 by this MindSpore"
    assert found["Functional.relu.0"].forward == "pass"


def test_half_types_are_compared_with_float32_and_a_missing_kernel_of_the_cpu_is_no_error(tmp_path):
    calls = {
        "Functional.softmax.0.forward": call(tensor(4, 8, dtype="Float16"), {"type": "int", "value": -1}),
        "Functional.relu.0.forward": call(tensor(4, dtype="BFloat16")),
        "MintFunctional.gelu.0.forward": call(x32(4)),
    }
    summary = check(write(tmp_path, calls), tmp_path / "out")
    found = {c.call: c for c in summary.calls}
    assert found["Functional.softmax.0"].forward == "pass"
    assert tables(summary)[1]["Functional.softmax.0.forward.output.0"]["Bench Dtype"] == "Float32"
    assert found["Functional.relu.0"].message.startswith("not compared: has no kernel on the CPU: TypeError: ")
    assert found["MintFunctional.gelu.0"].message.startswith("not compared: has no kernel on the CPU: RuntimeError: ")
    assert summary.is_clean


def test_calls_that_say_nothing_are_listed_with_the_reason(tmp_path):
    calls = {
        "Functional.uniform.0.forward": call(x32(3)),
        "Primitive.Dropout.0.forward": call(x32(3), init_attrs={}),
        "Primitive.MatMul.0.forward": call(x32(3, 3), x32(3, 3)),
        "MintDistributed.all_reduce.0.forward": call(x32(3)),
        "Tensor.asnumpy.0.forward": call(x32(3)),
        "mine.f.0.forward": call(x32(3)),
        "Cell.fc.Dense.forward.0": call(x32(3)),
    }
    summary = check(write(tmp_path, calls), tmp_path / "out")
    assert [c.message.removeprefix("not compared: ") for c in summary.calls] == [
        "random",
        "random",
        "is a primitive whose attributes were not recorded",
        "communicates with other ranks",
        "is no operation on tensors",
        "calls of mine are not checked",
    ]


def test_a_dropout_is_compared_by_its_share_of_zeros(tmp_path):
    calls = {"Functional.dropout.0.forward": call(x32(50, 50), {"type": "float", "value": 0.5})}
    summary = check(write(tmp_path, calls), tmp_path / "out")
    assert summary.calls[0].forward == "pass"
    assert "shares of zeros" in tables(summary)[1]["Functional.dropout.0.forward.output.0"]["Message"]


def run(*arguments):
    return CliRunner().invoke(app, ["check", *map(str, arguments), "--processes", "0"])


def test_bad_entries_cost_one_line_each(tmp_path):
    folder = tmp_path / "dump_tensor_data"
    folder.mkdir()
    np.save(folder / "good.npy", np.ones(3, np.float32))
    np.save(folder / "pickled.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    (folder / "torn.npy").write_bytes(b"\x93NUMPY\x01")
    calls = {
        "Mint.exp.0.forward": call(x32(3, data_name="good.npy")),
        "Mint.exp.1.forward": call(x32(3, data_name="gone.npy")),
        "Mint.exp.2.forward": call(x32(3, data_name="pickled.npy")),
        "Mint.exp.3.forward": call(x32(3, data_name="torn.npy")),
        "Mint.vanished.0.forward": call(x32(3, data_name="good.npy")),
        "Mint.exp.4.forward": call(tensor(3, dtype="Float9", data_name="good.npy")),
        "Mint.exp.5.forward": {"input_args": 5},
        "Primitive.MatMul.0.forward": {**call(), "init_attrs": {"wrong": {"type": "int", "value": 1}}},
        "Odd.forward": call(),
        "Mint.log.0.forward": 7,
    }
    result = run(write(tmp_path, calls), "-o", tmp_path / "out")
    assert result.exit_code == 1
    assert "Traceback" not in result.output
    assert "9 calls: 1 passed, 0 failed, 0 with a warning, 0 not compared, 9 could not be checked" in result.stdout
    lines = (result.stdout + result.stderr).splitlines()
    for name in [n.removesuffix(".forward") for n in list(calls)[1:]]:
        assert len([line for line in lines if line.startswith(name)]) <= 1
        assert [line for line in lines if name in line], name


def test_a_device_that_is_not_there_is_refused(tmp_path):
    path = write(tmp_path, {"Mint.exp.0.forward": call(x32(3))})
    for device in ("npu:0", "tpu"):
        result = run(path, "-o", tmp_path / device[:3], "--devices", device)
        assert result.exit_code == 2
        assert result.stderr.startswith(f"error: --devices: '{device}'"), result.stderr


def test_the_tables_are_the_same_from_processes_and_after_an_interruption(real, tmp_path):
    def content(folder):
        return [p.read_bytes() for p in sorted(folder.glob("*.csv"))]

    whole = check(real, tmp_path / "a", only=["relu", "matmul", "softmax"])
    check(real, tmp_path / "b", only=["relu", "matmul", "softmax"], processes=2)
    assert content(tmp_path / "a") == content(tmp_path / "b")
    rows = whole.result.read_bytes().splitlines(keepends=True)
    whole.result.write_bytes(b"".join(rows[:2]))
    expected = content(tmp_path / "b")
    check(real, tmp_path / "a", only=["relu", "matmul", "softmax"], resume=whole.result)
    assert content(tmp_path / "a") == expected


def test_msprobes_command_uses_its_rule_for_mindspore_and_failed_tensors_are_saved(tmp_path, monkeypatch):
    path = write(tmp_path, {"Functional.relu.0.forward": call(x32(30, low=-1e3, high=1e3))})
    monkeypatch.setattr(ops.functional, "relu", lambda x, f=ops.relu: f(x) * (1.000001 if x.dtype == ms.float32 else 1))
    arguments = ["-api_info", path, "-o", tmp_path / "out", "-save_error_data"]
    options = json.dumps({"run_ut": {"error_data_path": str(tmp_path / "bad")}})
    (tmp_path / "config.json").write_text(options)
    from trainsentry.monitor.cli import check as command

    monkeypatch.setattr(command, "run_check", lambda o, p, f=command.run_check: f(_here(o), p))
    result = CliRunner().invoke(app, ["run_ut", *map(str, arguments), "-config", str(tmp_path / "config.json")])
    assert result.exit_code == 1
    assert "mindspore: maximal absolute error" in result.stdout
    [folder] = (tmp_path / "bad").iterdir()
    assert {p.name for p in folder.iterdir()} == {
        f"Functional.relu.0.forward.{part}.0.npy" for part in ("input", "output.bench", "output.device")
    }


def _here(options):
    from dataclasses import replace

    return replace(options, processes=0)


def test_a_page_is_written(tmp_path):
    path = write(tmp_path, {"Mint.exp.0.forward": call(x32(3))})
    result = run(path, "-o", tmp_path / "out", "--html", tmp_path / "page.html")
    assert result.exit_code == 0
    assert "Mint.exp.0" in (tmp_path / "page.html").read_text()


# ---------------------------------------------------------------------- the parts


def built(described, name="Mint.exp.0", seed=1234):
    return InputBuilder(name, TensorSource(None, seed)).build(described)


@pytest.mark.parametrize("dtype", ["Float32", "Float16", "BFloat16", "Float64", "Int64", "Int32", "UInt8", "Int8"])
def test_a_drawn_tensor_has_shape_dtype_minimum_and_maximum(dtype):
    drawn = built(tensor(40, 5, low=2, high=90, dtype=dtype))
    assert (tuple(drawn.shape), str(drawn.dtype)) == ((40, 5), dtype)
    values = drawn.astype(ms.float64).asnumpy()
    assert (values.min(), values.max(), len(np.unique(values)) > 20) == (2, 90, True)
    assert np.array_equal(values, built(tensor(40, 5, low=2, high=90, dtype=dtype)).astype(ms.float64).asnumpy())


def test_every_kind_of_argument_is_built():
    described = [
        {"type": "mindspore.dtype", "value": "Float16"},
        {"type": "slice", "value": [0, None, 2]},
        [{"type": "int", "value": 3}, None],
        {"type": "float", "value": 0.5},
    ]
    assert built(described) == [ms.float16, slice(0, None, 2), (3, None), 0.5]
    assert tuple(built(x32()).shape) == ()
    assert tuple(built(x32(0, 3)).shape) == (0, 3)
    with pytest.raises(NotComparableError, match="takes a Group, which cannot be built anew"):
        built({"type": "Group", "value": None})
    with pytest.raises(UnusableCallError, match="has no dtype Float9"):
        built(tensor(3, dtype="Float9"))


def test_a_process_of_its_own_computes_the_same_as_this_one():
    entry = ("Mint.matmul.0", call(x32(3, 4), x32(4, 3)), {"input": [x32(3, 3)]})
    apart = RunsApart(TensorSource(None))
    try:
        for moved in (0.0, 1e-6):
            here, there = RunsHere(TensorSource(None)).run(entry, moved, 1), apart.run(entry, moved, 1)
            for one, other in zip(here.outputs + here.gradients, there.outputs + there.gradients, strict=True):
                assert isinstance(one, SideValue)
                assert one.dtype == "Float64"
                assert np.array_equal(one.array, other.array)
        with pytest.raises(TypeError):
            apart.run(("Mint.matmul.0", call(x32(3, 4)), None))
        with pytest.raises(UnusableCallError, match="has no vanished"):
            apart.run(("Mint.vanished.0", call(), None))
    finally:
        apart.close()


def test_beside_an_accelerator_the_cpu_computes_apart(monkeypatch):
    monkeypatch.setattr(checking, "on_host", lambda: False)
    monkeypatch.setattr(checking, "_choose", lambda _: None)
    checks = MindSporeChecks("npu:0", None, 1)
    try:
        assert isinstance(checks._precise, RunsApart)
        found = checks.check("Mint.exp.0", call(x32(8)), None)
        assert found.pairs[0].expected_dtype == "Float64"
    finally:
        checks._precise.close()


@pytest.fixture
def adapted(monkeypatch):
    """A package laid out as MSAdapter's."""
    names = ("torch", "torch.nn", "torch.nn.functional", "torch.distributed")
    modules = {name: types.ModuleType(name) for name in names}
    whole = modules["torch"]
    whole.nn, whole.distributed, whole.Tensor = modules["torch.nn"], modules["torch.distributed"], Tensor
    whole.nn.functional = modules["torch.nn.functional"]

    def relu(x, inplace=False):
        return mint.nn.functional.relu(x)

    def add(x, y):
        return mint.add(x, y)

    whole.nn.functional.relu, whole.add = relu, add
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return whole


def test_msadapters_names_are_looked_up_in_its_torch(adapted, tmp_path):
    calls = {
        "Torch.add.0.forward": call(x32(3), tensor(3, dtype="torch.float32")),
        "Functional.relu.0.forward": call(x32(3), inplace={"type": "bool", "value": True}),
        "Tensor.abs.0.forward": call(x32(3)),
        "Tensor.abs.0.backward": {"input": [x32(3)], "output": [x32(3)]},
        "Functional.gone.0.forward": call(x32(3)),
    }
    summary = check(write_dump(tmp_path, calls, framework="mindtorch"), tmp_path / "out")
    assert [c.forward for c in summary.calls] == ["pass"] * 3 + ["SKIP"]
    assert summary.calls[2].backward == "pass"
    assert summary.calls[3].message.endswith("has no gone in torch.nn.functional")
