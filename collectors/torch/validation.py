"""Checks the arguments of `watch` before the first step."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from trainsentry.collectors.torch.optimizers.masters import masters_of
from trainsentry.collectors.torch.optimizers.wrappers import advice, is_plain, unwrapped
from trainsentry.collectors.torch.parameters.readers import parameters_of
from trainsentry.collectors.torch.sharding.dtensor import has_dtensors
from trainsentry.collectors.torch.sharding.model_names import ModelNames
from trainsentry.collectors.torch.sharding.registry import engine_optimizers, outer_optimizers
from trainsentry.collectors.torch.sharding.sharding import OuterOptimizer


def checked_models(model: Any) -> list[nn.Module]:
    """Return the model chunks.

    Raises:
        TypeError: when a given object is not a module.
        ValueError: when the model has no parameters.

    """
    chunks = list(model) if isinstance(model, (list, tuple)) else [model]
    if not chunks:
        raise ValueError("watch(model): got an empty list, allowed: torch.nn.Module or a list of them")
    for chunk in chunks:
        if not isinstance(chunk, nn.Module):
            raise TypeError(f"watch(model): got {type(chunk).__name__}, allowed: torch.nn.Module or a list of them")
    if not any(True for chunk in chunks for _ in chunk.parameters()):
        names = ", ".join(type(chunk).__name__ for chunk in chunks)
        raise ValueError(f"watch(model): {names} has no parameters, allowed: a model that has some")
    return chunks


def checked_optimizers(optimizer: Any, chunks: Sequence[nn.Module]) -> dict[Optimizer, OuterOptimizer | None]:
    """Return the optimizers, each with the optimizer around it that steps it, or None.

    An engine brings its own optimizer along, so it need not be given.

    Raises:
        TypeError: when a given object is neither a torch optimizer nor a known wrapper around one.
        ValueError: when an optimizer holds no parameter of the model.

    """
    if optimizer is None:
        optimizer = engine_optimizers(chunks)
    given = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    outer = {each.inner: each for each in outer_optimizers(chunks, given)}
    inner_of = {id(each.optimizer): each.inner for each in outer.values()}
    found: dict[Optimizer, OuterOptimizer | None] = {}
    for each in unwrapped(given):
        inner = inner_of.get(id(each.optimizer), each.optimizer)
        if not is_plain(inner):
            raise TypeError(f"watch(optimizer): got {type(inner).__name__}, allowed: {advice(inner)}")
        if inner not in outer and not holds_any(inner, chunks):
            raise ValueError(_foreign_message(inner, chunks))
        found[inner] = outer.get(inner)
    return found


def holds_any(optimizer: Optimizer, chunks: Sequence[nn.Module]) -> bool:
    """Whether an optimizer holds a parameter of the model, or an fp32 master of one."""
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    owned = {id(p) for p in parameters}
    return any(id(p) in owned for p in parameters_of(optimizer)) or bool(masters_of(parameters, [optimizer]))


def _foreign_message(optimizer: Optimizer, chunks: Sequence[nn.Module]) -> str:
    """Return the error message for an optimizer that holds no parameter of the model."""
    name = type(optimizer).__name__
    if any(map(has_dtensors, chunks)):
        return (
            f"watch(optimizer): {name} was made before fully_shard (or parallelize_module) replaced the parameters it "
            "holds by sharded ones, so it updates nothing; allowed: an optimizer made afterwards, from "
            "model.parameters()"
        )
    return (
        f"watch(optimizer): none of the parameters of {name} belongs to the watched model; "
        "allowed: an optimizer made from model.parameters(), or one of fp32 copies of them"
    )


def names_of(chunks: Sequence[nn.Module], optimizers: Iterable[Any]) -> ModelNames:
    """Return the names of model chunks."""
    names = ModelNames()
    names.add(chunks, optimizers)
    return names


def check_scaler(grad_scaler: Any) -> None:
    """Check the given loss scaler.

    Raises:
        TypeError: when it lacks the methods of `torch.amp.GradScaler`.

    """
    if grad_scaler is not None and not all(callable(getattr(grad_scaler, m, None)) for m in ("step", "scale")):
        raise TypeError(f"watch(grad_scaler): got {type(grad_scaler).__name__}, allowed: torch.amp.GradScaler or None")


def check_new(chunks: Sequence[nn.Module], optimizers: Iterable[Any], names: ModelNames) -> None:
    """Check that new models are distinct from those already watched.

    Raises:
        ValueError: when a model is watched already, or shares parameter names with one.

    """
    known = {id(m.module) for m in names.modules} | {id(chunk) for chunk in names.chunks}
    if any(id(chunk) in known for chunk in chunks):
        raise ValueError("watch(model): this model is watched already; allowed: other modules, or close() first")
    shared = {p.name for p in names.parameters} & {p.name for p in names_of(chunks, optimizers).parameters}
    if shared:
        raise ValueError(
            f"watch(model): a model that is watched already has a parameter named {min(shared)!r} too; allowed: one "
            'call with torch.nn.ModuleDict({"generator": …, "critic": …}), which gives each its own names'
        )
