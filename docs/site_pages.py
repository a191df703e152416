"""What the site has beyond this folder: the project's own pages, its examples, the reference of the public names."""

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import trainsentry

ROOT = Path(__file__).parents[1]

OUTSIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/RESULTS.md")
"""Pages that lie where readers of the repository look for them."""

LEAVES_THE_FOLDER = re.compile(r"\]\((?:\.\./)+")
REPOSITORY_ONLY = re.compile(
    r"\[([^\]]+)\]\((?:\.\./)*(?:README[^)]*|LICENSE|Makefile|[a-z_]+/?[^):#]*\.(?:py|toml))\)"
)
"""Links to the code and to what only a repository shows: their words stay, for the site has no copy of them."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that do not lie in this folder."""
    for name in OUTSIDE:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    files.append(File.generated(config, "api.md", content=reference()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links to where the pages lie on the site."""
    name = page.file.src_uri
    if name not in OUTSIDE:
        return LEAVES_THE_FOLDER.sub("](", REPOSITORY_ONLY.sub(r"\1", markdown))
    depth = "../" * name.count("/")
    markdown = REPOSITORY_ONLY.sub(r"\1", markdown)
    return markdown.replace("](docs/", f"]({depth}").replace("](../docs/", f"]({depth}")


def reference() -> str:
    """Return the page of the public names, which mkdocstrings fills from the code."""
    public = (f"::: trainsentry.{name}" for name in trainsentry.__all__ if not name.startswith("_"))
    head = "# Public names\n\n`import trainsentry` and use these. Each is loaded when it is first used.\n\n"
    return head + "\n\n".join(public) + "\n"
