"""Lists what a run is set to, for a resumed run to be compared with: constants and modes of modules, inputs."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from sys import modules as imported
from typing import Any, Final

import torch

from trainsentry.collectors.run_settings import (
    AUTOCAST,
    CLASS,
    CONSTANT,
    INPUT,
    MODE,
    OPERATIONS,
    OPTIMIZER,
    PASSES,
    SOFTWARE,
    TRAINED,
    WRAPPED,
    WRITES,
    Settings,
)
from trainsentry.collectors.shared.model_graph import NamedModule
from trainsentry.collectors.shared.scalar_rows import constants_of, numbers_of
from trainsentry.collectors.torch.passes.pass_forms import PassForm
from trainsentry.collectors.torch.watch import TorchWatch

TORCH: Final = "torch."
LAYERS: Final = "torch.nn.modules."
"""Begin the names of torch's packages, and of that of its layers: its other modules are wrappers, which come and go."""

SIZES: Final = frozenset(
    {"in_features", "out_features", "in1_features", "in2_features", "in_channels", "out_channels", "num_features"}
    | {"num_embeddings", "embedding_dim", "input_size", "hidden_size", "proj_size", "num_channels", "num_parameters"}
)
"""Constants that the shapes of parameters tell."""


def settings_of(
    watch: TorchWatch,
    forms: Mapping[str, PassForm],
    modes: Sequence[bool],
    operations: Iterable[tuple[str, str]],
    *,
    last_step: bool,
) -> Settings:
    """Return the settings of a watched model and its optimizers now, with the form of its passes.

    `modes` says which modules, in their order, are in training mode; those of another number of modules are left out.
    `operations` are those of the modules whose operations are known. `last_step`: a checkpoint is saved, which
    remembers what came before; else this is the first update of a run that goes on.
    """
    found: dict[str, dict[str, Any]] = {OPERATIONS: dict(operations)}
    for what, name, value in [
        *_of_modules(watch, modes),
        *_shared_numbers(watch, all_of_them=not last_step),
        *_of_training(watch, last_step=last_step),
        *_of_passes(forms),
    ]:
        found.setdefault(what, {})[name] = value
    if len(watch.optimizers) > 1:
        found.pop(PASSES, None)  # at the first one's update, those for the others are still to come
    return found


_Setting = tuple[str, str, Any]


def _of_modules(watch: TorchWatch, modes: Sequence[bool]) -> Iterator[_Setting]:
    modules = watch.names.modules
    for named in modules:
        yield from ((what, _path(named), value) for what, value in _of_module(named))
    if len(modes) == len(modules):
        for named, trains in zip(modules, modes, strict=True):
            yield MODE, _path(named), "training" if trains else "evaluation"


def _shared_numbers(watch: TorchWatch, *, all_of_them: bool) -> Iterator[_Setting]:
    """Yield the numbers that several modules of a user's class have alike, as the scale of an attention.

    What one module keeps may be anything, such as the best loss so far, and what has changed in the run is annealed. A
    resumed run tells `all_of_them`, as one of the modules may have another number now.
    """
    found: defaultdict[tuple[type, str], list[tuple[NamedModule, float]]] = defaultdict(list)
    for named in watch.names.modules:
        for key, value in numbers_of(named):
            if key not in watch.varied_numbers:
                found[_own_class(named.module), key].append((named, value))
    for (_, key), of_class in found.items():
        if all_of_them or (len(of_class) > 1 and len({value for _, value in of_class}) == 1):
            yield from ((f"{CONSTANT}{key}", _path(named), value) for named, value in of_class)


def _of_module(named: NamedModule) -> Iterator[tuple[str, Any]]:
    """Yield class and constants of a module; the outermost one has many wrappers, and no class of its own here."""
    own = _own_class(named.module)
    package = own.__module__
    if named.name and (package.startswith(LAYERS) or not package.startswith(TORCH)):
        yield CLASS, own.__name__
    for key, value in constants_of(named):
        if key not in SIZES:
            yield f"{CONSTANT}{key}", value


def _has_shared_gradients(chunk: torch.nn.Module) -> bool:
    """Whether gradients are views of DDP's buckets: a write of one counts for all, and buckets are made anew."""
    return getattr(chunk, "gradient_as_bucket_view", False) is True


def _of_training(watch: TorchWatch, *, last_step: bool) -> Iterator[_Setting]:
    for parameter in watch.names.parameters:
        yield TRAINED, parameter.name, parameter.own.requires_grad
    devices = sorted({parameter.parameter.device.type for parameter in watch.names.parameters})
    yield SOFTWARE, "", f"torch {torch.__version__} on {', '.join(devices)}"
    for number, optimizer in enumerate(watch.optimizers):
        yield OPTIMIZER, str(number), type(optimizer).__name__
    yield WRAPPED, "", " ".join(type(chunk).__name__ for chunk in watch.names.chunks)
    writes = watch.model_state.gradient_writes(every=last_step)
    if writes and len(watch.optimizers) == 1 and not any(map(_has_shared_gradients, watch.names.chunks)):
        yield WRITES, "", writes


def _of_passes(forms: Mapping[str, PassForm]) -> Iterator[_Setting]:
    for root, form in forms.items():
        yield AUTOCAST, root, "off" if form.autocast is None else _dtype(form.autocast)
        yield PASSES, root, form.passes
        for path, shape, dtype in form.inputs:
            name = f"{root}.input.{path}" if root else f"input.{path}"
            yield INPUT, name, f"{_dtype(dtype)} {list(shape)}"


def _path(named: NamedModule) -> str:
    return named.name if not named.vpp_stage else f"{named.name} (stage {named.vpp_stage})"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _own_class(module: torch.nn.Module) -> type[torch.nn.Module]:
    """Return the class of a module, or that from which a wrapper has derived one while the program runs."""
    own, derived_from = type(module).__mro__[:2]
    is_found = vars(imported.get(own.__module__, object)).get(own.__qualname__) is own
    return own if is_found or derived_from is torch.nn.Module else derived_from
