"""A media loader that decodes in threads, for tests of decoded media."""

from __future__ import annotations

from dashinfer_vlm_core.media import MediaLoader
from dashinfer_vlm_core.media.decoder import MediaDecoder
from dashinfer_vlm_core.media.frame_sampling import VideoSamplingPolicy
from dashinfer_vlm_core.media_workers import MediaThreads


class DecodingLoader:
    def __init__(self, config, readers, *, resolve=None):
        self.loader = MediaLoader(config, readers, resolve=resolve)
        policy = VideoSamplingPolicy().with_config(config)
        decoder = MediaDecoder(config=config, readers=readers, policy=policy)
        self.threads = MediaThreads(decoder, processor=None, spec=None)

    async def load(self, parts, then):
        """Load and decode the parts, and return `then(media)` for each."""
        return await self.loader.load(parts, lambda part, data: self.threads.decode(part, data, then))

    async def close(self):
        await self.loader.close()
        await self.threads.close()
