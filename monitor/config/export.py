"""The `export` block of the configuration, made from the table of exporters."""

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from pydantic import Field, create_model

from trainsentry.exporters.registry import EXPORTERS, load_entry
from trainsentry.monitor.config.blocks import Block, Unit, optional

_EXPORT = "The places that records are written to."


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
        made[field.name] = (_with_limits(hint, dict(field.metadata)), default)
    block = create_model(settings.__name__, __base__=Block, __doc__=settings.__doc__, __module__=__name__, **made)
    _blocks[settings] = block
    return block


def _with_limits(hint: Any, metadata: dict[str, Any]) -> Any:
    """Return a type with the limits and the unit that `setting` gave its field."""
    unit = metadata.pop("unit", "")
    limited = Annotated[hint, Field(**metadata)] if metadata else hint
    return Annotated[limited, Unit(unit)] if unit else limited


def export_model(names: Mapping[str, str]) -> type[Block]:
    """Return the `export` block for a table of exporters (`module:name` of each entry, by key)."""
    made: dict[str, Any] = {}
    for key, name in names.items():
        entry = load_entry(name)
        if entry.block is None:
            made[key] = (Annotated[bool, Field(description=entry.meaning)] if entry.meaning else bool, entry.on)
            continue
        block = block_of(entry.block)
        made[key] = (Annotated[block | None, optional(block)], block() if entry.on else None)
    wait = Field(gt=0, le=600, description="Longest wait for a late writer or a full ring, in total per trouble.")
    made["max_wait"] = (Annotated[float, wait, Unit("seconds")], 5.0)
    return create_model("Export", __base__=Block, __doc__=_EXPORT, __module__=__name__, **made)


if TYPE_CHECKING:

    class Export(Block):
        """The fields come from the table, which a type checker does not run."""

        max_wait: float = 5.0

        def __getattr__(self, key: str) -> Any: ...
else:
    Export = export_model(EXPORTERS)


def __getattr__(name: str) -> Any:
    """Return a block by its name: a pickled configuration looks its classes up here."""
    found = next((block for block in _blocks.values() if block.__name__ == name), None)
    if found is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return found
