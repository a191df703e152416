"""The reference in docs/ is the one that the code prints, and leaves no key without its meaning."""

from pathlib import Path
from typing import Annotated

import pytest
from pydantic import Field
from typer.testing import CliRunner

from trainsentry import MonitorConfig
from trainsentry.monitor.cli.app import app
from trainsentry.monitor.config.blocks import BYTES, Block, Size, Unit
from trainsentry.monitor.config.reference import blocks_of, render_reference

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize(
    ("page", "command"),
    [
        ("configuration.md", "config reference"),
        ("debugger-configuration.md", "config reference --debugger"),
    ],
)
def test_the_page_in_docs_is_what_the_command_prints(page, command):
    printed = CliRunner().invoke(app, command.split())
    assert printed.exit_code == 0, printed.output
    path = DOCS / page
    current = path.read_text() if path.exists() else ""
    assert current == printed.output, (
        f"docs/{page} is not what the code says; renew it: trainsentry {command} > docs/{page}"
    )


def test_every_block_has_a_section_and_every_key_a_row():
    page = render_reference(MonitorConfig, "The configuration", "a command")
    for path, block in blocks_of(MonitorConfig):
        headings = [line for line in page.splitlines() if line.startswith("## ")]
        [section] = [h for h in headings if path in h[3:].split(", ")] if path else ["# The configuration"]
        rows = page.partition(f"{section}\n")[2].partition("\n## ")[0]
        for key in block.model_fields:
            assert f"`{key}`" in rows, f"{path}.{key}"


class Inner(Block):
    """Inside. The rest."""

    size: Size = Field(default=3 * 2**20, description="How large.")


class Outer(Block):
    """Outside."""

    inner: Inner | None = Inner()
    other: Inner | None = Field(default=None, description="The same block a second time.")
    wait: Annotated[float, Field(gt=0, description="How long | how far."), Unit("seconds")] | None = Field(
        default=1.5, description="How long | how far."
    )


def test_types_bounds_defaults_units_and_blocks_are_rendered():
    assert BYTES.name == "bytes"
    page = render_reference(Outer, "Title", "print it")
    assert page.startswith("# Title\n\n<!-- Printed by `print it`")
    assert "| [`inner`](#inner-other) | block | on |  | Inside. The rest. |" in page
    assert "| [`other`](#inner-other) | block | off |  | The same block a second time. |" in page
    assert "| `wait` | number > 0 or `null` | `1.5` | seconds | How long \\| how far. |" in page
    assert page.count("## inner, other") == 1
    assert '| `size` | size > 0 | `"3MiB"` | bytes | How large. |' in page


def test_a_key_without_a_description_is_an_error_that_names_it():
    class Part(Block):
        """A part."""

        key: int = 3

    class Whole(Block):
        """The whole."""

        part: Part = Part()

    with pytest.raises(ValueError, match=r"part\.key: no description"):
        render_reference(Whole, "Title", "print it")
