"""A targeted dump on disk, in the layout of msprobe 26.2: JSON files and one file per tensor."""

from pathlib import Path
from typing import Any

from trainsentry.exporters.json_files import replace_json

TENSORS = "dump_tensor_data"
LISTS = frozenset({"input_args", "output", "input"})
"""Groups whose tensors stand in a list; the others are mappings from name to tensor."""


class DumpFolder:
    """Collects the entries of one step of one rank and writes them as `dump.json` and its companions.

    `dump.json` says in `step` which step its tensors are of, in `moment` when in the step weights, gradients and
    optimizer state were taken (`before_update`), in `holds` which kinds there are, and in `left_out` which tensors
    were beyond the budget.
    """

    def __init__(self, directory: Path, *, framework: str, step: int, moment: str, incident: int) -> None:
        self.directory = directory
        self.step = step
        self.entries: dict[str, dict[str, Any]] = {}
        self.stacks: dict[str, list[str]] = {}
        self.bytes = 0
        self.tensors = 0
        self.left_out: list[str] = []
        self._head = {
            "task": "tensor",
            "level": "L0",
            "framework": framework,
            "step": step,
            "moment": moment,
            "incident": incident,
        }

    @property
    def tensor_directory(self) -> Path:
        """Where the tensors lie."""
        return self.directory / TENSORS

    def tensor_path(self, file_name: str) -> Path:
        """Return the path for a tensor's file, whose folder then exists; the name cannot leave the folder."""
        self.tensor_directory.mkdir(parents=True, exist_ok=True)
        return self.tensor_directory / file_name.replace("/", "_")

    def add(self, entry: str, group: str, key: str, description: dict[str, Any]) -> None:
        """Add a tensor's description to an entry."""
        place = self.entries.setdefault(entry, _empty(entry))
        if entry.rpartition(".")[0].endswith((".parameters_grad", ".optimizer_state")):
            place.setdefault(key, []).append(description)
        elif group in LISTS:
            place.setdefault(group, []).append(description)
        else:
            place.setdefault(group, {})[key] = description

    def write(self) -> None:
        """Write (or replace) dump.json, stack.json and construct.json."""
        holds = sorted({group for entry in self.entries for group in _groups(entry, self.entries[entry])})
        head = {
            **self._head,
            "dump_data_dir": str(self.tensor_directory),
            "holds": holds,
            "left_out": self.left_out,
        }
        replace_json(self.directory / "dump.json", {**head, "data": self.entries})
        stacks = {str(i): [[entry], stack] for i, (entry, stack) in enumerate(self.stacks.items())}
        replace_json(self.directory / "stack.json", stacks)
        replace_json(self.directory / "construct.json", self._parents())

    def _parents(self) -> dict[str, str | None]:
        """Return each entry's parent: the innermost dumped module around it, in the same direction and call."""
        parents: dict[str, str | None] = {}
        places = {_module_of(entry): entry for entry in self.entries}
        for entry in self.entries:
            module, direction, call = _module_of(entry)
            parent = None
            while parent is None and module:
                module = module.rpartition(".")[0]
                parent = places.get((module, direction, call))
            parents[entry] = parent
        return parents


def _empty(entry: str) -> dict[str, Any]:
    return {"input_args": [], "input_kwargs": {}, "output": []} if ".forward." in entry else {}


def _groups(entry: str, content: dict[str, Any]) -> list[str]:
    """Return the kinds of tensors an entry holds, such as `parameters` or `output`."""
    kind = entry.rsplit(".", 2)[-2]
    if kind in {"parameters_grad", "optimizer_state"}:
        return [kind]
    return [f"{kind}.{group}" if group in LISTS else group for group, tensors in content.items() if tensors]


def _module_of(entry: str) -> tuple[str, str, str]:
    """Return module name, direction and call number of an entry `Module.<name>.<Class>.<direction>.<n>`."""
    stem, direction, call = entry.rsplit(".", 2)
    return stem.removeprefix("Module.").rpartition(".")[0], direction, call
