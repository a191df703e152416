"""The `export` block of the configuration, made from the table of exporters."""

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from pydantic import Field, create_model

from trainsentry.exporters.registry import EXPORTERS, load_entry
from trainsentry.monitor.config.blocks import Block, optional

_EXPORT = """Where records go. `max_wait`: seconds that a writer or a full ring is waited for, in total per trouble.

`report` has report.html written when a run ends that had an incident, by a process that nobody waits for.
"""


_blocks: dict[type[Any], type[Block]] = {}


def block_of(settings: type[Any]) -> type[Block]:
    """Return the configuration block for an exporter's dataclass: same name, docstring, fields, defaults and limits."""
    if settings in _blocks:
        return _blocks[settings]
    hints = get_type_hints(settings)
    made: dict[str, Any] = {}
    for field in fields(settings):
        hint = hints[field.name]
        default = field.default_factory() if callable(field.default_factory) else field.default
        made[field.name] = (Annotated[hint, Field(**field.metadata)] if field.metadata else hint, default)
    block = create_model(settings.__name__, __base__=Block, __doc__=settings.__doc__, __module__=__name__, **made)
    _blocks[settings] = block
    return block


def export_model(names: Mapping[str, str]) -> type[Block]:
    """Return the `export` block for a table of exporters (`module:name` of each entry, by key)."""
    made: dict[str, Any] = {}
    for key, name in names.items():
        entry = load_entry(name)
        if entry.block is None:
            made[key] = (bool, entry.on)
            continue
        block = block_of(entry.block)
        made[key] = (Annotated[block | None, optional(block)], block() if entry.on else None)
    made["max_wait"] = (Annotated[float, Field(gt=0, le=600)], 5.0)
    return create_model("Export", __base__=Block, __doc__=_EXPORT, __module__=__name__, **made)


if TYPE_CHECKING:

    class Export(Block):
        """The fields come from the table, which a type checker does not run."""

        max_wait: float = 5.0

        def __getattr__(self, key: str) -> Any: ...
else:
    Export = export_model(EXPORTERS)


def __getattr__(name: str) -> Any:
    """Return a block by its name, by which a pickled configuration finds its classes."""
    found = next((block for block in _blocks.values() if block.__name__ == name), None)
    if found is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return found
