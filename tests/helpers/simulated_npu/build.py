"""Compiles the simulated accelerator, once for each version of its sources and of torch."""

import hashlib
import os
import platform
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
CACHE = ROOT / "build" / "simulated_npu"
"""Ignored by git; `make clean` removes it."""

STANDARD = "-std=c++20"
"""What torch's headers need."""


class CannotBuild(RuntimeError):
    """There is no compiler, or it fails."""


def _tag(source):
    state = "\n".join([source.read_text(), torch.__version__, platform.machine(), sysconfig.get_config_var("SOABI")])
    return hashlib.sha256(state.encode()).hexdigest()[:16]


def built(name, *, python=False):
    """Return the path of a compiled source, which is compiled first if nobody has; `python`: it is a module."""
    source = HERE / f"{name}.cpp"
    suffix = sysconfig.get_config_var("EXT_SUFFIX") if python else ".so"
    folder = CACHE / _tag(source)
    target = folder / f"{name}{suffix}"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _compile(source, target, python=python)
    return target


def _compile(source, target, *, python):
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise CannotBuild("no C++ compiler is installed")
    from torch.utils import cpp_extension

    includes = [f"-I{path}" for path in (*cpp_extension.include_paths(), sysconfig.get_paths()["include"])]
    libraries = cpp_extension.library_paths()[0]
    links = [f"-L{libraries}", "-lc10", "-ltorch_cpu", "-ltorch", f"-Wl,-rpath,{libraries}"]
    links += ["-ltorch_python"] if python else []
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:  # two processes may compile at once
        made = Path(folder) / target.name
        command = [compiler, "-shared", "-fPIC", STANDARD, "-O1", "-w", *includes, str(source), "-o", str(made), *links]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if ran.returncode:
            raise CannotBuild(f"{compiler} fails: {ran.stderr[-2000:]}")
        made.replace(target)
