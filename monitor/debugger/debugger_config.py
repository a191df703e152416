"""The configuration of the debugger: msprobe's keys, of both its generations."""

import os
import re
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator
from typing_extensions import Self

from trainsentry.collectors.calls.call_selection import CallSelection
from trainsentry.monitor.config.blocks import Unit
from trainsentry.monitor.config.files import explain, read_file
from trainsentry.monitor.debugger.chosen_calls import KERNELS, ChosenCalls, DebuggerBlock
from trainsentry.monitor.debugger.free_benchmark_config import FreeBenchmarkBlock
from trainsentry.monitor.debugger.run_ut_config import RunUtBlock
from trainsentry.monitor.errors import ConfigError

TASKS: Final = ("statistics", "tensor", "structure", "overflow_check", "free_benchmark", "run_ut", "grad_probe")
ON_OPERATIONS: Final = {"free_benchmark": "repeated", "run_ut": "checked"}
"""Tasks that know operations alone, and what they do with them."""

LEVELS: Final = ("L0", "L1", "mix", "debug", "L2")
"""L2 is the kernels of a device: of one call on PyTorch, of compiled graphs on MindSpore."""

_OTHER_TASKS: Final = {
    "nan_check": "overflow_check",
    "acc_check": "run_ut",
    "diff_check": "tensor, then trainsentry compare A B",
}
DEFAULTS: Final = Path(__file__).with_name("debugger_defaults.json")
"""The configuration of `PrecisionDebugger()`, whose arguments replace its keys."""

MAX_NUMBERS: Final = 1_000_000
"""Steps or ranks at most; each number takes memory."""


def _numbers(value: Any) -> Any:
    """Expand the ranges in a list of numbers and ranges."""
    if not isinstance(value, list):
        return value
    found: list[Any] = []
    for item in value:
        match = re.fullmatch(r"(\d{1,16})-(\d{1,16})", item, re.ASCII) if isinstance(item, str) else None
        if match is not None and int(match[1]) <= int(match[2]):
            if len(found) + int(match[2]) - int(match[1]) >= MAX_NUMBERS:
                raise ValueError(f"{item!r}; allowed: at most {MAX_NUMBERS} steps or ranks in all")
            found.extend(range(int(match[1]), int(match[2]) + 1))
        elif isinstance(item, int) and not isinstance(item, bool) and item >= 0:
            found.append(item)
        else:
            raise ValueError(f'{item!r}; allowed: numbers from 0 on, and ranges such as "4-6"')
    return sorted(set(found))


def _modes(modes: list[str]) -> list[str]:
    allowed = ("all", "forward", "backward", "input", "output")
    for mode in modes:
        if mode not in allowed:
            raise ValueError(f"{mode!r}; allowed: some of {', '.join(allowed)}")
    if "all" in modes and len(modes) > 1:
        raise ValueError(f'{modes}; allowed: ["all"] alone, or some of the others')
    return modes


def _files(value: Any) -> Any:
    """Return the paths of a list, or of a single text; msprobe's example has an empty text for none."""
    texts = [value] if isinstance(value, str) else value
    return [text for text in texts if text != ""] if isinstance(texts, list) else texts


Numbers = Annotated[list[int], BeforeValidator(_numbers)]


class Chosen(ChosenCalls):
    """The calls that a task dumps, and the parts of each call. Give `scope` or `list`, not both."""

    data_mode: Annotated[
        list[str],
        Field(description='["all"], or some of "forward", "backward", "input", "output".'),
        AfterValidator(_modes),
    ] = ["all"]  # noqa: RUF012 - pydantic copies it
    summary_mode: Literal["statistics", "md5"] = Field(
        default="statistics", description="`md5` adds a checksum of each tensor, a CRC-32 as msprobe's."
    )
    file_format: Literal["npy", "bin"] = Field(
        default="npy",
        description="Format of the files that MindSpore writes at level L2. On PyTorch acl writes its own format "
        "there, whatever this says. Other levels write `.pt` (PyTorch) or `.npy` and refuse `bin`.",
    )
    backward_input: Annotated[
        list[str],
        BeforeValidator(_files, json_schema_input_type=list[str]),
        Field(
            description="At level L2 on PyTorch: files with the gradients at the results of the call whose backward "
            "pass is dumped, such as `Functional.conv2d.1.backward.input.0.pt` of an earlier dump. Empty: the "
            "training's own backward pass is dumped."
        ),
    ] = []  # noqa: RUF012 - pydantic copies it


def _not_zero(value: int) -> int:
    return 1 if value == 0 else value  # as msprobe reads it


class OverflowTaskBlock(Chosen):
    """Settings of the task overflow_check: the limit, and the calls that count."""

    overflow_nums: Annotated[
        int,
        Field(
            ge=-1,
            description="Stop training at this many overflowing calls: at once, or at the end of the step on several "
            "ranks (so that all stop together) and with a loss scaler (which may skip the step). -1: count, never "
            "stop. 0 means 1.",
        ),
        AfterValidator(_not_zero),
        Unit("calls"),
    ] = 1
    check_mode: Literal["all", "aicore", "atomic"] = Field(
        default="all",
        description="At level L2 on Ascend: overflows of AI Cores, of atomic operations, or both. Other levels judge "
        "the values, whoever computed them, and refuse all but `all`.",
    )


class GradProbe(DebuggerBlock):
    """Settings of the task grad_probe: gradients written to disk before each update."""

    grad_level: Literal["L0", "L1", "L2"] = Field(
        default="L1",
        description="Written with extremes and norm: a checksum (L0), the signs (L1), the signs and the share in each "
        "interval of `bounds` (L2).",
    )
    param_list: list[str] = Field(default=[], description="Names of parameters. Empty: all of them.")
    bounds: list[float] = Field(default=[-1.0, 0.0, 1.0], description="Borders of the intervals of L2, growing.")

    @model_validator(mode="after")
    def _bounds_grow(self) -> Self:
        if self.bounds != sorted(set(self.bounds)):
            raise ValueError(f"bounds: {self.bounds}; allowed: ascending numbers")
        return self


class DebuggerConfig(DebuggerBlock):
    """The configuration of `trainsentry.PrecisionDebugger`: a .json, .yaml or .toml file with msprobe's keys.

    Keys of both generations of msprobe are read. The constructor's arguments replace the file's keys.
    """

    task: str = Field(default="statistics", description=f"One of {', '.join(TASKS)}.")
    dump_path: Annotated[
        str, Field(min_length=1, description="Folder of the dumps. A file must give it; without a file, `./dump`.")
    ]
    rank: Numbers = Field(default=[], description='Ranks and ranges such as "0-3" that are dumped. Empty: all of them.')
    step: Numbers = Field(default=[], description='Steps and ranges such as "10-12" that are dumped. Empty: all.')
    level: str = Field(
        default="L1",
        description=f"One of {', '.join(LEVELS)}: modules (L0), operations (L1), both as a tree (mix), variables given "
        "to `save()` (debug), kernels of a device (L2: of one call on an NPU with PyTorch, of compiled graphs with "
        "MindSpore).",
    )
    async_dump: bool = Field(
        default=False,
        description="Write entries at `stop()`, and files from copies in host memory (1 GiB at most) beside the step, "
        "so that no call waits for either.",
    )
    extra_info: bool = Field(default=True, description="Write `stack.json` and `construct.json`.")
    dump_enable: bool | None = Field(default=None, description="Read for msprobe's sake; it has no effect.")
    precision: Literal["high", "low"] = Field(default="high", description="Read for msprobe's sake; it has no effect.")
    risk_level: Literal["ALL", "CORE", "FOCUS"] = Field(
        default="ALL",
        description="Operations that are dumped: all, as in msprobe 1.2; all but those that only move values (FOCUS, "
        "the default of msprobe 26); matrix products, convolutions, norms, embeddings, attention and collectives "
        "(CORE). `scope` and `list` override it.",
    )
    custom_op_namespaces: list[str] | None = Field(
        default=None, description="Namespaces of `torch.ops` to follow besides `aten` and `npu`."
    )
    enable_dataloader: bool = Field(default=False, description="Must be false: call `start()`, `stop()` and `step()`.")
    acl_config: str | None = Field(
        default=None,
        description="At level L2 on PyTorch: a JSON file for acl, whose `dump_path` gets the kernels. `null`: one is "
        "made, and they lie in `dump_path/step<N>`.",
    )
    seed: Annotated[int, Field(ge=0, lt=2**32)] | None = Field(
        default=None,
        description="Seed of all random numbers, set by `seed_all`. `null`: not set, or 1234 with `is_deterministic`.",
    )
    is_deterministic: bool = Field(
        default=False, description="Use deterministic algorithms: `seed_all(seed, mode=True)`."
    )
    statistics: Chosen = Field(default=Chosen(), description="Settings of the task statistics.")
    tensor: Chosen = Field(default=Chosen(), description="Settings of the task tensor.")
    structure: Chosen = Field(default=Chosen(), description="Settings of the task structure.")
    overflow_check: OverflowTaskBlock = OverflowTaskBlock()
    free_benchmark: FreeBenchmarkBlock = FreeBenchmarkBlock()
    run_ut: RunUtBlock = RunUtBlock()
    grad_probe: GradProbe = GradProbe()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.level not in LEVELS:
            raise ValueError(f"level: {self.level!r}; allowed: {', '.join(LEVELS)}")
        if self.level == "debug" and self.task not in {"statistics", "tensor"}:
            raise ValueError(f"level: 'debug' with task {self.task!r}; allowed: task statistics or tensor")
        if self.task in ON_OPERATIONS and self.level != "L1":
            raise ValueError(
                f"level: {self.level!r} with task {self.task!r}; allowed: L1, as operations are "
                f"{ON_OPERATIONS[self.task]}"
            )
        if self.enable_dataloader:
            raise ValueError("enable_dataloader: True; allowed: false, with start(), stop() and step() in the loop")
        if self.level != "L2" and self.chosen.file_format == "bin":
            raise ValueError(f"{self.task}.file_format: 'bin' at level {self.level!r}; allowed: npy, or level L2")
        if self.level != "L2" and self.chosen.backward_input:
            raise ValueError(
                f"{self.task}.backward_input: {self.chosen.backward_input} at level {self.level!r}; allowed: [], as a "
                "dump has the backward pass too; or level L2"
            )
        kernels = [name for name in self.chosen.calls if name.startswith(KERNELS)]
        if self.level != "L2" and kernels:
            raise ValueError(
                f"{self.task}.list: {kernels} at level {self.level!r}; allowed: names of calls, or level L2"
            )
        if self.level != "L2" and self.overflow_check.check_mode != "all" and self.task == "overflow_check":
            mode = self.overflow_check.check_mode
            raise ValueError(
                f"check_mode: {mode!r} at level {self.level!r}; allowed: all, as values are judged, not units of a "
                "device; or level L2"
            )
        if self.async_dump and self.chosen.summary_mode == "md5":
            raise ValueError("async_dump: True with summary_mode 'md5'; allowed: summary_mode statistics")
        return self

    @property
    def chosen(self) -> Chosen:
        """The block of the task; the defaults for grad_probe, which records parameters instead of calls."""
        block = getattr(self, self.task)
        return block if isinstance(block, Chosen) else Chosen()

    def selection(self, risk_of: Any) -> CallSelection:
        """Return the selection of the recorded calls."""
        chosen: Any = self.free_benchmark if self.task == "free_benchmark" else self.chosen
        modes = set(self.chosen.data_mode)
        everything = {"forward", "backward", "input", "output"}
        modes = everything if "all" in modes else modes
        return CallSelection(
            level=self.level,
            parts=tuple(chosen.calls),
            scope=(chosen.scope[0], chosen.scope[-1]) if chosen.scope else None,
            directions=frozenset(modes & {"forward", "backward"}) or frozenset({"forward", "backward"}),
            sides=frozenset(modes & {"input", "output"}) or frozenset({"input", "output"}),
            risk="ALL" if self.task in {"overflow_check", *ON_OPERATIONS} else self.risk_level,
            risk_of=risk_of,
        )


def load_debugger_config(path: str | None, given: dict[str, Any]) -> tuple[DebuggerConfig, list[str]]:
    """Return the configuration of a file, overridden by the `given` arguments, and its warnings.

    Without a path, the file is debugger_defaults.json.

    Raises:
        ConfigError: when the file cannot be read, or for an invalid key or value.

    """
    data = read_file(Path(path) if path is not None else DEFAULTS)
    where = path or "PrecisionDebugger"
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: got {type(data).__name__}, allowed: an object with keys")
    data = {**data, **{key: value for key, value in given.items() if value is not None}}
    warnings: list[str] = []
    if path is None and given.get("dump_path") is None:
        warnings.append(f"no config_path and no dump_path: the debugger writes to {Path(data['dump_path']).absolute()}")
    _read_old_keys(data, warnings)
    if "dump_path" not in data:
        raise ConfigError(f"{where}: dump_path: missing; allowed: the folder for the dumps")
    try:
        config = DebuggerConfig.model_validate(data)
    except ValidationError as error:
        lines = [explain(dict(e), DebuggerConfig) for e in error.errors()]
        raise ConfigError(f"{where}: " + "\n  ".join(dict.fromkeys(lines))) from None
    _check_folder(config.dump_path, where)
    if config.run_ut.error_data_path is not None:
        _check_folder(config.run_ut.error_data_path, where, "run_ut.error_data_path")
    return config, warnings


def _read_old_keys(data: dict[str, Any], warnings: list[str]) -> None:
    """Convert the keys of both generations to one form; drop unsupported keys with a warning.

    Raises:
        ConfigError: for a task that is not supported.

    """
    task = data.get("task", "statistics") or "statistics"
    if task not in TASKS:
        other = _OTHER_TASKS.get(task) if isinstance(task, str) else None
        if other not in TASKS:
            instead = f"; use instead: {other}" if other else ""
            raise ConfigError(f"task: {task!r}; allowed: {', '.join(TASKS)}{instead}")
        warnings.append(f"task: {task!r} is read as {other!r}")
        data.setdefault(other, data.pop(task, {}))
        task = other
    data["task"] = task
    if task == "structure" and data.get("level", "L1") not in ("L0", "mix"):
        warnings.append(f"level: {data.get('level', 'L1')!r} with task 'structure' is read as 'mix'")
        data["level"] = "mix"
    others = {"grad_probe", "free_benchmark", "run_ut"} - {task}  # settings of a task that does not run are not checked
    blocks = {*_OTHER_TASKS, *others, "load"}
    if data.get("level") != "L2" or not data.get("acl_config"):
        blocks.add("acl_config")
    warnings.extend(f"{key}: is not used" for key in [k for k in data if k in blocks] if data.pop(key))
    for block in TASKS:
        inside = data.get(block)
        if isinstance(inside, dict):
            data[block] = {k: v for k, v in inside.items() if k not in _UNREAD}
            unread = [k for k in inside if k in _UNREAD and inside[k]]
            warnings.extend(f"{block}.{k}: is not used" for k in unread)


_UNREAD: Final = frozenset(
    {
        "online_run_ut",
        "nfs_path",
        "host",
        "port",
        "tls_path",
        "online_run_ut_recompute",
        "slice",
        "bench_path",
        "diff_nums",
        "device",
        "tensor_list",
        "is_online",
        "rank_list",
    }
)
"""msprobe's keys for unsupported features: comparisons over a network, kernels of a device."""


def _check_folder(path: str, where: str, key: str = "dump_path") -> None:
    """Check that the folder of a key is writable.

    Raises:
        ConfigError: when the folder cannot be created or written to.

    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}: {key}: {path!r} cannot be created: {error}; allowed: a folder") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{where}: {key}: {path!r} is not writable; allowed: a writable folder")
