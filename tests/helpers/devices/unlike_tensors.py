"""Tensors that do not lie in memory as a dense one of shape (2, 3) does."""

import torch
from torch import nn
from torch._subclasses import FakeTensorMode


def unlike_tensors():
    """Return {what differs: a tensor that differs from a dense one of shape (2, 3) in that way}."""
    x = torch.ones(2, 3)
    with FakeTensorMode():
        fake = torch.ones(2, 3)
    return {
        "transposed": torch.ones(3, 2).t(),
        "resized": torch.ones(3, 3),
        "flat": torch.ones(6),
        "part of rows": torch.ones(2, 4)[:, :3],
        "half": x.half(),
        "bfloat16": x.bfloat16(),
        "as wide": x.view(torch.int32),
        "parameter": nn.Parameter(x),
        "negative bit": torch._neg_view(x),
        "known zero": torch._efficientzerotensor(2, 3),
        "meta": x.to("meta"),
        "sparse": x.to_sparse(),
        "sparse rows": x.to_sparse_csr(),
        "nested": torch.nested.nested_tensor([torch.ones(3), torch.ones(2)]),
        "quantized": torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        "fake": fake,
        "complex": x.to(torch.complex64).conj(),
        "without elements": torch.ones(0, 3),
    }
