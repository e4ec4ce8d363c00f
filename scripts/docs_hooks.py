"""What the pages need to become a site; mkdocs.yml names this file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OUTSIDE = re.compile(r"\[`?([^\]`]+)`?\]\(\.\./([^)]+)\)")
"""A link to a file of the repository that is no page."""


def on_config(config: Any) -> Any:
    """Leave out of the contents what is not there: a page may come with a part that this checkout lacks."""
    config["nav"] = list(_present(config["nav"], Path(config["docs_dir"])))
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The site holds pages alone: of a link to another file its path is left."""
    return OUTSIDE.sub(lambda link: f"`{link[2]}`", markdown)


def _present(entries: list[dict[str, Any]], folder: Path) -> Iterator[dict[str, Any]]:
    for entry in entries:
        ((title, target),) = entry.items()
        if isinstance(target, list):
            yield {title: list(_present(target, folder))}
        elif (folder / target).exists():
            yield entry
