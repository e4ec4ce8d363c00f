"""Hooks of the documentation site; mkdocs.yml names this file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

RELATIVE = re.compile(r"\[`?[^\]`]+`?\]\((\.\./[^)]+)\)")
"""A link to a file in a parent folder."""


REFERENCE = re.compile(
    r"^Reference \(docstrings of the code\): \[`([\w.]+)`\]\(\S+\)(?: <!-- (\{.*\}) -->)?$", re.MULTILINE
)
"""A link to an object's file, with mkdocstrings' options in a comment: the site shows the docstrings in its place."""


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Replace references by docstrings, and links to files outside of the docs folder by the paths of these."""
    docs = Path(config["docs_dir"]).resolve()
    folder = (docs / page.file.src_path).parent

    def link_or_path(link: re.Match[str]) -> str:
        target = (folder / link[1].partition("#")[0]).resolve()
        return link[0] if target.is_relative_to(docs) else f"`{target.relative_to(docs.parent)}`"

    with_docstrings = REFERENCE.sub(lambda link: f"::: {link[1]}\n    options: {link[2] or '{}'}\n", markdown)
    return RELATIVE.sub(link_or_path, with_docstrings)
