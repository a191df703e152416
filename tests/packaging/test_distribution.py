"""The distribution holds every module once, under `trainsentry/`, and nothing else."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("monitor", "anomaly", "collectors", "exporters")
DATA = (
    "*.py",
    "*.jinja",
    "*.schema.json",
    "grafana/*",
    "debugger_defaults.json",
    "live/web/*",
    "maps/web/*",
    "native/*.h",
)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A wheel built from an sdist of a copy of the tree."""
    copy = tmp_path_factory.mktemp("tree") / "some-name-1"
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(listing, cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")
    for name in (f.decode() for f in files if f):
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            target.symlink_to((ROOT / name).readlink())
        elif (ROOT / name).exists():
            target.write_bytes((ROOT / name).read_bytes())
    dist = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--outdir", dist, copy], check=True, capture_output=True)
    return next(dist.glob("*.whl")), next(dist.glob("*.tar.gz"))


def modules_in_tree():
    files = [p for room in ROOMS for suffix in DATA for p in (ROOT / room).rglob(suffix)]
    return {str(Path("trainsentry") / p.relative_to(ROOT)) for p in files}


def modules_of_the_face():
    """Return the files of `trainsentry/` itself, which are no rooms: the public names, also those of msprobe."""
    files = [p for p in (ROOT / "trainsentry").rglob("*.py") if p.relative_to(ROOT).parts[1] not in ROOMS]
    return {str(p.relative_to(ROOT)) for p in files}


def test_every_module_is_in_the_wheel_under_trainsentry_and_nothing_else_is(built):
    names = set(zipfile.ZipFile(built[0]).namelist())
    code = {n for n in names if ".dist-info/" not in n}
    kernel = "trainsentry/collectors/native/host_rows"
    compiled = {n for n in code if n.startswith(f"{kernel}.") and n.endswith((".so", ".pyd"))}
    assert len(compiled) == 1
    assert code - compiled == modules_in_tree() | modules_of_the_face() | {"trainsentry/py.typed", f"{kernel}.pyi"}


def test_one_wheel_serves_every_python(built):
    assert "-cp310-abi3-" in built[0].name


def test_without_a_compiler_the_rest_is_built_all_the_same(tmp_path, built):
    with tarfile.open(built[1]) as archive:
        archive.extractall(tmp_path, filter="data")
    source = next(tmp_path.glob("trainsentry-*"))
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, source]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "CC": "/bin/false"})
    names = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    assert modules_in_tree() <= set(names)
    assert not any(n.endswith(".so") for n in names)


def test_the_sdist_builds_the_same_modules(built):
    with tarfile.open(built[1]) as archive:
        names = {n.partition("/")[2] for n in archive.getnames()}
    assert modules_in_tree() | modules_of_the_face() <= names
    assert "collectors/native/host_rows.c" in names


def test_no_room_is_installed_as_a_top_level_module(built, tmp_path):
    target = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target, built[0]]
    subprocess.run(command, check=True, capture_output=True)
    assert not any((target / room).exists() for room in ROOMS)
    check = f"import importlib.util as u; print([m for m in {ROOMS!r} if u.find_spec(m)])"
    code = f"import sys; sys.path.insert(0, {str(target)!r}); {check}"
    done = subprocess.run([sys.executable, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_module_is_loaded_twice():
    code = """
import sys, pkgutil, importlib, collections, os
import trainsentry
for m in pkgutil.walk_packages(trainsentry.__path__, "trainsentry."):
    others = ("mindspore", "monitor.integrations.")  # they import what may not be installed
    if not m.name.endswith("__main__") and not any(other in m.name for other in others):
        importlib.import_module(m.name)
loaded = [m.__file__ for m in list(sys.modules.values()) if getattr(m, "__file__", None)]
files = collections.Counter(map(os.path.realpath, loaded))
ours = [f for f, n in files.items() if n > 1 and ("/collectors/" in f or "/monitor/" in f or "/anomaly/" in f)]
assert not ours, ours
assert not [m for m in ("monitor", "anomaly", "collectors", "exporters") if m in sys.modules]
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_importing_trainsentry_imports_no_framework_and_stays_light():
    code = (
        "import sys, trainsentry; "
        "print([m for m in ('torch', 'mindspore', 'pandas', 'numpy', 'tensorboard') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_recorder_imports_no_framework():
    code = (
        "import sys, trainsentry.monitor.recorder.__main__; "
        "print([m for m in ('torch', 'mindspore', 'pandas', 'pydantic', 'tensorboard') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
