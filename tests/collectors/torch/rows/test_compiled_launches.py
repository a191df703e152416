"""A kernel is launched as Triton has compiled it, with all its arguments, and by Triton wherever that does not work."""

import pytest
import torch
from counted_launches import counted_launches

from trainsentry.collectors.series import SeriesTable
from trainsentry.collectors.torch.rows.kernels.compiled_launches import CompiledLaunches, is_wide
from trainsentry.collectors.torch.rows.step_rows import StepRows

pytest.importorskip("triton", minversion="3.4", reason="the kernels need Triton 3.4, which comes with torch 2.8")


class Compiled:
    """What Triton gives back of a launch; `error` is raised where it is launched."""

    def __init__(self, error=None):
        self.error = error
        self.launched = []

    def __getitem__(self, grid):
        def launch(*args):
            if self.error is not None:
                raise self.error
            self.launched.append((grid, args))

        return launch


class Kernel:
    """Stands in for a kernel of Triton's; each launch gives back `compiled`."""

    def __init__(self, compiled):
        self.compiled = compiled
        self.launched = []

    def __getitem__(self, grid):
        def launch(*args, **constants):
            self.launched.append((grid, args, constants))
            return self.compiled

        return launch


def test_the_second_launch_of_a_kind_is_that_of_what_was_compiled():
    kernel = Kernel(Compiled())
    launches = CompiledLaunches(kernel)
    for programs in (3, 5, 7):
        launches.launch(programs, "float32", "x", 1, many=True, lanes=8)
    launches.launch(9, "bfloat16", "y", 1, many=True, lanes=8)
    assert [grid for grid, _, _ in kernel.launched] == [(3,), (9,)]
    assert kernel.compiled.launched == [((n, 1, 1), ("x", 1, True, 8)) for n in (5, 7)]


@pytest.mark.parametrize("error", [TypeError("takes 26 arguments"), AttributeError("run")])
def test_where_it_cannot_be_launched_triton_launches_from_then_on(error):
    kernel = Kernel(Compiled(error))
    launches = CompiledLaunches(kernel)
    for programs in range(1, 5):
        launches.launch(programs, "float32", "x", lanes=8)
    assert [grid for grid, _, _ in kernel.launched] == [(1,), (2,), (3,), (4,)]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError])
def test_what_the_device_raises_is_no_reason_to_launch_otherwise(error):
    kernel = Kernel(Compiled(error()))
    launches = CompiledLaunches(kernel)
    launches.launch(1, "float32", "x")
    with pytest.raises(error):
        launches.launch(2, "float32", "x")
    kernel.compiled.error = None
    launches.launch(3, "float32", "x")
    assert kernel.compiled.launched == [((3, 1, 1), ("x",))]


def test_the_interpreter_gives_nothing_back_and_launches_each_time():
    kernel = Kernel(None)
    launches = CompiledLaunches(kernel)
    for programs in range(1, 4):
        launches.launch(programs, "float32", "x")
    assert len(kernel.launched) == 3


def test_a_number_that_needs_64_bits_is_another_kind():
    assert not is_wide(2**31 - 1, 0)
    assert is_wide(7, 2**31)


def test_constants_are_given_in_the_order_of_the_kernels_parameters(monkeypatch):
    from trainsentry.collectors.torch.rows.kernels import triton_kernels

    given = {}
    with counted_launches() as counting:
        for name in ("partial_rows", "combine_rows"):
            kernel = Kernel(None)
            given[name] = kernel.launched
            monkeypatch.setattr(type(counting), name, kernel)
        rows = StepRows(SeriesTable(), device_rows_on_cpu=True)
        rows.add_many([0, 1], [torch.ones(3), torch.ones(5)])
        rows.add(2, torch.ones(4, dtype=torch.bfloat16))
        rows.take()
    assert [len(launched) for launched in given.values()] == [2, 1]
    for name, launched in given.items():
        for _, args, constants in launched:
            assert list(constants) == list(getattr(triton_kernels, name).arg_names)[len(args) :]
