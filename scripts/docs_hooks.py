"""What the pages need to become a site; mkdocs.yml names this file."""

from __future__ import annotations

import re
from typing import Any

OUTSIDE = re.compile(r"\[`?([^\]`]+)`?\]\(\.\./([^)]+)\)")
"""A link to a file of the repository that is no page."""


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The site holds pages alone: of a link to another file its path is left."""
    return OUTSIDE.sub(lambda link: f"`{link[2]}`", markdown)
