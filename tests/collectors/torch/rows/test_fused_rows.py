"""The fused kernels agree with the NumPy reference in Triton's interpreter, and compile for real devices."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from counted_launches import counted_launches
from hypothesis import given, settings
from hypothesis import strategies as st

from trainsentry.collectors.series import SeriesTable
from trainsentry.collectors.statistics import MAX, MEAN, MIN, NORM, STATISTICS, reference
from trainsentry.collectors.torch.device.cpu import CPU
from trainsentry.collectors.torch.device.device import KernelLimits
from trainsentry.collectors.torch.device.npu import NPU
from trainsentry.collectors.torch.rows import device_rows
from trainsentry.collectors.torch.rows.kernels import chunks, fused_rows
from trainsentry.collectors.torch.rows.step_rows import StepRows

pytest.importorskip("triton", minversion="3.4", reason="the kernels need Triton 3.4, which comes with torch 2.8")

NAN, INF = math.nan, math.inf


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(type(CPU), "has_triton", lambda self: True)  # conftest.py has told Triton to interpret


@pytest.fixture(params=["float64", "float32"])
def accumulator(request, monkeypatch):
    """Sums in float64, and as on a device that has none."""
    monkeypatch.setattr(CPU, "has_float64", request.param == "float64")
    return request.param


def rows_of(tensors, eps=0.0, one_by_one=False, **kwargs):
    rows = StepRows(SeriesTable(), eps, device_rows_on_cpu=True)
    if one_by_one:
        for i, tensor in enumerate(tensors):
            rows.add(i, tensor)
    else:
        rows.add_many(list(range(len(tensors))), tensors, **kwargs)
    (device,) = rows._devices.values()
    pending = rows.take()
    pending.wait()
    return pending.resolve()[2], device.fused.launches


def assert_rows(tensors, values, eps=0.0):
    for tensor, row in zip(tensors, values, strict=True):
        want = reference(tensor.double().cpu().numpy(), eps)
        size = max(tensor.numel(), 1)
        for column, name in enumerate(STATISTICS):
            if column == NORM and np.isinf(np.float32(want[name])):
                assert np.isinf(row[column]) or row[column] == pytest.approx(want[name], rel=1e-6)
            elif column == NORM:  # a row of float32 holds no larger norm
                assert row[column] == pytest.approx(want[name], rel=1e-6, abs=1e-45), name
            elif column == MEAN:
                bound = 1e-6 * want["norm"] / math.sqrt(size) + 1e-45
                assert row[column] == pytest.approx(want[name], abs=bound, nan_ok=True), name
            elif column in {MIN, MAX}:
                assert row[column] == pytest.approx(want[name], rel=1e-7, abs=0, nan_ok=True), name
            else:
                assert row[column] == pytest.approx(want[name], rel=1e-6, nan_ok=True), name


def odd_tensors():
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(37, 11, generator=generator),
        torch.randn(40_000, generator=generator),
        torch.randn(5_000, generator=generator).bfloat16(),
        torch.randn(5_000, generator=generator).half(),
        torch.tensor([1.0, NAN, INF, -INF, 0.0, NAN]),
        torch.tensor([NAN, -INF]),
        torch.full((1000,), 3e38),
        torch.full((1000,), -1e30),
        torch.full((500,), 1e-30),
        torch.full((10,), 1e-45),
        torch.cat([torch.full((10,), 1e20), torch.full((10,), 1e-30), torch.randn(100, generator=generator)]),
        torch.zeros(1),
        torch.tensor(-2.5),
        torch.tensor([60000.0, 6e-8]).half(),
        torch.empty(0, 3),
    ]


def whole_numbers():
    wide = torch.tensor([2**31 + 1, -(2**52) - 1, 0, 7, 2**53 - 1])
    return [
        wide,
        torch.arange(-20_000, 20_001),
        torch.tensor([-(2**31), 2**31 - 1, 0], dtype=torch.int32),
        torch.tensor([-(2**15), 3, 0, 0], dtype=torch.int16)[1:],
        torch.tensor([-128, 127, 0], dtype=torch.int8),
        torch.tensor([255, 0, 200], dtype=torch.uint8),
        torch.tensor([True, False, True, True]),
        torch.tensor(5),
        torch.empty(0, 3, dtype=torch.int64),
    ]


@pytest.mark.parametrize("one_by_one", [False, True])
def test_whole_numbers_are_read_exactly_and_with_others_where_sums_are_doubles(one_by_one):
    tensors = whole_numbers()
    values, launches = rows_of(tensors, eps=3.0, one_by_one=one_by_one)
    assert_rows(tensors, values, eps=3.0)
    assert launches == (len(tensors) - 1 if one_by_one else 6) + 1  # one a dtype, and one to combine
    assert values[0, MIN] == -(2**52) - 1
    assert values[0, MAX] == 2**53 - 1


def test_whole_numbers_are_read_by_plain_operations_where_no_sum_is_a_double(monkeypatch):
    monkeypatch.setattr(CPU, "has_float64", False)
    tensors = [torch.arange(9), torch.tensor([True, False]), torch.ones(3)]
    values, launches = rows_of(tensors)
    assert_rows(tensors, values)
    assert launches == 2


@pytest.mark.parametrize("one_by_one", [False, True])
def test_odd_tensors_one_by_one_and_together(accumulator, one_by_one):
    tensors = odd_tensors()
    values, launches = rows_of(tensors, one_by_one=one_by_one)
    assert_rows(tensors, values)
    if one_by_one:
        assert launches == len(tensors) - 1 + 1  # one for each but the empty one, and one to combine
    else:
        assert launches == 3 + 1  # one for each dtype


def test_zeros_within_eps(accumulator):
    tensors = [torch.tensor([0.0, 1e-8, -1e-9, 1.1e-8, 1e-3])]
    values, _ = rows_of(tensors, eps=1e-8, one_by_one=True)
    assert_rows(tensors, values, eps=1e-8)


@given(
    values=st.lists(
        st.one_of(st.floats(width=32), st.sampled_from([0.0, NAN, INF, 1e-40, -3e-42, 1e-45, 3e38, 1e12, 1e-13])),
        min_size=1,
        max_size=40,
    )
)
@settings(max_examples=40, deadline=None)
def test_any_float32_values(values):
    tensor = torch.tensor(np.asarray(values, np.float32))
    for has_float64 in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CPU, "has_float64", has_float64)
            got, _ = rows_of([tensor])
            assert_rows([tensor], got)


def test_all_gradients_in_a_few_launches_whatever_their_number():
    tensors = [torch.randn(i % 7 + 1) for i in range(200)]
    values, launches = rows_of(tensors)
    assert launches == 2
    assert_rows(tensors[:50], values[:50])
    assert values[-1, NORM] == pytest.approx(tensors[-1].norm().item(), rel=1e-6)


def test_large_tensors_are_cut_into_chunks_and_a_full_arena_is_combined_in_between(monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK", chunks.TILE)
    monkeypatch.setattr(fused_rows, "ARENA_ROWS", 16)
    tensors = [torch.randn(9 * chunks.TILE + 5) for _ in range(3)]
    values, launches = rows_of(tensors, one_by_one=True)
    assert_rows(tensors, values)
    assert launches == 3 + 3
    values, _ = rows_of(tensors[:1])
    assert_rows(tensors[:1], values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("one_by_one", [False, True])
def test_views_that_begin_anywhere_and_end_anywhere(dtype, one_by_one, monkeypatch):
    """The kernel's main loop loads 16 bytes at a time from an aligned address: what is before and after counts too."""
    monkeypatch.setattr(chunks, "CHUNK", chunks.TILE)
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(2 * chunks.TILE + 100, generator=generator).to(dtype)
    sizes = [1, 3, 7, 8, 9, chunks.LANES, chunks.TILE - 1, chunks.TILE, chunks.TILE + 1, 2 * chunks.TILE + 13]
    views = [whole[start : start + size] for start in (0, 1, 3, 7, 8) for size in sizes]
    values, _ = rows_of(views, one_by_one=one_by_one)
    assert_rows(views, values)


LIMITS = {
    "usual": KernelLimits(alignment=16, most_programs=65_535),
    "an NPU": NPU.kernel_limits,
    "little memory": KernelLimits(alignment=64, most_programs=65_535, most_tile_bytes=9_000),
}


@pytest.fixture(params=LIMITS)
def limits(request, monkeypatch):
    """The host with the limits of a device."""
    monkeypatch.setattr(type(CPU), "kernel_limits", property(lambda self: LIMITS[request.param]))
    monkeypatch.setattr(chunks, "CHUNK", chunks.TILE)
    return LIMITS[request.param]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernels_keep_to_the_limits_of_their_device_and_say_the_same(limits, dtype, accumulator):
    """The main loop begins at an address that is aligned for the device, wherever a tensor begins."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(chunks.TILE + 200, generator=generator).to(dtype)
    sizes = [1, 15, 40, 1500, chunks.TILE + 13]
    views = [whole[start : start + size] for start in (0, 1, 5, 33) for size in sizes]
    assert_rows(views, rows_of(views)[0])
    assert_rows(views[3:4], rows_of(views[3:4], one_by_one=True)[0])


def test_a_launch_is_told_the_alignment_and_the_tile_that_fits(limits, monkeypatch):
    launched = []
    with counted_launches() as kernels:
        monkeypatch.setattr(kernels.__class__, "partial_rows", Told(launched))
        rows_of([torch.ones(3), torch.ones(5)])
    told = launched[0]
    tile = chunks.Tile(told["lanes"], told["unroll"])
    assert told["alignment"] == limits.alignment
    assert chunks.TILE % (tile.lanes * tile.unroll) == 0
    assert tile.lanes >= limits.alignment // 2  # elements of two bytes before the first aligned address
    if limits.most_tile_bytes:
        assert tile.lanes * chunks.LANE_BYTES <= limits.most_tile_bytes
        assert tile.lanes * (tile.unroll * chunks.ELEMENT_BYTES + chunks.LANE_BYTES // 2) <= limits.most_tile_bytes
    else:
        assert tile == chunks.Tile()


class Told:
    """A kernel that notes what its launches are told, and writes nothing."""

    def __init__(self, launched):
        self.launched = launched

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.launched.append(kwargs)


@pytest.mark.parametrize("at", [0, 1, chunks.TILE - 1, chunks.TILE, chunks.TILE + 4, -1])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_one_bad_value_anywhere_is_counted_and_left_out_of_the_rest(at, bad):
    tensor = torch.randn(2 * chunks.TILE + 5, generator=torch.Generator().manual_seed(0))
    tensor[at] = bad
    values, _ = rows_of([tensor], one_by_one=True)
    assert_rows([tensor], values)


def test_squares_of_the_largest_values_do_not_overflow():
    tensors = [torch.full((chunks.TILE,), 3.4e38), torch.full((chunks.TILE,), 3.3e38).bfloat16()]
    values, _ = rows_of(tensors)
    assert_rows(tensors, values)


def test_divisor_norms_and_other_dtypes_beside_the_kernels():
    tensors = [torch.ones(4), torch.full((3,), 2.0, dtype=torch.float64), torch.ones(9).bfloat16()]
    norms = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    values, _ = rows_of(tensors, divisor=torch.tensor(2.0), norms=norms)
    assert values[:, NORM].tolist() == pytest.approx([1.0, math.sqrt(12) / 2, 1.5])
    assert values[:, 7].tolist() == pytest.approx([1.0, math.sqrt(12) / 4, 0.375])


def test_rows_outgrow_their_buffer_between_the_beginning_and_the_combining(monkeypatch):
    monkeypatch.setattr(device_rows, "FIRST_ROWS", 4)
    tensors = [torch.full((2,), float(i)) for i in range(30)]
    values, _ = rows_of(tensors, one_by_one=True)
    assert values[:, MAX].tolist() == [float(i) for i in range(30)]


def test_kernels_that_cannot_be_launched_make_way_and_leave_nothing_behind(monkeypatch, caplog):
    tensors = [torch.randn(5), torch.randn(6)]
    rows = StepRows(SeriesTable(), device_rows_on_cpu=True)
    rows.add(0, tensors[0])
    (device,) = rows._devices.values()
    monkeypatch.setattr(device.fused, "begin", lambda *_: 1 / 0)
    rows.add_many([1, 2], tensors)
    rows.add(3, tensors[1])
    assert device.fused is None
    assert "slower ones do" in caplog.text
    pending = rows.take()
    pending.wait()
    assert_rows([tensors[0], *tensors, tensors[1]], pending.resolve()[2])


class Broken:
    """A kernel that does not compile."""

    def __getitem__(self, grid):
        raise RuntimeError("ptxas: unsupported")


def test_a_kernel_that_fails_when_rows_are_combined_loses_those_rows_and_no_later_one(monkeypatch, caplog):
    rows = StepRows(SeriesTable(), device_rows_on_cpu=True)
    tensors = [torch.randn(5), torch.randn(6)]
    rows.add_many([1, 2], tensors)
    rows.add(3, torch.ones(3, dtype=torch.float64))
    (device,) = rows._devices.values()
    monkeypatch.setattr(device.fused._combine_rows, "kernel", Broken())
    ids, _, values = rows.take().resolve()
    assert ids.tolist() == [3]
    assert values[0, MAX] == 1.0
    rows.add_many([1, 2], tensors)
    ids, _, values = rows.take().resolve()
    assert ids.tolist() == [1, 2]
    assert_rows(tensors, values)
    assert caplog.text.count("slower ones do") == 1


def test_a_device_without_memory_for_the_monitor_loses_rows_and_is_asked_again(monkeypatch):
    refused = []
    rows = StepRows(SeriesTable(), refused=refused.append, device_rows_on_cpu=True)
    tensors = [torch.randn(5), torch.randn(6)]
    rows.add_many([1, 2], tensors)
    (device,) = rows._devices.values()

    def out_of_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(device.fused, "_launch", lambda *args, **kwargs: out_of_memory())
        rows.add_many([3, 4], tensors)
        rows.add_shared(5, tensors[0])
        rows.read_gathered()
    assert rows.take().resolve()[0].tolist() == [1, 2]
    assert {type(error) for error in refused} == {torch.OutOfMemoryError}
    rows.add_many([1, 2, 3], [*tensors, torch.ones(1)])
    ids, _, values = rows.take().resolve()
    assert ids.tolist() == [1, 2, 3]
    assert_rows([*tensors, torch.ones(1)], values)


COMPILE = """
import glob, os, re, subprocess, tempfile
import triton
from triton import language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from trainsentry.collectors.torch.rows.kernels import triton_kernels as kernels
from trainsentry.collectors.torch.rows.kernels.chunks import LANES, UNROLL

def compile(kernel, signature, constants, capability):
    signature |= dict.fromkeys(constants, "constexpr")
    return triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", capability, 32))

ALL = ((False, False), (True, True), (True, False))
WHOLE = dict.fromkeys(("*i64", "*i32", "*i8", "*u8", "*i1"), ALL[1:2])
for capability, dtypes in ((80, {"*bf16": ALL[2:]}), (90, WHOLE | {"*bf16": ALL[2:], "*fp16": ALL[2:], "*fp32": ALL})):
    for x, variants in dtypes.items():
        for many, histograms in variants:
            table = "*i64" if many else x
            tables = dict.fromkeys(("addresses", "sizes", "places", "slots"), table)
            counted = ("*i32", "*fp32") if histograms else ("*fp64", "*fp64")
            numbers = {"first": "i32", "size": "i32", "chunk": "i32", "slot": "i32", "eps": "fp32"}
            places = {"partials": "*fp64", "counters": counted[0], "divisor": counted[1]}
            signature = {"x_pointer": x, **tables, **places, **numbers}
            constants = {"many": many, "split": False, "accumulator": tl.float64, "lanes": LANES, "unroll": UNROLL}
            constants |= {"alignment": 16, "histograms": histograms}
            built = compile(kernels.partial_rows, signature, constants, capability)
            assert built.asm["cubin"]
            wide = re.findall(r"cp\\.async\\.cg\\.shared\\.global \\[[^]]*\\], \\[[^]]*\\], 0x10", built.asm["ptx"])
            assert x in WHOLE or len(wide) >= 8, "the main loop loads less than 16 bytes at a time"
    signature = {"partials": "*fp64", **dict.fromkeys(("firsts", "counts", "sizes", "slots"), "*i64"), "rows": "*fp64"}
    constants = {"split": False, "accumulator": tl.float64}
    for kernel in (kernels.partial_rows, kernels.combine_rows):
        numbers = {"eps", "first", "size", "chunk", "slot"}
        pointers = [p for p in kernel.params if not p.is_constexpr and p.name not in numbers]
        assert all(p.do_not_specialize_on_alignment for p in pointers), "tables lie anywhere"
    assert compile(kernels.combine_rows, signature, constants | {"block": 256}, capability).asm["cubin"]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(built.asm["ptx"])
        file.flush()
        arch = re.search(r"\\.target (\\w+)", built.asm["ptx"])[1]
        told = []
        for ptxas in glob.glob(os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/ptxas*")):
            command = [ptxas, "-v", f"-arch={arch}", file.name, "-o", "/dev/null"]
            done = subprocess.run(command, capture_output=True, text=True)
            told.append(done.stderr + done.stdout)
    assert any("0 bytes spill stores" in text for text in told), told
print("compiled")
"""


def test_the_kernels_compile_for_cuda_and_fit_its_registers(tmp_path):
    environment = {"TRITON_CACHE_DIR": str(tmp_path), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment)
    assert done.stdout.strip().endswith("compiled"), done.stderr[-3000:]
