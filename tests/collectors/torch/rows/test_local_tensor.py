"""A tensor whose values other tensors hold cannot be read; one with a part on this rank can, through that part."""

import pytest
import torch
from torch import nn

from trainsentry.collectors.torch.rows.local_tensor import is_readable, local


class Codes(torch.Tensor):
    """Keeps its values elsewhere, as quantized weights do."""

    @staticmethod
    def __new__(cls, values):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)

    def __init__(self, values):
        self.values_elsewhere = values

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        raise NotImplementedError(operation)


class Sharded(Codes):
    """Has a part on this rank, as a DTensor does, which a collective brings."""

    def to_local(self):
        return Arriving(self.values_elsewhere)


class Arriving(Codes):
    """The result of a functional collective."""

    def trigger_wait(self):
        return self.values_elsewhere


@pytest.mark.parametrize(("kind", "readable"), [(Codes, False), (Sharded, True), (Arriving, True)])
def test_values_that_lie_elsewhere(kind, readable):
    values = torch.ones(3)
    tensor = kind(values)
    assert is_readable(tensor) == readable
    if readable:
        assert local(tensor).data_ptr() == values.data_ptr()


@pytest.mark.parametrize("make", [lambda x: x, nn.Parameter, nn.Buffer, lambda x: nn.Parameter(torch._lazy_clone(x))])
def test_torchs_own_tensors(make):
    values = torch.ones(3)
    tensor = make(values)
    assert is_readable(tensor)
    assert not is_readable(torch.ones(3, device="meta"))
