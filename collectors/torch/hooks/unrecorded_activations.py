"""Says once which activations are not recorded, and why."""

from collections.abc import Collection, Sequence

import torch

from trainsentry.collectors.guard import Guard
from trainsentry.collectors.shared.model_graph import NamedModule
from trainsentry.collectors.torch.hooks.compiler import GRADIENTS_FROM


def warn_of_compiled_modules(guard: Guard, modules: Sequence[NamedModule], fusing: Sequence[str]) -> None:
    """Warn about modules in compiled graphs; `fusing` are backends that fuse the operations of their graphs."""
    if fusing:
        why = (
            f"{', '.join(fusing)} fuses the operations of its graphs, and reading values inside them would change "
            "the last bits of the results. collect.activations.inside_graphs: true reads them nonetheless. Inputs "
            "and outputs of the compiled module are recorded"
        )
    else:
        why = (
            "their graphs were compiled before watch(), or after the first steps. To record them, call watch() "
            "first, then torch.compile, then train"
        )
    guard.warn_once(
        "activations of compiled modules",
        f"activations of {len(modules)} modules are not recorded, the first is {modules[0].name!r}: {why}. Gradients "
        "of parameters, weights, updates and optimizer state are recorded.",
    )


def warn_of_uncalled_modules(guard: Guard, modules: Sequence[NamedModule], called: Collection[str]) -> None:
    """Warn where most modules were not called in the first two sampled steps: another model may be training."""
    uncalled = [m for m in modules if m.name not in called]
    if len(uncalled) > len(modules) // 2:
        guard.warn_once(
            "modules that are not called",
            f"{len(uncalled)} of {len(modules)} watched modules were not called in the first recorded step, the "
            f"first is {uncalled[0].name!r}, so their activations are not recorded. If another copy or wrapper of "
            "the model trains, give that one to watch().",
        )


def warn_of_gradients_in_graphs(guard: Guard) -> None:
    """Warn that this torch cannot show gradients inside compiled graphs."""
    needed = ".".join(map(str, GRADIENTS_FROM))
    guard.warn_once(
        "gradients of compiled activations",
        f"gradients of activations inside compiled graphs are not recorded: they need torch {needed} or later, "
        f"this is {torch.__version__}. Everything else is recorded.",
    )


def warn_of_compiled_autograd(guard: Guard) -> None:
    """Warn that compiled autograd leaves no gradients of activations to read."""
    guard.warn_once(
        "gradients under compiled autograd",
        "gradients of activations are not recorded: compiled autograd compiles the backward pass into one "
        "graph, in which they cannot be read. Everything else is recorded.",
    )


def warn_of_old_torch(guard: Guard) -> None:
    """Warn that this torch would compile the hooks."""
    guard.warn_once(
        "activations",
        f"activations are not recorded: this torch ({torch.__version__}) cannot keep hooks out of compiled graphs. "
        "Gradients, weights, updates and optimizer state are recorded.",
    )
