"""Loading a request's media: order, one fetch per source, none for an invalid request, cancellation."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref

import numpy as np
import pytest
from PIL import Image as PILImage

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.errors import (
    EngineClosed,
    InvalidParameter,
    MediaError,
    MediaRefused,
    MediaTooLarge,
    MediaUndecodable,
    MediaUnreachable,
    MissingDependency,
)
from dashinfer_vlm_core.media import READERS, Image, Video, VideoInfo, VideoReader
from dashinfer_vlm_core.protocol import MediaPart
from tests.cases import cases
from tests.decoding_loader import DecodingLoader
from tests.samples import data_url, encode, encode_video, image_url, noise
from tests.waiting import HANG, until
from tests.web import body, serve

THREADS = max(2, os.cpu_count() or 2)


def image(url, index=0, **options):
    return MediaPart(kind="image", path=f"messages[0].content[{index}]", url=url, **options)


def video(url, index=0, **options):
    return MediaPart(kind="video", path=f"messages[0].content[{index}]", url=url, **options)


def whole(media):
    return media


def load(*parts, readers=READERS, then=whole, **options):
    async def run():
        loader = DecodingLoader(
            EngineConfig(**{"allow_private_addresses": True, "image_fetch_timeout": HANG} | options), readers
        )
        try:
            return await loader.load(parts, then)
        finally:
            await loader.close()

    return asyncio.run(run())


def after(event, data):
    """Return a response that is sent once `event` is set."""

    def answer(stream):
        event.wait(HANG)
        body(data)(stream)

    return answer


def test_no_parts_give_no_media():
    assert load() == ()


def test_media_are_in_order_of_parts():
    pictures, sent = [noise(10, 10 + i, i) for i in range(3)], [threading.Event() for _ in range(3)]
    sent.append(threading.Event())
    sent[3].set()

    def answer(index):
        def send(stream):
            after(sent[index + 1], encode(pictures[index]))(stream)  # after all later parts of the request
            sent[index].set()

        return send

    with serve({f"/{i}": answer(i) for i in range(3)}) as web:
        media = load(*(image(web.url(f"/{i}"), i) for i in range(3)))
    for index, (item, picture) in enumerate(zip(media, pictures, strict=True)):
        assert item.path == f"messages[0].content[{index}]"
        np.testing.assert_array_equal(item.image, picture)


def test_parts_are_fetched_concurrently():
    together = threading.Barrier(6, timeout=HANG)  # no response is sent before all are requested

    def answer(stream):
        together.wait()
        body(encode(noise(4, 4)))(stream)

    with serve({f"/{i}": answer for i in range(6)}) as web:
        load(*(image(web.url(f"/{i}"), i) for i in range(6)))
    assert web.max_connections == 6


def test_equal_sources_are_fetched_once():
    with serve({"/a": body(encode(noise(4, 4))), "/b": body(encode(noise(4, 4, 1)))}) as web:
        a, b = web.url("/a"), web.url("/b")
        media = load(image(a, 0), image(b, 1), image(a, 2, max_pixels=5000), video((a, b, a), 3))
    assert len(web.requests) == 2
    assert [item.path[-2] for item in media] == ["0", "1", "2", "3"]
    assert media[2].max_pixels == 5000
    np.testing.assert_array_equal(media[3].frames, [media[0].image, media[1].image, media[0].image])


def test_media_keep_options_of_their_part():
    picture, clip = load(
        image(image_url(), 0, min_pixels=1, max_pixels=2),
        video((image_url(), image_url()), 1, min_pixels=3, max_pixels=4, total_pixels=5),
    )
    assert isinstance(picture, Image)
    assert (picture.min_pixels, picture.max_pixels) == (1, 2)
    assert isinstance(clip, Video)
    assert (clip.min_pixels, clip.max_pixels, clip.total_pixels) == (3, 4, 5)


def test_background_option_applies_to_images_and_frames():
    clear = data_url(encode(PILImage.new("RGBA", (28, 28), (9, 9, 9, 0))))
    one = image(clear, background=(1, 2, 3))
    frames = video((clear, clear), 1, background=(4, 5, 6))
    first, second, third = load(one, frames, image(clear, 2), rgba_background=(7, 8, 9))
    assert first.image.getpixel((0, 0)) == (1, 2, 3)
    assert second.frames[1, 0, 0].tolist() == [4, 5, 6]
    assert third.image.getpixel((0, 0)) == (7, 8, 9)


def test_video_file_from_data_url_http_or_folder(tmp_path):
    data = encode_video(30)
    (tmp_path / "movie.mp4").write_bytes(data)
    with serve({"/movie.mp4": body(data)}) as web:
        urls = [data_url(data, "video/mp4"), web.url("/movie.mp4"), "movie.mp4"]
        clips = load(*(video(url, i) for i, url in enumerate(urls)), allowed_local_media_path=tmp_path)
    for clip in clips:
        np.testing.assert_array_equal(clip.frames, clips[0].frames)
    assert clips[0].frames.shape == (6, 48, 64, 3)


def test_frame_list_equals_video_file_of_same_frames():
    from_file = load(video(data_url(encode_video(12, container="avi"), "video/avi"), num_frames=4))[0]
    urls = tuple(data_url(encode(frame)) for frame in from_file.frames)
    from_list = load(video(urls))[0]
    np.testing.assert_array_equal(from_list.frames, from_file.frames)


@cases(
    ("wrong", "error", "param"),
    [
        (image("file:///etc/passwd", 1), MediaRefused, "messages[0].content[1]"),
        (image("http://2130706433/", 1), MediaRefused, "messages[0].content[1]"),
        (image("data:image/png,raw", 1), MediaUndecodable, "messages[0].content[1]"),
        (image(image_url(200, 200), 1), MediaTooLarge, "messages[0].content[1]"),
        (video((), 1), InvalidParameter, "messages[0].content[1].video_url.url"),
        (video((image_url(),) * 9, 1), InvalidParameter, "messages[0].content[1].video_url.url"),
        (video((image_url(), "ftp://x/"), 1), MediaRefused, "messages[0].content[1].video_url.url[1]"),
        (video((image_url(),), 1, num_frames=4), InvalidParameter, "messages[0].content[1].video_url.num_frames"),
    ],
)
def test_invalid_request_fetches_nothing(wrong, error, param):
    with serve({"/": body(encode(noise(4, 4)))}) as web:
        with pytest.raises(error) as caught:
            load(image(web.url("/")), wrong, video_max_frames=8, image_max_bytes=50_000)
        assert web.requests == []
    assert caught.value.param == param


@pytest.mark.parametrize(("make", "options"), [(image, {"image": 2}), (video, {"video": 2})])
def test_too_many_parts_are_rejected_before_fetching(make, options):
    with serve({"/": body(b"")}) as web:
        with pytest.raises(MediaTooLarge) as caught:
            load(*(make(web.url("/"), i) for i in range(3)), limit_mm_per_prompt=options)
        assert web.requests == []
    assert caught.value.param == "messages[0].content[2]"


def test_missing_video_library_is_named_before_fetching():
    with serve({"/": body(encode_video())}) as web:
        with pytest.raises(MissingDependency, match=r"No video reader .* the extra `video`"):
            load(video(web.url("/")), readers=[])
        assert web.requests == []
    load(video((image_url(),)), readers=[])


@pytest.mark.parametrize(
    ("part", "param"),
    [
        (image(data_url(b"no picture")), "messages[0].content[0]"),
        (image(data_url(encode_video(2))), "messages[0].content[0]"),
        (video(data_url(encode(noise(4, 4)))), "messages[0].content[0]"),
        (video((image_url(), data_url(b"no picture"))), "messages[0].content[0].video_url.url[1]"),
    ],
)
def test_wrong_media_kind_is_named(part, param):
    with pytest.raises(MediaUndecodable) as caught:
        load(part)
    assert caught.value.param == param


def test_frames_of_different_sizes_are_named():
    with pytest.raises(InvalidParameter) as caught:
        load(video((image_url(20, 30), image_url(20, 30, 1), image_url(30, 20))))
    assert caught.value.param == "messages[0].content[0].video_url.url[2]"


def test_frames_too_large_in_total_are_rejected_by_headers():
    frames = tuple(image_url(28, 28, seed) for seed in range(17))
    assert load(video(frames[:16]), limits={"video_max_decoded_pixels": 16 * 784})[0].frames.shape == (16, 28, 28, 3)
    with pytest.raises(MediaTooLarge):
        load(video(frames), limits={"video_max_decoded_pixels": 16 * 784})


def test_first_failure_cancels_the_rest():
    left = threading.Event()

    def hold(stream):
        while stream.recv(1):
            pass
        left.set()

    with serve({"/slow": hold, "/bad": body(b"", status="404 Not Found")}) as web:
        with pytest.raises(MediaUnreachable) as caught:
            load(image(web.url("/slow"), 0), image(web.url("/bad"), 1))
        assert left.wait(HANG)
    assert caught.value.param == "messages[0].content[1]"


def test_canceling_request_closes_connections():
    arrived, left = threading.Event(), threading.Event()

    def hold(stream):
        arrived.set()
        stream.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        while stream.recv(1):
            pass
        left.set()

    async def run(web):
        loader = DecodingLoader(EngineConfig(allow_private_addresses=True, limits={"max_fetches": 1}), READERS)
        task = asyncio.ensure_future(loader.load([image(web.url("/hold"), i) for i in range(2)], whole))
        assert await asyncio.to_thread(arrived.wait, HANG)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(left.wait, HANG)
        assert len(asyncio.all_tasks()) == 1
        media = await loader.load([image(web.url("/good"))], whole)
        await loader.close()
        return media

    with serve({"/hold": hold, "/good": body(encode(noise(4, 4)))}) as web:
        assert len(asyncio.run(run(web))) == 1


def test_decoding_does_not_block_the_event_loop():
    """Decoding waits for the event loop; if it ran on the loop, it would deadlock."""
    on_the_loop = threading.Event()

    def after_the_loop(media):
        loop.call_soon_threadsafe(on_the_loop.set)
        return on_the_loop.wait(HANG)

    async def run():
        nonlocal loop
        loop = asyncio.get_running_loop()
        loader = DecodingLoader(EngineConfig(), READERS)
        went_on = await loader.load([image(image_url(seed=i), i) for i in range(3)], after_the_loop)
        await loader.close()
        return went_on

    loop = None
    assert asyncio.run(run()) == (True, True, True)


def test_errors_name_part_but_no_local_details(tmp_path):
    with serve({}) as web:
        for url in (web.url("/missing"), f"file://{tmp_path}/x.png", "missing.png"):
            with pytest.raises(MediaError) as caught:
                load(image(url, 7), allowed_local_media_path=tmp_path)
            assert caught.value.param == "messages[0].content[7]"
            assert str(tmp_path) not in caught.value.message
            assert "127.0.0.1" not in caught.value.message


def test_full_size_items_are_limited_to_number_of_threads():
    decoded, most = [], []

    def shrink(media):
        decoded.append(weakref.ref(media.image))
        most.append(sum(image() is not None for image in decoded))
        return media.path

    parts = [image(image_url(seed=i), i) for i in range(THREADS + 8)]
    assert load(*parts, then=shrink, limit_mm_per_prompt={"image": len(parts)}) == tuple(part.path for part in parts)
    assert len(decoded) == len(parts)
    assert max(most) <= THREADS


def test_error_in_then_callback_fails_request():
    def refuse(media):
        raise InvalidParameter("not this one", param=media.path)

    with pytest.raises(InvalidParameter) as caught:
        load(image(image_url(), 3), then=refuse)
    assert caught.value.param == "messages[0].content[3]"


class Endless(VideoReader):
    """A reader whose video is decoded until it is stopped."""

    name, priority = "endless", 99

    def __init__(self):
        self.info = VideoInfo(frames=100, fps=10.0, width=4, height=4)
        self.opened, self.started, self.stopped = 0, threading.Semaphore(0), threading.Semaphore(0)

    def available(self):
        return True

    def open(self, data):
        self.opened += 1
        return self

    def frames(self, indices, check_stop):
        self.started.release()
        try:
            until(check_stop)  # raises in the end
        except EngineClosed:  # not that it takes too long
            self.stopped.release()
            raise


async def acquire_all(semaphore, times):
    for _ in range(times):
        assert await asyncio.to_thread(semaphore.acquire, timeout=HANG)


async def wait_for_queued(loader, pieces):
    """Wait until so many tasks are queued in the loader."""
    await asyncio.to_thread(until, lambda: loader.threads._threads._work_queue.qsize() == pieces)


def test_canceled_request_stops_decoding_and_drops_queued_work():
    reader, made = Endless(), []

    async def run():
        loader = DecodingLoader(EngineConfig(), [reader])
        films = [asyncio.ensure_future(loader.load([video("data:;base64,AAAA")], made.append)) for _ in range(THREADS)]
        await acquire_all(reader.started, THREADS)
        waiting = asyncio.ensure_future(loader.load([image(image_url()), video("data:;base64,AAAA")], made.append))
        await wait_for_queued(loader, 2)
        for task in (waiting, *films):
            task.cancel()
        await asyncio.wait([waiting, *films])
        await acquire_all(reader.stopped, THREADS)
        assert await loader.load([image(image_url())], whole)
        await loader.close()

    asyncio.run(run())
    assert reader.opened == THREADS
    assert made == []


def test_failure_of_one_part_stops_decoding_others():
    reader = Endless()

    async def run():
        loader = DecodingLoader(EngineConfig(), [reader])

        async def process(part, data):
            if part.kind == "image":
                await acquire_all(reader.started, 1)
            return await loader.threads.process(part, data, whole)

        with pytest.raises(MediaUndecodable):
            await loader.loader.load([video("data:;base64,AAAA", 0), image(data_url(b"no picture"), 1)], process)
        await acquire_all(reader.stopped, 1)
        await loader.close()

    asyncio.run(run())


def test_close_fails_running_and_waiting_loads_alike():
    reader, held, arrived = Endless(), threading.Event(), threading.Semaphore(0)

    async def run(web):
        loader = DecodingLoader(EngineConfig(allow_private_addresses=True), [reader])
        fetching = asyncio.ensure_future(loader.load([image(web.url("/"))], whole))
        await acquire_all(arrived, 1)
        films = [asyncio.ensure_future(loader.load([video("data:;base64,AAAA")], whole)) for _ in range(THREADS)]
        await acquire_all(reader.started, THREADS)
        waiting = [asyncio.ensure_future(loader.load([image(image_url())], whole)) for _ in range(3)]
        await wait_for_queued(loader, 3)
        await loader.close()
        ended = await asyncio.gather(fetching, *films, *waiting, return_exceptions=True)
        assert not held.is_set()  # close did not wait for the fetch
        with pytest.raises(EngineClosed):
            await loader.load([image(image_url())], whole)
        await acquire_all(reader.stopped, THREADS)
        return ended

    def hold(stream):
        arrived.release()
        held.wait(HANG)

    with serve({"/": hold}) as web:
        ended = asyncio.run(run(web))
        held.set()
    assert {type(error) for error in ended} == {EngineClosed}


def test_request_without_media_does_not_wait():
    reader = Endless()

    async def run():
        loader = DecodingLoader(EngineConfig(), [reader])
        films = [asyncio.ensure_future(loader.load([video("data:;base64,AAAA")], whole)) for _ in range(THREADS)]
        await acquire_all(reader.started, THREADS)
        assert await asyncio.wait_for(loader.load([], whole), HANG / 2) == ()  # videos take longer
        await loader.close()
        await asyncio.wait(films)

    asyncio.run(run())


def test_frame_list_is_limited_as_one_video_while_fetched():
    frame = encode(noise(30, 30))
    refused = threading.Event()
    answers = {f"/{i}": body(frame) for i in range(3)} | {f"/{i}": after(refused, frame) for i in range(3, 6)}
    with serve(answers) as web:
        urls = tuple(web.url(f"/{i}") for i in range(6))
        assert load(video(urls[:2]), video_max_bytes=2 * len(frame))[0].frames.shape == (2, 30, 30, 3)
        with pytest.raises(MediaTooLarge) as caught:
            load(image(image_url()), video(urls, 1), video_max_bytes=2 * len(frame), image_fetch_timeout=2 * HANG)
        refused.set()
    assert caught.value.param == "messages[0].content[1]"


def test_image_may_be_larger_than_video_limit():
    load(image(image_url()), video_max_bytes=1)


def test_one_request_uses_at_most_half_of_fetch_slots():
    held, arrived = threading.Event(), threading.Semaphore(0)

    async def run(web):
        loader = DecodingLoader(EngineConfig(allow_private_addresses=True, limits={"max_fetches": 4}), READERS)
        greedy = asyncio.ensure_future(loader.load([image(web.url(f"/{i}"), i) for i in range(8)], whole))
        await acquire_all(arrived, 2)
        await asyncio.wait_for(loader.load([image(web.url("/quick"))], whole), HANG)
        assert len(web.requests) == 3
        held.set()
        assert len(await greedy) == 8
        await loader.close()

    def hold(stream):
        arrived.release()
        held.wait(HANG)
        body(encode(noise(4, 4)))(stream)

    with serve({f"/{i}": hold for i in range(8)} | {"/quick": body(encode(noise(4, 4)))}) as web:
        asyncio.run(run(web))
