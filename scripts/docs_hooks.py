"""Hooks of the documentation site; mkdocs.yml names this file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

RELATIVE = re.compile(r"\[`?[^\]`]+`?\]\((\.\./[^)]+)\)")
"""A link to a file in a parent folder."""


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Replace links to files outside of the docs folder, which the site does not contain, with their paths."""
    docs = Path(config["docs_dir"]).resolve()
    folder = (docs / page.file.src_path).parent

    def link_or_path(link: re.Match[str]) -> str:
        target = (folder / link[1].partition("#")[0]).resolve()
        return link[0] if target.is_relative_to(docs) else f"`{target.relative_to(docs.parent)}`"

    return RELATIVE.sub(link_or_path, markdown)
