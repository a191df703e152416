"""Every function of torch_npu and of triton-ascend that is used exists in the published wheels, with its arguments."""

import ast
from pathlib import Path

import pytest
from published_wheels import NotToBeHad, Package, files_of, newest, operator_schemas, takes
from recording_torch_npu import Graph, every_call

from trainsentry.collectors.torch.device.npu import PARTS_OF_CANN, PLAIN_FORMATS
from trainsentry.collectors.torch.device.npu_faults import SILENT_CHECK
from trainsentry.collectors.torch.device.registry import device_of

ROOT = Path(__file__).parents[4]
KERNELS = ROOT / "collectors" / "torch" / "rows" / "kernels" / "triton_kernels.py"
CALLS = [call for inf_nan in (True, False) for call in every_call(inf_nan=inf_nan)]


try:
    WHEELS = {version: files_of("torch_npu", version) for version in newest("torch_npu")}
    TRITON_ASCEND = Package(files_of("triton-ascend", newest("triton-ascend", 1)[0]))
except NotToBeHad as error:
    pytest.skip(f"the wheels of torch_npu and triton-ascend cannot be fetched: {error}", allow_module_level=True)


@pytest.fixture
def wheels():
    """The last three minor versions of torch_npu: their files by version."""
    return WHEELS


@pytest.fixture
def triton_ascend():
    """The newest triton-ascend."""
    return TRITON_ASCEND


def path_of(name):
    """Return where torch_npu defines a name: `torch.npu` is its module `torch_npu.npu`."""
    name = name.replace("torch.npu", "torch_npu.npu")
    for module in ("torch_npu.npu.utils", "torch_npu.npu", "torch_npu"):
        if name.startswith(f"{module}."):
            return f"{module}:{name.removeprefix(f'{module}.')}"
    raise AssertionError(name)


def problems(folder, calls):
    """Return what is wrong with calls of a version: a missing name, or arguments that it does not take."""
    package, schemas = Package(folder), operator_schemas(folder)
    found = []
    for name, args, kwargs in calls:
        own = schemas.get(name.removeprefix("torch_npu."), [])
        if name.startswith("torch_npu.") and own:
            fits = any(takes(arguments, len(args), kwargs) for arguments in own)
        else:
            arguments = package.signature(path_of(name))
            fits = arguments is not None and takes(arguments, len(args), kwargs)
        if not fits:
            found.append(f"{name} with {len(args)} arguments and {sorted(kwargs)}")
    return found


def test_each_call_of_the_seam_fits_the_published_versions(wheels):
    assert len(wheels) == 3
    found = {version: problems(folder, CALLS) for version, folder in wheels.items()}
    assert found == {version: [] for version in wheels}


def test_a_call_that_does_not_fit_would_be_found(wheels):
    wrong = [
        ("torch.npu.no_such_function", (), {}),
        ("torch.npu.utils.get_npu_overflow_flag", (1,), {}),
        ("torch.npu.memory_allocated", (), {"of": 0}),
        ("torch_npu.npu_format_cast", (0,), {}),
        ("torch_npu.no_such_operator", (0,), {}),
        ("torch.npu.Stream.wait_stream", (), {}),
    ]
    for folder in wheels.values():
        assert len(problems(folder, wrong)) == len(wrong)


def test_the_methods_of_a_captured_graph_that_are_patched_exist(wheels):
    ours = [name for name in vars(Graph) if not name.startswith("__")]
    for folder in wheels.values():
        package = Package(folder)
        assert device_of("npu").graph_class == "NPUGraph"
        for method in ours:
            assert package.signature(f"torch_npu.npu:NPUGraph.{method}") is not None
        assert package.signature("torch_npu.npu:make_graphed_callables") is not None


def test_reading_the_flag_in_inf_nan_mode_raises_as_the_recording_module_does(wheels):
    for folder in wheels.values():
        function = Package(folder).find("torch_npu.npu.utils", "get_npu_overflow_flag")
        tests = [n.test for n in function.body if isinstance(n, ast.If) and isinstance(n.body[0], ast.Raise)]
        assert ["is_support_inf_nan" in ast.unparse(test) for test in tests] == [True]


def test_formats_have_the_numbers_that_count_as_plain(wheels):
    plain = {"UNDEFINED", "NCHW", "ND", "NCDHW", "NC", "NCL"}
    for folder in wheels.values():
        formats = Package(folder).find("torch_npu.npu._format", "Format")
        numbers = {n.targets[0].id: ast.literal_eval(n.value) for n in formats.body if isinstance(n, ast.Assign)}
        assert {numbers[name] for name in plain} == PLAIN_FORMATS
        assert numbers["FRACTAL_NZ"] not in PLAIN_FORMATS


def test_the_silent_check_logs_where_it_is_listened_to(wheels):
    for folder in wheels.values():
        text = (folder / "torch_npu" / "asd" / "asd.py").read_text()
        assert f'getLogger("{SILENT_CHECK}")' in text
        assert "loggerSilent.warning(" in text


def test_hccl_is_the_backend_that_it_registers_for_its_device(wheels):
    for folder in wheels.values():
        texts = [path.read_text(encoding="utf-8") for path in (folder / "torch_npu").rglob("*.py")]
        quoted = f'"{device_of("npu").collectives}"'
        assert any("Backend.register_backend(" in text and quoted in text for text in texts)


def test_the_parts_of_cann_whose_versions_are_asked_for_are_known_to_it(wheels):
    for folder in wheels.values():
        function = Package(folder).find("torch_npu.npu.utils", "get_cann_version")
        assert all(part in ast.get_docstring(function) for part in PARTS_OF_CANN)


def test_the_kernels_use_only_what_triton_ascend_has(triton_ascend):
    tree = ast.parse(KERNELS.read_text())
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "tl"
    }
    assert {"load", "store", "program_id"} <= used
    missing = {name for name in used if triton_ascend.find("triton.language", name) is None}
    assert missing == set()


def test_its_folder_is_what_tells_it_from_other_tritons(triton_ascend):
    assert (triton_ascend.folder / "triton" / "backends" / "ascend" / "compiler.py").exists()
