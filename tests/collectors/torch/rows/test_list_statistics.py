"""Lists of tensors are read by few plain operations, whose results are those of the NumPy reference."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainsentry.collectors.series import SeriesTable
from trainsentry.collectors.statistics import MAX, MEAN, MIN, NORM, STATISTICS, reference
from trainsentry.collectors.torch.device.cpu import CPU
from trainsentry.collectors.torch.rows import list_passes, list_statistics
from trainsentry.collectors.torch.rows.list_passes import BLOCK, FAN, plan, tree
from trainsentry.collectors.torch.rows.list_statistics import ListStatistics
from trainsentry.collectors.torch.rows.step_rows import StepRows

NAN, INF = math.nan, math.inf
HOST = torch.device("cpu")
MOST_OPERATIONS = 90
"""For a list of one dtype that one pass reads: some 20 over all elements, the others over rows of blocks."""


@pytest.fixture(params=["float64", "float32"])
def accumulator(request, monkeypatch):
    """Rows in float64, and as on a device that has none."""
    monkeypatch.setattr(CPU, "has_float64", request.param == "float64")
    return request.param


@pytest.fixture
def small_passes(monkeypatch):
    """Passes of four blocks and steps of two rows, so that small tensors take several."""
    monkeypatch.setattr(list_passes, "PASS_BLOCKS", 4)
    monkeypatch.setattr(list_statistics, "PASS_BLOCKS", 4)
    monkeypatch.setattr(list_passes, "FAN", 2)
    plan.cache_clear()
    yield
    plan.cache_clear()


def assert_rows(tensors, rows, eps=0.0):
    assert rows.shape == (len(tensors), 8)
    narrow = rows.dtype is torch.float32
    for x, row in zip(tensors, rows.tolist(), strict=True):
        array = x.numpy() if x.is_complex() or not x.is_floating_point() else x.double().numpy()
        want = reference(array, eps)
        for column, name in enumerate(STATISTICS):
            if column == MEAN:
                bound = 2e-6 * want["norm"] / math.sqrt(max(x.numel(), 1)) + (1e-43 if narrow else 1e-320)
                assert row[column] == pytest.approx(want[name], abs=bound, nan_ok=True), name
            elif column == NORM and narrow and want[name] > torch.finfo(torch.float32).max:
                assert row[column] == INF
            elif column == NORM:
                assert row[column] == pytest.approx(want[name], rel=2e-6, abs=1e-44 if narrow else 1e-320), name
            elif column in {MIN, MAX}:
                assert row[column] == pytest.approx(want[name], rel=1e-7, abs=0, nan_ok=True), name
            else:
                assert row[column] == pytest.approx(want[name], rel=1e-6, abs=0, nan_ok=True), name
        assert math.isnan(row[7])


def odd_tensors():
    generator = torch.Generator().manual_seed(0)
    usual = [torch.randn(n, generator=generator) for n in (1, 2, 1023, 1024, 1025, 5 * 1024, 70_001)]
    return [
        *usual,
        torch.randn(37, 11, generator=generator),
        torch.randn(5_000, generator=generator).bfloat16(),
        torch.randn(5_000, generator=generator).half(),
        torch.tensor([1.0, NAN, INF, -INF, 0.0, NAN]),
        torch.tensor([NAN, -INF]),
        torch.full((2000,), NAN),
        torch.full((3000,), 3e38),
        torch.full((2000,), -1e30),
        torch.full((500,), 1e-30),
        torch.full((10,), 1e-45),
        torch.cat([torch.full((2000,), 1e20), torch.full((10,), 1e-30), torch.randn(100, generator=generator)]),
        torch.zeros(1),
        torch.zeros(3000),
        torch.tensor(-2.5),
        torch.tensor([60000.0, 6e-8]).half(),
        torch.full((2000,), 3.3e38).bfloat16(),
        torch.empty(0, 3),
        torch.arange(24_000.0).reshape(40, 600).t(),
        torch.arange(24_000.0).reshape(40, 600).t()[1:, ::2],
        torch.arange(-5, 3000),
        torch.tensor([True, False, True]),
        torch.tensor([3 + 4j, 0j, complex(NAN, 1), complex(1, INF)]),
    ]


def test_odd_tensors_of_all_dtypes_together(accumulator):
    tensors = odd_tensors()
    assert_rows(tensors, ListStatistics(HOST).rows_of(tensors))


def test_doubles_out_of_the_range_of_single_precision():
    tensors = [torch.full((3000,), 1e300, dtype=torch.float64), torch.tensor([1e-310, -3e-320], dtype=torch.float64)]
    assert_rows(tensors, ListStatistics(HOST).rows_of(tensors))


def test_several_passes_and_steps_say_the_same(accumulator, small_passes):
    tensors = odd_tensors()
    assert len(plan(tuple(x.numel() for x in tensors), tuple(x.dtype for x in tensors)).passes) > 30
    assert_rows(tensors, ListStatistics(HOST).rows_of(tensors))


class Finite(TorchDispatchMode):
    """Fails where an operation on finite values makes an Inf or NaN, other than by writing one on purpose."""

    BY_DESIGN = ("masked_fill", "full")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
        if isinstance(result, torch.Tensor) and all(torch.isfinite(x).all() for x in given):
            assert torch.isfinite(result).all() or any(name in str(function) for name in self.BY_DESIGN), function
        return result


def test_finite_tensors_make_no_overflow_of_ours_though_their_norm_is_too_large(accumulator):
    """On a device that saturates it would set the flag by which a loss scaler skips a step."""
    largest = [torch.full((3000,), torch.finfo(dtype).min, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    tensors = [*largest, torch.zeros(5), torch.empty(0), torch.full((7,), 1e-42), torch.randn(4000)]
    with Finite():
        rows = ListStatistics(HOST).rows_of(tensors)
    assert_rows(tensors, rows)


def test_zeros_within_eps():
    tensors = [torch.tensor([0.0, 1e-9, -1e-9, 1e-3, 1.0]), torch.tensor([NAN, 1e-8])]
    assert_rows(tensors, ListStatistics(HOST).rows_of(tensors, 1e-8), 1e-8)


def test_nothing_but_empty_tensors():
    tensors = [torch.empty(0), torch.empty(3, 0).half()]
    assert_rows(tensors, ListStatistics(HOST).rows_of(tensors))


usual = st.floats(width=32)
odd = st.sampled_from([0.0, NAN, INF, -INF, 1e-40, -3e-42, 1e-45, 3e38])
sizes = st.sampled_from([0, 1, 3, 1023, 1024, 1025, 3000])
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])


@st.composite
def lists(draw):
    """Tensors of some values, repeated to odd sizes, as they are or as every second element of a larger one."""
    tensors = []
    for _ in range(draw(st.integers(1, 6))):
        values = torch.tensor(draw(st.lists(st.one_of(usual, odd), min_size=1, max_size=5))).to(draw(dtypes))
        size, stride = draw(sizes), draw(st.sampled_from([1, 2]))
        tensors.append(values.repeat(size * stride // len(values) + 1)[: size * stride : stride])
    return tensors


@given(tensors=lists())
@settings(max_examples=120, deadline=None)
def test_any_list(tensors):
    assert_rows(tensors, ListStatistics(HOST).rows_of(tensors))


class Counts(TorchDispatchMode):
    """Counts operations that launch work (views do not), and fails on one that waits for values."""

    WAIT = ("_local_scalar_dense", "nonzero", "index_put", "scatter", "index_add", "unique", "_to_cpu")

    def __init__(self):
        super().__init__()
        self.launched = []
        self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert not any(name in str(function) for name in self.WAIT), function
        result = function(*args, **(kwargs or {}))
        if not function.is_view:
            self.launched.append(str(function))
            if isinstance(result, torch.Tensor):
                self.largest = max(self.largest, result.numel())
        return result


def operations(tensors, read=None):
    """Return the launches by which a list is read that was read before."""
    statistics = ListStatistics(HOST)
    statistics.rows_of(tensors)
    with Counts() as counted:
        (read or statistics.rows_of)(tensors)
    return counted


def test_a_hundred_tensors_take_as_many_operations_as_one():
    one = operations([torch.randn(300 * BLOCK)])
    many = operations([torch.randn(17 * i + 1) for i in range(100)])
    more = operations([torch.randn(i % 7 + 1) for i in range(3000)])
    assert len(many.launched) <= MOST_OPERATIONS
    assert len(more.launched) <= len(many.launched) <= len(one.launched) <= MOST_OPERATIONS


def test_a_pass_bounds_the_memory_and_a_large_tensor_is_not_copied_whole(small_passes):
    large = [torch.randn(4096 * 5 + 77), torch.randn(70, 300).t(), torch.randn(64, 600)[:, ::2]]
    counted = operations(large)
    assert counted.largest <= 5 * BLOCK  # a pass and the block of padding
    assert_rows(large, ListStatistics(HOST).rows_of(large))


def test_a_step_without_kernels_reads_lists_and_gathered_tensors_together_and_nothing_waits():
    def step(rows):
        rows.add(99, anchor)
        rows.add_many(range(100), gradients, norms=norms)
        for i, x in enumerate(activations):
            rows.add_shared(200 + i, x)
        return rows.take()

    anchor, norms = torch.ones(1), torch.full((100,), 2.0)
    gradients = [torch.randn(31 * i + 1).to(torch.bfloat16 if i % 2 else torch.float32) for i in range(100)]
    activations = [torch.randn(5, i + 1) for i in range(60)]
    rows = StepRows(SeriesTable(), device_rows_on_cpu=True)
    step(rows).resolve()
    with Counts() as counted:
        pending = step(rows)
    assert len(counted.launched) <= 3 * MOST_OPERATIONS  # two dtypes of gradients, and the activations
    ids, _, values = pending.resolve()
    found = dict(zip(ids.tolist(), values, strict=True))
    for i, x in [*enumerate(gradients), *((200 + i, x) for i, x in enumerate(activations))]:
        assert found[i][NORM] == pytest.approx(x.double().norm().item(), rel=1e-6)
    assert found[7][7] == pytest.approx(found[7][NORM] / 2)


def test_tables_are_sent_once_for_a_list_that_recurs_and_are_bounded(monkeypatch):
    sent = []
    monkeypatch.setattr(type(CPU), "copy_to_device", lambda *args: sent.append(1) or torch.from_numpy(args[1].copy()))
    monkeypatch.setattr(list_statistics, "MOST_TABLES", 6)
    statistics = ListStatistics(HOST)
    tensors = [torch.randn(n) for n in (5, 3000, 1)]
    for _ in range(5):
        statistics.rows_of(tensors)
    assert len(sent) == 2  # of the pass and of the list
    for n in range(1, 20):
        assert_rows([torch.ones(n)], statistics.rows_of([torch.ones(n)]))
    assert len(statistics._tables) <= 6


def test_equal_lists_have_equal_rows_to_the_bit():
    tensors = [torch.randn(n) for n in (5000, 100_000, 3)]
    first = ListStatistics(HOST).rows_of(tensors)
    assert np.array_equal(first.numpy(), ListStatistics(HOST).rows_of(tensors).numpy(), equal_nan=True)


@pytest.mark.parametrize("counts", [[1], [0, 3, 0], [FAN], [FAN + 1, 1], [5000, 1, 0, 64], [1] * 300])
def test_a_tree_combines_each_row_once(counts):
    owners = np.append(np.repeat(np.arange(len(counts)), counts), -1)
    held = [[i] for i in range(len(owners) - 1)] + [[]]
    for step in tree(owners, len(counts)):
        assert step.shape[1] <= FAN
        held = [[row for place in group for row in held[place]] for group in step.tolist()]
    assert [len(rows) for rows in held] == [*counts, 0]
    assert [row for rows in held for row in rows] == list(range(len(owners) - 1))
