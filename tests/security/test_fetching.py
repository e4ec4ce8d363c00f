"""Lines 1 to 5: fetching. The name of a host in TLS has its test in tests/core/test_media_fetch.py."""

from __future__ import annotations

import asyncio
import gzip
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from dashinfer_vlm_core import VLM
from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.errors import MediaError, MediaRefused
from dashinfer_vlm_core.media import READERS, MediaLoader
from dashinfer_vlm_core.media.fetch import SILENCE_SECONDS, Fetcher
from dashinfer_vlm_core.media.url_policy import check_url
from dashinfer_vlm_core.protocol import MediaPart
from tests.samples import data_url, encode, image_url, noise
from tests.security.conftest import GOOD, LIMITS, image, picture, text, video
from tests.waiting import HANG
from tests.web import LoopbackTransport, body, fake_resolver, raw, redirect, serve

PART = "messages[0].content[0]"
PICTURE = encode(noise(20, 30))
WORDS = text("What is this?")

# Line 1: one connector for every door


class Watched:
    """Notes the connections and the opened files of this process, as Python's own audit events tell them."""

    def __init__(self):
        self.on = False
        self.connections, self.files = [], []
        sys.addaudithook(self._note)  # it cannot be taken away again, only told to be silent

    def _note(self, event, arguments):
        if self.on and event == "socket.connect":
            self.connections.append(arguments[1][:2])
        if self.on and event == "open" and isinstance(arguments[0], (str, bytes)):
            self.files.append(str(arguments[0]))

    def __enter__(self):
        self.on = True
        return self

    def __exit__(self, *error):
        self.on = False


def test_security_01_nothing_but_the_connector_reaches_out(open_door, folder):
    with serve({"/a.png": body(PICTURE)}) as web:
        parts = [image(web.url("/a.png")), image("picture.png"), GOOD, video([web.url("/a.png"), "picture.png"]), WORDS]
        request = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}
        with Watched() as watched:
            open_door.engine.chat(request)
    assert watched.connections == [("127.0.0.1", web.port)]
    assert [name for name in watched.files if not name.startswith(sys.prefix)] == [str(folder / "picture.png")]


@pytest.mark.parametrize(
    "door", ["chat", "achat", "stream", "astream", "VLM.chat", "VLM.generate", "server", "server's stream"]
)
def test_security_01_every_door_refuses_in_the_same_words(closed_door, door):
    engine, part = closed_door.engine, image("http://127.0.0.1/a.png")
    request = {"messages": [{"role": "user", "content": [part]}]}
    offline = VLM(engine=engine)

    async def exhaust():
        return [chunk async for chunk in engine.astream(request)]

    ways = {
        "chat": lambda: engine.chat(request),
        "achat": lambda: asyncio.run(engine.achat(request)),
        "stream": lambda: list(engine.stream(request)),
        "astream": lambda: asyncio.run(exhaust()),
        "VLM.chat": lambda: offline.chat(request["messages"], use_tqdm=False),
        "VLM.generate": lambda: offline.generate(
            {"prompt": "<|image_pad|>", "multi_modal_data": {"image": "http://127.0.0.1/a.png"}}, use_tqdm=False
        ),
    }
    if door in ways:
        with pytest.raises(MediaRefused) as caught:
            ways[door]()
        message = caught.value.message
    else:
        message = closed_door.refuses(part, stream=door != "server")
    assert message == "The URL leads to an address that this server may not fetch from; use a public one."


# Line 2: files


def test_security_02_files_are_refused_by_default(closed_door, folder):
    picture = folder / "picture.png"
    said = {
        closed_door.refuses(image(url), code="media_refused")
        for url in (picture.as_uri(), str(picture), "picture.png", "~/picture.png", "file:///etc/passwd")
    }
    assert said == {"Local files are not served here; send a data:, http: or https: URL."}


def test_security_02_files_of_the_allowed_folder_are_read(open_door, folder):
    expected = open_door.sees(picture(PICTURE))
    for url in ("picture.png", str(folder / "picture.png"), (folder / "picture.png").as_uri(), "inside.png"):
        assert open_door.sees(image(url)) == expected


def test_security_02_no_way_leads_out_of_the_allowed_folder_and_none_tells_what_is_there(open_door, folder):
    outside = folder.parent
    said = {
        open_door.refuses(image(url), code="media_refused")
        for url in (
            "../secret.png",
            "../nothing.png",
            "outside.png",  # a link
            "../allowed-but-not/secret.png",  # begins as the allowed folder does
            str(outside / "secret.png"),
            str(outside / "nothing.png"),
            (outside / "secret.png").as_uri(),
            f"file://{folder}/../secret.png",
            f"file://{folder}/%2e%2e/secret.png",
            f"file://example.com{folder}/picture.png",
            "file:///etc/passwd",
            "/proc/self/environ",
            "picture.png\x00.jpg",
            "x" * 5000 + "/../../secret.png",
        )
    }
    assert said == {"Local files are not served here; send a data:, http: or https: URL."}


# Line 3: addresses, names and redirects

TRICKS = [
    "http://127.0.0.1:{port}/a.png",
    "http://localhost:{port}/a.png",
    "http://good.example@127.0.0.1:{port}/a.png",
    "http://good.example:80@127.0.0.1:{port}/a.png",
    "http://127.0.0.1:{port}\\@good.example/a.png",
    "http:\\\\127.0.0.1:{port}/a.png",
    "http:/127.0.0.1:{port}/a.png",
    "http://good.example\\.127.0.0.1:{port}/a.png",
    "http://2130706433:{port}/a.png",
    "http://0177.0.0.1:{port}/a.png",
    "http://0x7f.0.0.1:{port}/a.png",
    "http://0x7f000001:{port}/a.png",
    "http://127.1:{port}/a.png",
    "http://127.0.0.1.:{port}/a.png",
    "http://localhost.:{port}/a.png",
    "http://①②⑦.⓪.⓪.①:{port}/a.png",
    "http://127。0。0。1:{port}/a.png",
    "http://%31%32%37.0.0.1:{port}/a.png",
    "http://[::1]:{port}/a.png",
    "http://[::ffff:127.0.0.1]:{port}/a.png",
    "http://[::ffff:7f00:1]:{port}/a.png",
    "http://[64:ff9b::7f00:1]:{port}/a.png",
    "http://[2002:7f00:1::]:{port}/a.png",
    "http://0.0.0.0:{port}/a.png",
    " http://127.0.0.1:{port}/a.png",
    "HTTP://127.0.0.1:{port}/a.png",
    "http://127.0.0.1:{port}/a.png\r\nHost: good.example",
    "http://169.254.169.254/latest/meta-data",
    "http://10.0.0.1/a.png",
    "http://172.16.0.1/a.png",
    "http://192.168.0.1/a.png",
    "http://100.64.0.1/a.png",
    "http://224.0.0.1/a.png",
    "http://240.0.0.1/a.png",
    "http://[fe80::1]/a.png",
    "http://[fd00::1]/a.png",
    "gopher://127.0.0.1:{port}/a.png",
    "ftp://127.0.0.1:{port}/a.png",
    "//127.0.0.1:{port}/a.png",
]


def test_security_03_no_writing_of_a_private_address_is_connected_to(closed_door):
    with serve({"/a.png": body(PICTURE)}) as web:
        for trick in TRICKS:
            closed_door.refuses(image(trick.format(port=web.port)), code="media_refused")
            closed_door.refuses(video([trick.format(port=web.port)]), param=f"{PART}.video_url.url[0]")
    assert not web.requests


def fetch(url, config, **table):
    """The fetcher under a resolver that knows `table`, with every connection brought to this machine."""
    looked_up = []
    resolve = fake_resolver(table)

    async def run():
        async def noted(host, port):
            looked_up.append(host)
            return await resolve(host, port)

        transport = LoopbackTransport()
        fetcher = Fetcher(config, resolve=noted, transport=transport)
        try:
            data = await fetcher.get(check_url(url, path=PART, config=config), kind="image", path=PART)
        except MediaError as error:
            data = error
        finally:
            await fetcher.close()
        return data, transport.addresses, looked_up

    return asyncio.run(run())


PUBLIC = "93.184.216.34"


def test_security_03_a_name_that_changes_its_address_is_asked_once_and_the_checked_address_is_dialled():
    with serve({"/a.png": body(PICTURE)}) as web:
        url = web.url("/a.png", host="changes.example")
        data, dialled, asked = fetch(url, EngineConfig(), **{"changes.example": [[PUBLIC], ["127.0.0.1"]]})
    assert (data, dialled, asked) == (PICTURE, [PUBLIC], ["changes.example"])
    assert f"Host: changes.example:{web.port}" in web.requests[0]


def test_security_03_a_name_that_turns_private_on_the_next_hop_is_refused():
    with serve({"/a.png": redirect("/b.png"), "/b.png": body(PICTURE)}) as web:
        url = web.url("/a.png", host="changes.example")
        data, dialled, asked = fetch(url, EngineConfig(), **{"changes.example": [[PUBLIC], ["127.0.0.1"]]})
    assert isinstance(data, MediaRefused)
    assert (dialled, asked) == ([PUBLIC], ["changes.example"] * 2)
    assert len(web.requests) == 1


def test_security_03_one_private_address_among_public_ones_refuses_the_name():
    data, dialled, _ = fetch("http://two.example/", EngineConfig(), **{"two.example": [PUBLIC, "10.0.0.1"]})
    assert isinstance(data, MediaRefused)
    assert not dialled


def test_security_03_the_loader_asks_the_resolver_it_was_given_and_no_other():
    async def run(table):
        loader = MediaLoader(EngineConfig(), READERS, resolve=fake_resolver(table))
        part = MediaPart(kind="image", path=PART, url="http://pictures.example/a.png")
        try:
            await loader.load([part], lambda media: media)
        finally:
            await loader.close()

    for answer in ("127.0.0.1", "::ffff:10.0.0.1", "169.254.169.254"):
        with pytest.raises(MediaRefused):
            asyncio.run(run({"pictures.example": [answer]}))


def test_security_03_three_redirects_are_followed_and_a_fourth_is_not(open_door):
    answers = {f"/{left}": redirect(f"/{left - 1}") for left in range(1, 5)} | {"/0": body(PICTURE)}
    with serve(answers) as web:
        assert open_door.sees(image(web.url("/3"))) == open_door.sees(picture(PICTURE))
        open_door.refuses(image(web.url("/4")), code="media_refused")
        web.responses["/loop"] = redirect("/loop")
        open_door.refuses(image(web.url("/loop")), code="media_refused")


@pytest.mark.parametrize(
    "location",
    [
        "file:///etc/passwd",
        "ftp://example.com/a.png",
        "data:image/png;base64,AAAA",
        "http://good.example@127.0.0.1/a.png",
        "\\\\127.0.0.1/a.png",
        "http://2130706433/a.png",
        "gopher://127.0.0.1/",
    ],
)
def test_security_03_each_redirect_is_checked_again(open_door, location):
    with serve({"/a.png": redirect(location)}) as web:
        open_door.refuses(image(web.url("/a.png")), code="media_refused")


def test_security_03_allowed_domains_are_whole_names_on_every_hop():
    config = EngineConfig(allowed_media_domains=("good.example",))
    table = {name: [PUBLIC] for name in ("good.example", "evilgood.example", "good.example.evil", "a.good.example")}
    with serve({"/a.png": body(PICTURE)}) as web:
        web.responses["/away"] = redirect(web.url("/a.png", host="evilgood.example"))
        assert fetch(web.url("/a.png", host="good.example"), config, **table)[0] == PICTURE
        assert isinstance(fetch(web.url("/away", host="good.example"), config, **table)[0], MediaRefused)
        for name in ("evilgood.example", "good.example.evil", "a.good.example"):
            with pytest.raises(MediaRefused):
                check_url(web.url("/a.png", host=name), path=PART, config=config)


def test_security_03_nothing_of_the_environment_and_no_cookie_travels_along(monkeypatch, tmp_path):
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret")
    cookie = body(b"", "Set-Cookie: a=b; Path=/", "Location: /b.png", status="302 Found")
    with serve({"/a.png": cookie, "/b.png": body(PICTURE)}) as web, serve({}) as proxy:
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.url(""))
        loaded = load(image_part(web.url("/a.png")))
    assert loaded[0].image.size == (30, 20)
    assert not proxy.requests
    heads = "".join(web.requests).lower()
    assert len(web.requests) == 2
    assert not any(name in heads for name in ("cookie", "authorization", "referer", "a=b"))


def image_part(url):
    return MediaPart(kind="image", path=PART, url=url)


def load(*parts):
    async def run():
        loader = MediaLoader(EngineConfig(allow_private_addresses=True), READERS)
        try:
            return await loader.load(parts, lambda media: media)
        finally:
            await loader.close()

    return asyncio.run(run())


# Line 4: caps


def endless(head, piece):
    def answer(stream):
        stream.sendall(head)
        while True:  # until the other side has had enough and hangs up
            stream.sendall(piece)

    return answer


HEAD = b"HTTP/1.1 200 OK\r\n"
FLOODS = {
    "an endless body": endless(HEAD + b"\r\n", b"x" * 65536),
    "endless chunks": endless(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"10000\r\n" + b"x" * 65536 + b"\r\n"),
    "a body that is larger than allowed": body(b"x" * 100_001),
    "a declared length above the cap": raw(HEAD + b"Content-Length: 100001\r\n\r\n"),
    "a declared length of twenty digits": raw(HEAD + b"Content-Length: 99999999999999999999\r\n\r\n"),
}
LIES = {
    "fewer bytes than declared": raw(HEAD + b"Content-Length: 5000\r\n\r\n" + PICTURE),
    "a length of five thousand digits": raw(HEAD + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n"),
    "a negative length": raw(HEAD + b"Content-Length: -1\r\n\r\n" + PICTURE),
    "a length in words": raw(HEAD + b"Content-Length: many\r\n\r\n" + PICTURE),
    "two lengths": raw(HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n" + PICTURE),
    "broken chunks": raw(HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"),
    "a bomb, compressed": body(gzip.compress(bytes(50_000_000)), "Content-Encoding: gzip"),
    "another encoding": body(PICTURE, "Content-Encoding: br, secret"),
    "a head without end": endless(HEAD, b"X-Secret: " + b"y" * 1000 + b"\r\n"),
    "no HTTP": raw(b"SSH-2.0-secret\r\n"),
    "nothing": raw(b""),
    "an error with words": body(b"secret of /etc/passwd", status="500 secret"),
    "a redirect to nowhere": body(b"", status="302 Found"),
    "a redirect to an odd place": raw(b"HTTP/1.1 302 Found\r\nLocation: \xff\xfe://\r\nContent-Length: 0\r\n\r\n"),
}
SLOW = {
    "/drip": [HEAD + b"Content-Length: 1000\r\n\r\n", b"x"],
    "/head": [HEAD[:5], HEAD[5:9]],
    "/silence": [b"", b""],
}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
def test_security_04_too_many_bytes_are_cut_off(open_door, flood):
    with serve({"/a.png": flood}) as web:
        assert open_door.refuses(image(web.url("/a.png")), code="media_too_large").startswith("The media has more than")


@pytest.mark.parametrize("kind", [image, video])
def test_security_04_inline_and_local_media_have_the_same_caps(open_door, folder, kind):
    (folder / "large.bin").write_bytes(bytes(300_001))
    for url in (data_url(bytes(300_001)), "large.bin"):
        open_door.refuses(kind(url), code="media_too_large")


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_security_05_a_server_that_lies_is_told_in_fixed_words(open_door, lie):
    with serve({"/a.png": lie}) as web:
        message = open_door.refuses(image(web.url("/a.png")))
    assert message in {
        "The media could not be fetched whole and in time; check the URL, or send a data: URL.",
        "The host of this URL did not answer with the media; check the URL.",
        "The host of this URL compresses what it sends; send a data: URL.",
        "The URL is not a plain http: or https: URL; write it without tricks.",
    }


def test_security_04_what_is_slow_ends_by_the_clock_and_holds_up_nobody(open_door):
    """The engine's clock is skipped to just before the end of the time, where something comes once more."""
    begun, over = threading.Semaphore(0), threading.Event()

    def answer(first, then):
        def send(stream):
            stream.sendall(first)
            begun.release()
            more.wait(HANG)
            stream.sendall(then)
            begun.release()
            over.wait(HANG)

        return send

    def all_have_sent():
        assert all(begun.acquire(timeout=HANG) for _ in SLOW)

    more = threading.Event()
    answers = {path: answer(*pieces) for path, pieces in SLOW.items()}
    with serve(answers) as web, ThreadPoolExecutor(len(SLOW)) as pool:
        slow = [pool.submit(open_door.refuses, image(web.url(path)), code="media_unreachable") for path in SLOW]
        all_have_sent()
        assert open_door.ask(WORDS).status_code == 200
        assert not any(future.done() for future in slow)
        open_door.skip(SILENCE_SECONDS - 1)
        more.set()
        all_have_sent()
        open_door.skip(LIMITS["image_fetch_timeout"] - SILENCE_SECONDS + 2)
        assert len({future.result(timeout=HANG) for future in slow}) == 1
        over.set()


class Gauge:
    """Counts answers that are under way; one is over before its last bytes go out: their reader may ask anew."""

    def __init__(self):
        self.most = self._now = 0
        self._lock = threading.Lock()

    def answer(self, stream):
        stream.sendall(HEAD + b"\r\n")
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        threading.Event().wait(0.1)  # others begin meanwhile, if they may
        with self._lock:
            self._now -= 1
        stream.sendall(PICTURE)


def test_security_04_no_more_is_fetched_at_once_than_allowed(open_door):
    gauge = Gauge()
    with serve({f"/{index}": gauge.answer for index in range(16)}) as web, ThreadPoolExecutor(2) as pool:
        halves = [[image(web.url(f"/{index}")) for index in some] for some in (range(8), range(8, 16))]
        assert [answer.status_code for answer in pool.map(lambda parts: open_door.ask(*parts), halves)] == [200, 200]
    assert len(web.requests) == 16
    assert gauge.most <= 4


WRONG = {
    "too many pictures": ([GOOD] * 8, {}, "messages[0].content[8]"),
    "a part of an unknown type": ([{"type": "smell"}], {}, "messages[0].content[1].type"),
    "a forbidden source": ([image("/etc/passwd")], {}, "messages[0].content[1]"),
    "an option beyond the server's": ([], {"temperature": 3}, "temperature"),
    "a field that cannot be honoured": ([], {"functions": [{"name": "f"}]}, "functions"),
    "a token beyond the vocabulary": ([], {"logit_bias": {"99999999": 1}}, "logit_bias"),
}


@pytest.mark.parametrize(("parts", "fields", "param"), WRONG.values(), ids=WRONG)
def test_security_04_a_request_that_is_wrong_fetches_nothing(open_door, parts, fields, param):
    with serve({"/a.png": body(PICTURE)}) as web:
        open_door.refuses(image(web.url("/a.png")), *parts, param=param, **fields)
        threading.Event().wait(0.05)
    assert not web.requests


# Line 5: what cannot be had is named by its part


def test_security_05_the_part_to_blame_is_named_and_nothing_else_is_told(open_door):
    with serve({"/text": body(b"secret: not a picture")}) as web:
        gone = web.url("/gone")
        bad = {image(web.url("/text"))["image_url"]["url"]: "media_undecodable", gone: "media_unreachable"}
        for url, code in bad.items():
            history = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
            message = {"role": "user", "content": [WORDS, GOOD, image(url)]}
            open_door.refuses(param="messages[2].content[2]", code=code, messages=[*history, message])
            frames = [image_url(), url]
            open_door.refuses(video(frames), param=f"{PART}.video_url.url[1]", code=code)
    with serve({}) as web:
        closed = web.url("/a.png")
    open_door.refuses(image(closed), code="media_unreachable")  # nobody listens there any more
