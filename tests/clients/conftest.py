from __future__ import annotations

import os
import warnings

import pytest

from tests.clients.table import mark_property

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise, importing it downloads prices
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # from importing LiteLLM
    import litellm  # noqa: F401


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Record what a test marked `client` shows, for docs/clients.md; also of other folders."""
    for item in items:
        for mark in item.iter_markers("client"):
            item.user_properties.append(mark_property(*mark.args))
