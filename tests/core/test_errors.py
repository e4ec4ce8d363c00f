"""Errors keep their class and attributes in another process."""

from __future__ import annotations

import pickle

from dashinfer_vlm_core import errors
from dashinfer_vlm_core.errors import ContextLengthExceeded, DashInferVLMError, EngineClosed, QueueFull
from tests.cases import cases

CLASSES = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, DashInferVLMError)]


@cases(
    "error",
    [
        *(
            kind("It failed.", param="messages[0]", code="a_code")
            for kind in CLASSES
            if kind not in {ContextLengthExceeded, QueueFull}
        ),
        ContextLengthExceeded("Too long.", prompt_tokens=5, limit=4, param="prompt"),
        QueueFull("Busy.", retry_after=7.5),
        EngineClosed("Closed.", to_be_started=True),
    ],
)
def test_pickled_error_is_equal(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (str(copy), copy.args, vars(copy)) == (str(error), error.args, vars(error))
