"""What a changed document may do: it is rendered, or rejected by its part."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from hypothesis import event

from dashinfer_vlm_core import Engine
from dashinfer_vlm_core.config import Limits
from dashinfer_vlm_core.errors import InvalidParameter, MediaTooLarge, MediaUndecodable
from dashinfer_vlm_core.testing import scripted_engine
from tests.samples import data_url

PART = "messages[0].content[0]"


def document_engine(checkpoint: Path) -> AbstractContextManager[Engine]:
    """Return an engine with short deadlines and little memory for its media workers."""
    limits = Limits(media_worker_memory_mib=256, image_decode_timeout=2, video_decode_timeout=2)
    return scripted_engine("Never asked.", model=str(checkpoint), media_workers=2, limits=limits)


def request(file: bytes, **options: Any) -> dict[str, Any]:
    part = {"type": "file", "file": {"file_data": data_url(file, "application/pdf"), **options}}
    return {"messages": [{"role": "user", "content": [part]}]}


def check(engine: Engine, file: bytes, **options: Any) -> None:
    """Check that a file is previewed or rejected by its part; --hypothesis-show-statistics counts the outcomes."""
    try:
        preview = engine.preview(request(file, max_pixels=84 * 84, **options))
    except (MediaTooLarge, MediaUndecodable, InvalidParameter) as error:
        _check_error(error)
        event(f"rejected: {error.message}")
    else:
        assert all(item.tokens > 0 for item in preview.items)
        event("rendered")


def _check_error(error: MediaTooLarge | MediaUndecodable | InvalidParameter) -> None:
    assert (error.param or "").startswith(PART)
    assert len(error.message) < 300
