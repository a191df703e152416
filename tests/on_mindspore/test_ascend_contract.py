"""What is used on Ascend alone exists in MindSpore's published wheel, which is the one that is installed here."""

import inspect
import mmap
from pathlib import Path
from types import SimpleNamespace

import mindspore as ms
import pytest
from mindspore import amp, ops

from trainsentry.collectors.mindspore import runtime
from trainsentry.collectors.mindspore.calls import graph_dump, kernel_dump
from trainsentry.collectors.mindspore.calls.graph_taps import _names

LIBRARIES = Path(ms.__file__).parent


def libraries_hold(text):
    """Return whether one of the wheel's own libraries holds a text."""
    for library in sorted(LIBRARIES.glob("**/*mindspore*.so*")) + sorted(LIBRARIES.glob("_c_expression*.so")):
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if content.find(text.encode()) >= 0:
                return True
    return False


def test_tensor_dump_takes_a_name_and_a_tensor_and_writes_files_of_the_names_that_are_read():
    assert list(inspect.signature(ops.TensorDump.__init__).parameters) == ["self", "input_output"]
    made = inspect.signature(ops.TensorDump.__init__).parameters["input_output"].default
    assert made == "out"
    inputs = ops.TensorDump.__doc__.partition("Inputs:")[2].partition("Raises:")[0]
    assert inputs.index("**file**") < inputs.index("**input_x**")
    assert "fileName_dtype_id.npy" in ops.TensorDump.__doc__
    name = f"{Path(_names('Cell.net.Net', 'backward.@.input')[3]).name}_bfloat16_12.npy"
    found = graph_dump._FILE.fullmatch(name)
    assert found.groupdict() == {
        "call": "Cell.net.Net.backward", "direction": "backward", "side": "input", "place": "3", "number": "12"
    }  # fmt: skip


def test_the_operation_that_dumps_gradients_takes_a_function():
    assert list(inspect.signature(ops.InsertGradientOf.__init__).parameters) == ["self", "f"]


def test_every_key_of_the_kernel_dumps_configuration_is_known_to_the_library(tmp_path):
    chosen = SimpleNamespace(calls=["MatMul-op1"], scope=(), summary_mode="statistics", file_format="npy")
    config = SimpleNamespace(
        task="overflow_check", chosen=chosen, step=[1], rank=[], dump_path=str(tmp_path),
        selection=lambda _: SimpleNamespace(sides=frozenset({"input", "output"})),
        overflow_check=SimpleNamespace(overflow_nums=1, check_mode="all"),
    )  # fmt: skip
    written = kernel_dump.configuration(config)
    keys = {key for block in written.values() for key in block} | set(written)
    assert {key for key in keys if not libraries_hold(key)} == set()
    assert {value for value in kernel_dump._SAVED.values() if not libraries_hold(value)} == set()
    assert libraries_hold(kernel_dump.VARIABLE)
    assert not libraries_hold("no_such_key_of_a_dump_configuration")


def test_the_overflow_mode_is_what_mindspores_own_loss_scaler_goes_by():
    source = inspect.getsource(amp)
    for name in (runtime.OVERFLOW_MODE, f'"{runtime.SATURATION}"', f'"{runtime.FIRST_CHIPS}"', f'"{runtime.ASCEND}"'):
        assert name in source


@pytest.mark.parametrize(
    ("target", "mode", "first_chips", "saturates"),
    [
        ("CPU", "SATURATION_MODE", True, False),
        ("Ascend", None, True, True),
        ("Ascend", None, False, False),
        ("Ascend", "INFNAN_MODE", False, False),
        ("Ascend", "SATURATION_MODE", False, True),
    ],
)
def test_saturation_is_recognised(monkeypatch, target, mode, first_chips, saturates):
    asked = []

    def supports(feature):
        asked.append(feature)
        return first_chips

    context = SimpleNamespace(get_instance=lambda: SimpleNamespace(ascend_soc_supports_feature=supports))
    monkeypatch.setattr(runtime, "MSContext", context)
    monkeypatch.setattr(runtime.ms, "get_context", lambda _: target)
    if mode is None:
        monkeypatch.delenv(runtime.OVERFLOW_MODE, raising=False)
    else:
        monkeypatch.setenv(runtime.OVERFLOW_MODE, mode)
    assert runtime.saturates() is saturates
    assert asked in ([], [runtime.FIRST_CHIPS])


def test_the_context_that_is_asked_for_the_chip_has_the_question():
    assert hasattr(runtime.MSContext.get_instance(), "ascend_soc_supports_feature")
