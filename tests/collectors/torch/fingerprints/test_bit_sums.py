"""Fingerprints see every bit and every place, and those of parts add up to that of the whole."""

from itertools import pairwise

import pytest
import torch

from trainsentry.collectors.torch.fingerprints import bit_sums as module
from trainsentry.collectors.torch.fingerprints.bit_sums import bit_sums

MODULUS = 2**64
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def by_definition(tensor):
    """The sums over one element after the other."""
    flat = tensor.contiguous().reshape(-1)
    bits = flat.view(INTEGERS[flat.element_size()]).tolist()
    return sum(bits) % MODULUS, sum(b * (2 * i + 1) for i, b in enumerate(bits)) % MODULUS


def added(sums):
    return tuple(sum(numbers) % MODULUS for numbers in zip(*sums, strict=True))


def of(tensor):
    return bit_sums([(tensor, tuple(tensor.shape), "")])[0]


@pytest.mark.parametrize("shape", [(), (0,), (7,), (300, 301), (3, 5, 700)], ids=str)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64, torch.float8_e5m2]
)
def test_the_sums_are_those_of_the_definition(shape, dtype):
    tensor = (torch.randn(shape) * 1e4).to(dtype)
    before = tensor.clone()
    assert of(tensor) == by_definition(tensor)
    assert torch.equal(tensor.view(torch.uint8), before.view(torch.uint8)) if shape else True


def test_a_large_tensor_is_read_in_pieces_also_one_that_is_not_contiguous(monkeypatch):
    whole = torch.randn(40, 50, 60)
    expected = [by_definition(whole), by_definition(whole.permute(2, 0, 1)), by_definition(whole[:, 3:9])]
    for size in (module.ON_HOST, 1024):
        monkeypatch.setattr(module, "ON_HOST", size)
        assert [of(whole), of(whole.permute(2, 0, 1)), of(whole[:, 3:9])] == expected


def test_the_sums_of_boxes_add_up():
    whole = torch.randn(40, 50, 60)
    boxes = [(0, 13, 0, 50), (13, 40, 0, 17), (13, 40, 17, 50)]
    parts = [(whole[a:b, c:d], (40, 50, 60), f"{a}:{b},{c}:{d},0:60") for a, b, c, d in boxes]
    assert added(bit_sums(parts)) == by_definition(whole)


@pytest.mark.parametrize("cuts", [(0, 1, 1501, 3000), (0, 3000), (0, 0, 1500, 3000)], ids=str)
def test_the_sums_of_columns_add_up(cuts):
    whole = torch.randn(100, 3000)
    parts = [(whole[:, a:b].contiguous(), (100, 3000), f"0:100,{a}:{b}") for a, b in pairwise(cuts)]
    assert added(bit_sums(parts)) == by_definition(whole)


def test_the_sums_of_ranges_of_the_flat_tensor_add_up():
    whole = torch.randn(40, 50, 60)
    cuts = (0, 777, 100_000, 120_000)
    parts = [(whole.view(-1)[a:b], (40, 50, 60), f"{a}:{b}") for a, b in pairwise(cuts)]
    assert added(bit_sums(parts)) == by_definition(whole)


def test_one_bit_and_two_exchanged_elements_change_the_sums():
    tensor = torch.randn(1000)
    before = of(tensor)
    tensor.view(torch.int32)[500] ^= 1
    assert of(tensor)[0] != before[0]
    tensor.view(torch.int32)[500] ^= 1
    assert of(tensor) == before
    tensor[[3, 7]] = tensor[[7, 3]]
    assert of(tensor)[0] == before[0]
    assert of(tensor)[1] != before[1]
