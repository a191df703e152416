"""Takes the gradients of cells' own parameters, by hooks on the parameters that no compiler may meet."""

from collections.abc import Callable
from typing import Any

from mindspore import Parameter, Tensor, nn

from trainsentry.collectors.guard import Guard
from trainsentry.collectors.mindspore.hooks.function_patches import unwatch_compiled, watch_compiled

Take = Callable[[Tensor, str], dict[str, Any]]


class ParameterGradients:
    """Collects the gradients of parameters by the cell that owns them, from `watch` to `close`.

    `take(gradient, stem)` describes one, `done(name, gradients)` gets those of a cell once all have arrived. A hook on
    a parameter keeps a compiled function that computes gradients from compiling (MindSpore 2.10), so all hooks go
    before a compiled function runs, for good.
    """

    def __init__(self, guard: Guard, part: str, take: Take, done: Callable[[str, dict[str, Any]], None]) -> None:
        self.guard = guard
        self.part = part
        self._take = take
        self._done = done
        self._handles: dict[int, tuple[Parameter, Any]] = {}
        self._awaited: dict[str, set[str]] = {}
        self._gradients: dict[str, dict[str, Any]] = {}
        self._written: set[str] = set()
        self._compiles = False
        self._watches_compiled = False

    def watch(self, stem: str, cell: nn.Cell, *, sees_compiled: bool) -> None:
        """Take the gradients of a cell's own parameters; `sees_compiled`: the caller reports compiled calls itself."""
        if self._compiles or f"{stem}.parameters_grad" in self._written:
            return
        if not sees_compiled and not self._watches_compiled:
            self._watches_compiled = True
            watch_compiled(self._compiled)
        for name, parameter in cell._params.items():
            if parameter is not None and parameter.requires_grad and id(parameter) not in self._handles:
                handle = parameter.register_hook(_hook(self, stem, name))
                self._handles[id(parameter)] = (parameter, handle)
                self._awaited.setdefault(stem, set()).add(name)

    def before_compiled(self) -> None:
        """Remove the hooks: a compiled function runs."""
        if not self._compiles and self._handles:
            self.guard.warn_once(
                "parameters_grad",
                "the program runs compiled functions, so gradients of parameters are not dumped; those of calls are",
            )
        self._compiles = True
        self._remove()

    def close(self) -> None:
        """End the step: pass on what has arrived, and remove the hooks."""
        for stem in list(self._gradients):
            self._finish(stem)
        self._remove()
        self._written.clear()
        if self._watches_compiled:
            self._watches_compiled = False
            unwatch_compiled(self._compiled)

    def arrived(self, stem: str, name: str, gradient: Tensor) -> None:
        """Take one gradient; later ones of the same parameter in a step are not taken."""
        key = f"{stem}.parameters_grad"
        found = self._gradients.setdefault(stem, {})
        if key in self._written or name in found:
            return
        found[name] = [self._take(gradient, f"{key}.{name}")]
        if set(found) == self._awaited.get(stem, set()):
            self._finish(stem)

    def _finish(self, stem: str) -> None:
        found, key = self._gradients.pop(stem), f"{stem}.parameters_grad"
        if found and key not in self._written:
            self._written.add(key)
            self.guard.run(self.part, self._done, key, found)

    def _compiled(self, _: Any, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.before_compiled()
        return run(*args, **kwargs)

    def _remove(self) -> None:
        for _, handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self._awaited.clear()
        self._gradients.clear()


def _hook(owner: ParameterGradients, stem: str, name: str) -> Callable[[Any], None]:
    def hook(gradient: Any) -> None:
        if isinstance(gradient, Tensor):
            owner.guard.run(owner.part, owner.arrived, stem, name, gradient)

    return hook
