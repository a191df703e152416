"""Renders the reference of a configuration as Markdown: every key with its type, default, unit and meaning.

Works on any pydantic model whose fields are values or nested models: types and bounds come from the JSON schema, units
from `Unit` metadata, meanings from the descriptions of fields and the docstrings of models.
"""

import inspect
import json
import re
from collections.abc import Iterator
from typing import Any, Final, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from trainsentry.monitor.config.blocks import BYTES, Unit

BLOCK: Final = "block"
"""Type of a key that holds a nested model."""

_SIZES: Final = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_LOWER: Final = {"minimum": "≥", "ge": "≥", "exclusiveMinimum": ">", "gt": ">"}
_UPPER: Final = {"maximum": "≤", "le": "≤", "exclusiveMaximum": "<", "lt": "<"}
_TYPES: Final = {
    "integer": "integer",
    "number": "number",
    "string": "text",
    "boolean": "`true` or `false`",
    "null": "`null`",
}


def render_reference(model: type[BaseModel], title: str, command: str) -> str:
    """Return the Markdown page of a configuration; `command` prints it again and is named on the page.

    Raises:
        ValueError: for a key without a description.

    """
    paths: dict[type[BaseModel], list[str]] = {}
    for path, block in blocks_of(model):
        paths.setdefault(block, []).append(path)
    page = [f"# {title}", f"<!-- Printed by `{command}`; change the descriptions in the code, not this page. -->"]
    for block, places in paths.items():
        heading = ", ".join(places)
        page += [f"## {heading}"] if heading else []
        page += [inspect.getdoc(block) or "", _table(block, places, paths)]
    return "\n\n".join(page) + "\n"


def blocks_of(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield the model and, depth first, the models nested in it, each with the path of its key."""
    yield path, model
    for name, field in model.model_fields.items():
        block = _block_in(field.annotation)
        if block is not None:
            yield from blocks_of(block, f"{path}.{field.alias or name}".lstrip("."))


def _block_in(annotation: Any) -> type[BaseModel] | None:
    candidates = (annotation, *get_args(annotation))
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


def _table(model: type[BaseModel], places: list[str], paths: dict[type[BaseModel], list[str]]) -> str:
    schema = model.model_json_schema()["properties"]
    lines = ["| key | type | default | unit | meaning |", "|---|---|---|---|---|"]
    for name, field in model.model_fields.items():
        key = field.alias or name
        block = _block_in(field.annotation)
        unit = _unit_of(field)
        if block is None:
            cells = [f"`{key}`", _type_text(schema[key], unit), _default_text(field, unit)]
        else:
            cells = [f"[`{key}`](#{_anchor(', '.join(paths[block]))})", BLOCK, _block_default(field, block)]
        meaning = field.description or (block is not None and _first_paragraph(block)) or ""
        if not meaning:
            path = f"{places[0]}.{key}".lstrip(".")
            raise ValueError(f"{path}: no description; allowed: Field(description=…)")
        cells += [unit.name if unit else "", meaning]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def _type_text(schema: dict[str, Any], unit: Unit | None) -> str:
    """Return the words for a type of the JSON schema, with its bounds.

    >>> _type_text({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]}, None)
    'integer ≥ 1 or `null`'
    """
    if unit == BYTES:
        return _with_bounds("size", schema, unit)
    if "const" in schema or "enum" in schema:
        return _either([f"`{json.dumps(value)}`" for value in schema.get("enum", [schema.get("const")])])
    if "anyOf" in schema:
        return _either([_type_text(one, unit) for one in schema["anyOf"]])
    if schema["type"] == "array":
        items = re.sub(r"\b(integer|number|text)\b", r"\1s", _type_text(schema["items"], unit))
        return f"list of {items}" + (", not empty" if schema.get("minItems") else "")
    text = _with_bounds(_TYPES[schema["type"]], schema, unit) + (", not empty" if schema.get("minLength") else "")
    return f"{text} matching `{schema['pattern']}`" if "pattern" in schema else text


def _either(words: list[str]) -> str:
    """Return alternatives in words.

    >>> _either(["a", "b", "c"]), _either(["a"])
    ('a, b or c', 'a')
    """
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _with_bounds(text: str, schema: dict[str, Any], unit: Unit | None) -> str:
    lower = [f"{sign} {_number_text(schema[key], unit)}" for key, sign in _LOWER.items() if key in schema][:1]
    upper = [f"{sign} {_number_text(schema[key], unit)}" for key, sign in _UPPER.items() if key in schema][:1]
    return f"{text} {' and '.join(lower + upper)}".strip()


def _number_text(number: float, unit: Unit | None) -> str:
    """Return a number; bytes in the largest unit that divides them.

    >>> _number_text(2**30, BYTES), _number_text(0, BYTES), _number_text(0.5, None)
    ('1GiB', '0', '0.5')
    """
    for name, size in _SIZES if unit == BYTES else ():
        if number and number % size == 0:
            return f"{number // size}{name}"
    return f"{number:g}" if abs(number) < 1e6 else f"{int(number)}"


def _default_text(field: FieldInfo, unit: Unit | None) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if unit == BYTES and value is not None:
        return f'`"{_number_text(value, unit)}"`'
    return f"`{json.dumps(value)}`"


def _block_default(field: FieldInfo, block: type[BaseModel]) -> str:
    """Return whether a block is on by default."""
    value = field.get_default(call_default_factory=True, validated_data={})
    if not isinstance(value, block):
        return "off"
    return "on" if value == block() else f"`{value.model_dump_json(exclude_defaults=True, by_alias=True)}`"


def _unit_of(field: FieldInfo) -> Unit | None:
    """Return the unit among a field's metadata, or among that of the types in its union."""
    metadata = [*field.metadata, *(item for part in get_args(field.annotation) for item in get_args(part)[1:])]
    return next((item for item in metadata if isinstance(item, Unit)), None)


def _first_paragraph(model: type[BaseModel]) -> str:
    return " ".join((inspect.getdoc(model) or "").partition("\n\n")[0].split())


def _anchor(heading: str) -> str:
    """Return the link target that GitHub gives a heading.

    >>> _anchor("collect.updates, collect.activations")
    'collectupdates-collectactivations'
    """
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
