"""Pools of media workers for tests, and the parts that they decode."""

from __future__ import annotations

import asyncio

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.errors import ContextLengthExceeded
from dashinfer_vlm_core.media import READERS
from dashinfer_vlm_core.media.decoder import MediaDecoder
from dashinfer_vlm_core.media.types import TokenCount
from dashinfer_vlm_core.media_workers import TokenBudget, create_executor
from dashinfer_vlm_core.models.qwen2_vl import Qwen2VL
from dashinfer_vlm_core.protocol import MediaPart

PATH = "messages[0].content[0]"
FAMILY = Qwen2VL()


def image(**options):
    return MediaPart(kind="image", path=PATH, url="data:", **options)


def video(frames=None, **options):
    return MediaPart(kind="video", path=PATH, url="data:" if frames is None else ("data:",) * frames, **options)


def make_executor(folder, readers=READERS, *, limit=None, **options):
    config = EngineConfig(model=str(folder), **options)
    spec = FAMILY.load_spec(folder)
    return create_executor(
        config,
        family=FAMILY,
        folder=folder,
        spec=spec,
        processor=FAMILY.image_processor(spec, config),
        decoder=MediaDecoder(config=config, readers=readers, policy=spec.video.with_config(config)),
        limit=limit,
    )


def budget(limit=100_000):
    most = TokenCount(limit, 4 * limit)

    def check(tokens):
        if tokens.exceeds(most):
            raise ContextLengthExceeded("too many", prompt_tokens=tokens.kept, limit=limit)

    return TokenBudget(check, most)


def run_with_pool(folder, work, readers=READERS, **options):
    """Run `work(executor)` with a new executor."""

    async def main():
        executor = make_executor(folder, readers, **options)
        try:
            return await work(executor)
        finally:
            await executor.close()

    return asyncio.run(main())
