"""Runs a function when a module has been imported, so that nothing is imported before the script does."""

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class _Then(Loader):
    """A loader that calls a function after another loader has done its work."""

    def __init__(self, loader: Loader, action: Callable[[], None]) -> None:
        self._loader = loader
        self._action = action

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Leave it to the other loader."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, then the function."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader  # what inspects the module sees the usual loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._action()


class AfterImport(MetaPathFinder):
    """Finds one module as Python does, and adds the call of a function to its import."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self.name = name
        self.action = action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the module that is waited for, None for any other."""
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader, self.action)
        return spec


def when_imported(name: str, action: Callable[[], None]) -> None:
    """Call `action` once `name` is imported; at once if it is already."""
    if name in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, AfterImport(name, action))
