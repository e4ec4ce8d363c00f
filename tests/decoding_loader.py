"""A media loader that decodes in threads, for tests of decoded media."""

from __future__ import annotations

from dashinfer_vlm_core.media.decoder import MediaDecoder
from dashinfer_vlm_core.media.frame_sampling import VideoSamplingPolicy
from dashinfer_vlm_core.media.loader import MediaLoader
from dashinfer_vlm_core.media_workers import MediaThreads


class FullSize:
    """An image processor that resizes no frames."""

    frame_resizer = None


class _DecodingThreads(MediaThreads):
    """Threads that return `then(media)` instead of patches."""

    def __init__(self, decoder):
        super().__init__(decoder, processor=FullSize(), spec=None)

    def _process(self, media, part, then):
        return then(media)


class DecodingLoader:
    def __init__(self, config, readers, *, resolve=None):
        self.loader = MediaLoader(config, readers, resolve=resolve)
        policy = VideoSamplingPolicy().with_config(config)
        decoder = MediaDecoder(config=config, readers=readers, policy=policy)
        self.threads = _DecodingThreads(decoder)

    async def load(self, parts, then):
        """Load and decode the parts, and return `then(media)` for each."""
        return await self.loader.load(parts, lambda part, data: self.threads.process(part, data, then))

    async def close(self):
        await self.loader.close()
        await self.threads.close()
