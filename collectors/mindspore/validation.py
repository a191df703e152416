"""Checks the arguments of `watch` before the first step."""

from collections.abc import Sequence
from typing import Any

from mindspore import nn

from trainsentry.collectors.mindspore.rows.cell_names import CellNames
from trainsentry.collectors.mindspore.rows.parameters import parameters_of


def checked_models(model: Any) -> list[nn.Cell]:
    """Return the model chunks.

    Raises:
        TypeError: when a given object is not a cell.
        ValueError: when the model has no parameters.

    """
    chunks = list(model) if isinstance(model, (list, tuple)) else [model]
    if not chunks:
        raise ValueError("watch(model): got an empty list, allowed: mindspore.nn.Cell or a list of them")
    for chunk in chunks:
        if not isinstance(chunk, nn.Cell):
            raise TypeError(f"watch(model): got {type(chunk).__name__}, allowed: mindspore.nn.Cell or a list of them")
    if not any(True for chunk in chunks for _ in chunk.get_parameters()):
        names = ", ".join(type(chunk).__name__ for chunk in chunks)
        raise ValueError(f"watch(model): {names} has no parameters, allowed: a model that has some")
    return chunks


def checked_optimizers(optimizer: Any, chunks: Sequence[nn.Cell]) -> list[nn.Cell]:
    """Return the optimizers.

    Raises:
        TypeError: when a given object is not an optimizer of MindSpore.
        ValueError: when an optimizer holds no parameter of the model.

    """
    given = [] if optimizer is None else list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    owned = {id(p) for chunk in chunks for p in chunk.get_parameters()}
    for each in given:
        name = type(each).__name__
        if not isinstance(each, nn.Cell) or not hasattr(each, "parameters"):
            raise TypeError(f"watch(optimizer): got {name}, allowed: mindspore.nn.Optimizer or a list of them")
        if not any(id(p) in owned for p in parameters_of(each)):
            raise ValueError(
                f"watch(optimizer): none of the parameters of {name} belongs to the watched model; "
                "allowed: an optimizer made from net.trainable_params()"
            )
    return given


def check_new(chunks: Sequence[nn.Cell], names: CellNames) -> None:
    """Check that new models are distinct from those already watched.

    Raises:
        ValueError: when a model is watched already, or shares parameter names with one.

    """
    known = {id(m.module) for m in names.modules}
    if any(id(chunk) in known for chunk in chunks):
        raise ValueError("watch(model): this model is watched already; allowed: other cells, or close() first")
    added = CellNames()
    added.add(chunks)
    shared = {p.name for p in names.parameters} & {p.name for p in added.parameters}
    if shared:
        raise ValueError(
            f"watch(model): a model that is watched already has a parameter named {min(shared)!r} too; allowed: one "
            "call with mindspore.nn.CellDict({'generator': …, 'critic': …}), which gives each its own names"
        )
