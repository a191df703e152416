"""Which call's kernels are dumped, and the configuration that the device's software gets for it."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trainsentry.collectors.torch.saving import SUFFIX

_CALL: Final = re.compile(r"([A-Za-z_]\w*\..+\.\d+)\.(forward|backward)")
_NO_OPERATION: Final = ("Module.", "Cell.")
_PATTERN: Final = re.compile(r"name-regex\((.+)\)", re.DOTALL)
_SIDES: Final = {frozenset({"input"}): "input", frozenset({"output"}): "output"}
_DATA: Final[dict[str, dict[str, str]]] = {"tensor": {}, "statistics": {"dump_data": "stats"}}
"""What acl is told of a task: without `dump_data` it writes tensors, and older versions know nothing else."""

EXAMPLE: Final = "allowed: the full name of one call, such as Functional.linear.0.forward"


@dataclass(frozen=True)
class KernelRequest:
    """`call` is a name such as `Functional.linear.0`, `direction` is forward or backward.

    `gradients` are files with the gradients at the call's results: with them the backward pass is made at once, by
    itself, in place of the training's own. `patterns` choose kernels; without them all are kept. `acl` is the object
    `dump` of the configuration; without `dump_path` the kernels lie in the folder of the step.
    """

    call: str
    direction: str
    gradients: tuple[Path, ...]
    patterns: tuple[re.Pattern[str], ...]
    acl: dict[str, Any]

    @property
    def name(self) -> str:
        """The full name of the call."""
        return f"{self.call}.{self.direction}"


def kernel_request(config: Any) -> KernelRequest:
    """Return what a configuration of level L2 asks for.

    Raises:
        ValueError: for a task, a name or a file that level L2 on PyTorch does not take.

    """
    if config.task not in _DATA:
        raise ValueError(f"task: {config.task!r} at level L2; allowed: {', '.join(_DATA)}")
    chosen = config.chosen
    patterns = _patterns(chosen.calls)
    named = [*chosen.scope, *(name for name in chosen.calls if not _PATTERN.fullmatch(name))]
    match = _CALL.fullmatch(named[0]) if len(named) == 1 else None
    if match is None or named[0].startswith(_NO_OPERATION):
        key = "scope" if chosen.scope else "list"
        raise ValueError(f"{config.task}.{key}: {named} at level L2; {EXAMPLE}")
    if patterns and config.acl_config is not None:
        raise ValueError(
            f"{config.task}.list: {chosen.calls} with acl_config {config.acl_config!r}; allowed: kernels by name-regex "
            "without acl_config, because other ranks may write to the folder that it names"
        )
    selection = config.selection(lambda _: "CORE")
    if match[2] not in selection.directions:
        modes = ", ".join(sorted(chosen.data_mode))
        raise ValueError(f"{config.task}.data_mode: [{modes}] leaves out {named[0]}; allowed: with {match[2]}, or all")
    gradients = _gradients(chosen.backward_input, match[2], named[0])
    sides = _SIDES.get(selection.sides, "all")
    acl = {"dump_list": [], "dump_mode": sides, "dump_op_switch": "on", **_DATA[config.task]}
    given = _given(config.acl_config) if config.acl_config is not None else acl
    return KernelRequest(match[1], match[2], gradients, patterns, given)


def _patterns(calls: Sequence[str]) -> tuple[re.Pattern[str], ...]:
    found = []
    for text in calls:
        match = _PATTERN.fullmatch(text)
        if match is None:
            continue
        try:
            found.append(re.compile(match[1]))
        except re.error as error:
            raise ValueError(
                f"list: {text!r} is no regular expression: {error}; allowed: name-regex(MatMul.*)"
            ) from None
    return tuple(found)


def _gradients(files: Sequence[str], direction: str, name: str) -> tuple[Path, ...]:
    if files and direction == "forward":
        raise ValueError(f"backward_input: {list(files)} with {name}; allowed: with the name of a backward pass, or []")
    for file in files:
        if not Path(file).is_file() or not file.endswith(SUFFIX):
            raise ValueError(
                f"backward_input: {file!r}; allowed: a file that exists, such as "
                f"{name}.input.0{SUFFIX} of a dump at level L1 with task tensor"
            )
    return tuple(Path(file).absolute() for file in files)


def _given(path: str) -> dict[str, Any]:
    """Return the object `dump` of the user's acl configuration."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"acl_config: {path!r} cannot be read: {error}; allowed: a JSON file for acl") from None
    dump = content.get("dump") if isinstance(content, dict) else None
    if not isinstance(dump, dict):
        raise ValueError(  # noqa: TRY004 - a mistake in a file
            f"acl_config: {path!r} has no object dump; allowed: {{'dump': {{'dump_path': …, …}}}}"
        )
    if dump.get("dump_op_switch") != "on":
        raise ValueError(
            f"acl_config: {path!r}: dump_op_switch is {dump.get('dump_op_switch', 'off')!r}; allowed: 'on', without "
            "which no kernel of a call is dumped"
        )
    folder = dump.get("dump_path")
    if not isinstance(folder, str) or not Path(folder).is_dir():
        raise ValueError(f"acl_config: {path!r}: dump_path is {folder!r}; allowed: a folder that exists")
    return {**dump, "dump_path": str(Path(folder).absolute())}
