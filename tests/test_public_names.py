from __future__ import annotations

import re

import dashinfer_vlm_core
from dashinfer_vlm_core import errors


def test_public_names_are_listed_and_importable():
    assert dir(dashinfer_vlm_core) == sorted(dashinfer_vlm_core.__all__)
    for name in dashinfer_vlm_core.__all__:
        assert getattr(dashinfer_vlm_core, name) is not None


def test_documented_error_tree_matches_classes():
    ancestors = ["DashInferVLMError"]
    drawn = {}
    for line in errors.__doc__.splitlines():
        if found := re.match(r"    ([│ ]*)[├└]── (\w+)", line):
            depth = len(found[1]) // 4 + 1
            drawn[found[2]] = ancestors[depth - 1]
            ancestors[depth:] = [found[2]]
    classes = [item for item in vars(errors).values() if isinstance(item, type)]
    real = {item.__name__: item.__mro__[1].__name__ for item in classes if item is not errors.DashInferVLMError}
    assert drawn == real
