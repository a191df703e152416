"""Tensors are found wherever modules hide them."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from trainsentry.collectors.torch.hooks.nested_tensors import tensors_in, tensors_in_call

T = torch.ones(1)


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Output:
    logits: Any
    hidden: Any = None


def paths(value):
    return [path for path, _ in tensors_in(value)]


def test_nested_containers_and_dataclasses():
    assert paths(T) == ["0"]
    assert paths((T, [T, {"a": T}], None, 3, "text")) == ["0", "1.0", "1.1.a"]
    assert paths(Output(T, (T, Output(T)))) == ["logits", "hidden.0", "hidden.1.logits"]
    assert paths(Pair(T, T)) == ["0", "1"]


def test_a_container_that_holds_itself_comes_to_an_end():
    loop = [T]
    loop.append(loop)
    assert 0 < len(paths(loop)) < 20


def test_keyword_arguments_go_by_their_names():
    assert [p for p, _ in tensors_in_call((T,), {"mask": T, "scale": 2.0})] == ["0", "mask"]
