"""Packages as they are published: their Python files are fetched once by pip, read as syntax, and never imported."""

import ast
import keyword
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from functools import cache
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainsentry-tests" / "wheels"
"""The wheels themselves are dropped: of 44 MB a version, 20 MB of Python and schemas stay."""

PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
KEPT = (".py", ".pyi", "npu_native_functions_by_codegen.yaml")
MINORS = 3
SECONDS = 240


class NotToBeHad(Exception):
    """The package index cannot be reached, or has no such package."""


def _pip(*arguments):
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--retries=1", "--timeout=20", *arguments]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotToBeHad(str(error)) from error
    if ran.returncode:
        raise NotToBeHad(ran.stderr.strip().rpartition("\n")[2] or f"pip exits with {ran.returncode}")
    return ran.stdout


@cache
def newest(package, minors=MINORS):
    """Return the newest version of each of the last minor versions, the newest first."""
    listed = re.search(r"Available versions: (.*)", _pip("index", "versions", package, "--no-color"))
    if listed is None:
        raise NotToBeHad(f"pip lists no versions of {package}")
    by_minor = {}
    for version in listed[1].split(", "):
        by_minor.setdefault(tuple(version.split(".")[:2]), version)
    return list(by_minor.values())[:minors]


@cache
def files_of(package, version):
    """Return the folder of a version's Python files and schemas."""
    folder = CACHE / f"{package}-{version}"
    if folder.exists():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
        platforms = [f"--platform={platform}" for platform in PLATFORMS]
        _pip(
            "download", "--quiet", "--no-deps", "--only-binary=:all:", "--python-version=3.11", *platforms,
            f"--dest={temporary}", f"{package}=={version}",
        )  # fmt: skip
        [wheel] = Path(temporary).glob("*.whl")
        made = Path(temporary) / "files"
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(made, [name for name in packed.namelist() if name.endswith(KEPT)])
        try:
            made.replace(folder)
        except OSError:  # another process was faster
            shutil.rmtree(made, ignore_errors=True)
    return folder


class Package:
    """The names of a package's Python files."""

    def __init__(self, folder):
        self.folder = folder

    @cache  # noqa: B019 - a package lives as long as the tests
    def tree(self, module):
        """Return the syntax tree of a module and whether it is a package's `__init__`; None without one."""
        path = self.folder.joinpath(*module.split("."))
        for file, is_package in ((path / "__init__.py", True), (path.with_suffix(".py"), False)):
            if file.exists():
                return ast.parse(file.read_text(encoding="utf-8")), is_package
        return None

    def find(self, module, name):
        """Return the definition of a module's name: a function or a class, or the value that is assigned to it."""
        found = self.tree(module)
        if found is None:
            return None
        tree, is_package = found
        starred = []
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == name:
                return node
            if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
                return node.value
            if isinstance(node, ast.ImportFrom):
                home = _absolute(module, node, is_package=is_package)
                if any((alias.asname or alias.name) == name for alias in node.names):
                    original = next(a.name for a in node.names if (a.asname or a.name) == name)
                    submodule = f"{home}.{original}"
                    return self.find(home, original) or (self.tree(submodule) and submodule)
                starred += [home for alias in node.names if alias.name == "*"]
        return next((hit for home in starred if (hit := self.find(home, name)) is not None), None)

    def signature(self, path):
        """Return the arguments of a function or method by its dotted path; None where nothing is defined there."""
        module, _, rest = path.partition(":")
        names = rest.split(".")
        node = self.find(module, names[0])
        for name in names[1:]:
            node = next((n for n in getattr(node, "body", ()) if getattr(n, "name", None) == name), None)
        if isinstance(node, ast.ClassDef):
            makers = [n for n in node.body if getattr(n, "name", None) in {"__new__", "__init__"}]
            return without_self(makers[0].args) if makers else ast.arguments([], [], None, [], [], None, [])
        if not isinstance(node, ast.FunctionDef):
            return None
        return without_self(node.args) if len(names) > 1 else node.args


def _absolute(module, node, *, is_package):
    if not node.level:
        return node.module
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join([*parts, *([node.module] if node.module else [])])


def without_self(arguments):
    """Return a method's arguments as its caller passes them."""
    return ast.arguments(
        arguments.posonlyargs, arguments.args[1:], arguments.vararg, arguments.kwonlyargs,
        arguments.kw_defaults, arguments.kwarg, arguments.defaults,
    )  # fmt: skip


def takes(arguments, positional, keywords):
    """Whether a function with these arguments can be called with a number of positional and some keyword arguments."""
    places = [*arguments.posonlyargs, *arguments.args]
    named = {a.arg for a in (*places[positional:], *arguments.kwonlyargs)}
    required = {a.arg for a in places[positional : len(places) - len(arguments.defaults)]}
    required |= {a.arg for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d is None}
    enough_room = positional <= len(places) or arguments.vararg is not None
    return enough_room and required <= set(keywords) and (set(keywords) <= named or arguments.kwarg is not None)


def operator_schemas(folder):
    """Return the signatures of torch_npu's own operators by name, as its wheel lists them."""
    [listing] = folder.rglob("npu_native_functions_by_codegen.yaml")
    schemas = re.findall(r"func: (\w+)(?:\.\w+)?\((.*)\) ->", listing.read_text(encoding="utf-8"))
    found = {}
    for name, arguments in schemas:
        found.setdefault(name, []).append(_as_arguments(arguments))
    return found


def _as_arguments(schema):
    """Return an operator's schema as Python's arguments: `Tensor self, int acl_format, *, int? dtype=None`."""
    parts = []
    for part in re.split(r", (?![^(\[]*[)\]])", schema) if schema else ():
        name = part if part == "*" else part.split(" ")[-1].partition("=")[0]
        name += "_" * keyword.iskeyword(name)
        parts.append(f"{name}=None" if "=" in part else name)
    return ast.parse(f"def f({', '.join(parts)}): pass").body[0].args
