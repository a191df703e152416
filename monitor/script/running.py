"""Runs a script or a module as `python` itself would: its name, arguments, folder, exit status and signals."""

import runpy
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType


@dataclass(frozen=True)
class Program:
    """A script's path, or with `is_module` a module's name, and its arguments."""

    target: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False

    def problem(self) -> str | None:
        """Return the reason why it cannot be run."""
        if self.is_module or Path(self.target).is_file():
            return None
        return f"{self.target}: no such script; allowed: a Python file, or -m MODULE"

    def run(self) -> None:
        """Run it as `__main__`; its exceptions and exits pass."""
        sys.argv = [self.target, *self.arguments]
        if self.is_module:
            sys.path[0] = str(Path.cwd())
            runpy.run_module(self.target, run_name="__main__", alter_sys=True)
            return
        path = Path(self.target)
        sys.path[0] = str(path.resolve().parent)
        main = ModuleType("__main__")
        main.__file__ = str(path)
        main.__dict__["__builtins__"] = __builtins__
        sys.modules["__main__"] = main  # stays, so that what runs at exit and in threads finds it
        exec(compile(path.read_bytes(), str(path), "exec"), main.__dict__)  # noqa: S102 - the user's own program
