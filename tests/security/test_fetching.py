"""Rules 1 to 5, and 39: fetching. SNI is tested in tests/core/test_media_fetch.py."""

from __future__ import annotations

import asyncio
import gzip
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from dashinfer_vlm_core import VLM
from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.errors import MediaError, MediaRefused
from dashinfer_vlm_core.media import READERS
from dashinfer_vlm_core.media.fetch import SILENCE_SECONDS, Fetcher
from dashinfer_vlm_core.media.url_policy import RESOLVER_THREADS, SystemResolver, check_url
from dashinfer_vlm_core.protocol import MediaPart
from dashinfer_vlm_core.protocol.client import Client, current_client
from tests.decoding_loader import DecodingLoader
from tests.samples import data_url, encode, image_url, noise
from tests.security.conftest import GOOD, LIMITS, image, image_data, text, video
from tests.waiting import HANG, until
from tests.web import LoopbackTransport, body, fake_resolver, raw, redirect, serve

PART = "messages[0].content[0]"
IMAGE = encode(noise(20, 30))
WORDS = text("What is this?")
LOCAL_FILES_MESSAGE = (
    "Local files are not allowed here. Send a data:, http: or https: URL, or start the engine with"
    " --allowed-local-media-path (in Python, `allowed_local_media_path`), the folder of the files."
)

# Rule 1: one connector for every interface


class AuditLog:
    """Records connections and opened files of this process through Python's audit events."""

    def __init__(self):
        self.on = False
        self.connections, self.files = [], []
        sys.addaudithook(self._note)  # it cannot be removed, only disabled

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


def test_security_01_only_the_connector_opens_connections(open_server, folder):
    with serve({"/a.png": body(IMAGE)}) as web:
        parts = [image(web.url("/a.png")), image("picture.png"), GOOD, video([web.url("/a.png"), "picture.png"]), WORDS]
        request = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}
        with AuditLog() as audit:
            open_server.engine.chat(request)
    assert audit.connections == [("127.0.0.1", web.port)]
    files = [name for name in audit.files if not name.startswith(sys.prefix)]
    assert files == [str(folder), "picture.png"]  # the second in the first


@pytest.mark.parametrize(
    "interface", ["chat", "achat", "stream", "astream", "VLM.chat", "VLM.generate", "server", "server's stream"]
)
def test_security_01_every_interface_rejects_alike(default_server, interface):
    engine, part = default_server.engine, image("http://127.0.0.1/a.png")
    request = {"messages": [{"role": "user", "content": [part]}]}
    offline = VLM(engine=engine)

    async def exhaust():
        return [chunk async for chunk in engine.astream(request)]

    calls = {
        "chat": lambda: engine.chat(request),
        "achat": lambda: asyncio.run(engine.achat(request)),
        "stream": lambda: list(engine.stream(request)),
        "astream": lambda: asyncio.run(exhaust()),
        "VLM.chat": lambda: offline.chat(request["messages"], use_tqdm=False),
        "VLM.generate": lambda: offline.generate(
            {"prompt": "<|image_pad|>", "multi_modal_data": {"image": "http://127.0.0.1/a.png"}}, use_tqdm=False
        ),
    }
    if interface in calls:
        with pytest.raises(MediaRefused) as caught:
            calls[interface]()
        message = caught.value.message
    else:
        message = default_server.rejection(part, stream=interface != "server")
    assert message == (
        "The URL resolves to an address that the engine may not fetch from, because it is not public. Use a public URL,"
        " or send the media as a data: URL. Only the operator can allow private addresses: --allow-private-addresses."
    )


# Rule 2: files


def test_security_02_files_are_rejected_by_default(default_server, folder):
    path = folder / "picture.png"
    messages = {
        default_server.rejection(image(url), code="media_refused")
        for url in (path.as_uri(), str(path), "picture.png", "~/picture.png", "file:///etc/passwd")
    }
    assert messages == {LOCAL_FILES_MESSAGE}


def test_security_02_files_in_the_allowed_folder_are_read(open_server, folder):
    expected = open_server.fingerprint(image_data(IMAGE))
    for url in ("picture.png", str(folder / "picture.png"), (folder / "picture.png").as_uri(), "inside.png"):
        assert open_server.fingerprint(image(url)) == expected


def test_security_05_missing_file_is_not_named(open_server, folder):
    messages = {open_server.rejection(image(url), code="media_unreachable") for url in ("missing.png", str(folder))}
    assert messages == {"The file does not exist or cannot be read. Check its name."}


def test_security_02_path_traversal_is_rejected_alike(open_server, folder):
    outside = folder.parent
    messages = {
        open_server.rejection(image(url), code="media_refused")
        for url in (
            "../secret.png",
            "../nothing.png",
            "outside.png",  # a link
            "../allowed-but-not/secret.png",  # has the allowed folder as a prefix
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
    assert messages == {LOCAL_FILES_MESSAGE}


# Rule 3: addresses, names and redirects

PRIVATE_URLS = [
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


def test_security_03_no_spelling_of_a_private_address_connects(default_server):
    with serve({"/a.png": body(IMAGE)}) as web:
        for url in PRIVATE_URLS:
            default_server.rejection(image(url.format(port=web.port)), code="media_refused")
            default_server.rejection(video([url.format(port=web.port)]), param=f"{PART}.video_url.url[0]")
    assert not web.requests


def fetch(url, config, **table):
    """Fetch with a resolver that knows `table`; every connection is redirected to this machine."""
    looked_up = []
    resolve = fake_resolver(table)

    async def run():
        async def recording_resolve(host, port):
            looked_up.append(host)
            return await resolve(host, port)

        transport = LoopbackTransport()
        fetcher = Fetcher(config, resolve=recording_resolve, transport=transport)
        try:
            data = await fetcher.get(check_url(url, path=PART, config=config), kind="image", path=PART)
        except MediaError as error:
            data = error
        finally:
            await fetcher.close()
        return data, transport.addresses, looked_up

    return asyncio.run(run())


PUBLIC = "93.184.216.34"


def test_security_03_dns_rebinding_connects_to_the_checked_address():
    with serve({"/a.png": body(IMAGE)}) as web:
        url = web.url("/a.png", host="changes.example")
        data, connected, looked_up = fetch(url, EngineConfig(), **{"changes.example": [[PUBLIC], ["127.0.0.1"]]})
    assert (data, connected, looked_up) == (IMAGE, [PUBLIC], ["changes.example"])
    assert f"Host: changes.example:{web.port}" in web.requests[0]


def test_security_03_host_private_on_the_next_hop_is_rejected():
    with serve({"/a.png": redirect("/b.png"), "/b.png": body(IMAGE)}) as web:
        url = web.url("/a.png", host="changes.example")
        data, connected, looked_up = fetch(url, EngineConfig(), **{"changes.example": [[PUBLIC], ["127.0.0.1"]]})
    assert isinstance(data, MediaRefused)
    assert (connected, looked_up) == ([PUBLIC], ["changes.example"] * 2)
    assert len(web.requests) == 1


def test_security_03_any_private_address_rejects_the_host():
    data, connected, _ = fetch("http://two.example/", EngineConfig(), **{"two.example": [PUBLIC, "10.0.0.1"]})
    assert isinstance(data, MediaRefused)
    assert not connected


def test_security_03_loader_uses_only_its_resolver():
    async def run(table):
        loader = DecodingLoader(EngineConfig(), READERS, resolve=fake_resolver(table))
        part = MediaPart(kind="image", path=PART, url="http://pictures.example/a.png")
        try:
            await loader.load([part], lambda media: media)
        finally:
            await loader.close()

    for address in ("127.0.0.1", "::ffff:10.0.0.1", "169.254.169.254"):
        with pytest.raises(MediaRefused):
            asyncio.run(run({"pictures.example": [address]}))


def test_security_03_at_most_three_redirects(open_server):
    responses = {f"/{left}": redirect(f"/{left - 1}") for left in range(1, 5)} | {"/0": body(IMAGE)}
    with serve(responses) as web:
        assert open_server.fingerprint(image(web.url("/3"))) == open_server.fingerprint(image_data(IMAGE))
        open_server.rejection(image(web.url("/4")), code="media_refused")
        web.responses["/loop"] = redirect("/loop")
        open_server.rejection(image(web.url("/loop")), code="media_refused")


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
def test_security_03_every_redirect_is_checked(open_server, location):
    with serve({"/a.png": redirect(location)}) as web:
        open_server.rejection(image(web.url("/a.png")), code="media_refused")


def test_security_03_allowed_domains_match_whole_names():
    config = EngineConfig(allowed_media_domains=("good.example",))
    table = {name: [PUBLIC] for name in ("good.example", "evilgood.example", "good.example.evil", "a.good.example")}
    with serve({"/a.png": body(IMAGE)}) as web:
        web.responses["/away"] = redirect(web.url("/a.png", host="evilgood.example"))
        assert fetch(web.url("/a.png", host="good.example"), config, **table)[0] == IMAGE
        assert isinstance(fetch(web.url("/away", host="good.example"), config, **table)[0], MediaRefused)
        for name in ("evilgood.example", "good.example.evil", "a.good.example"):
            with pytest.raises(MediaRefused):
                check_url(web.url("/a.png", host=name), path=PART, config=config)


def test_security_03_no_proxy_netrc_or_cookie_is_used(monkeypatch, tmp_path):
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret")
    cookie = body(b"", "Set-Cookie: a=b; Path=/", "Location: /b.png", status="302 Found")
    with serve({"/a.png": cookie, "/b.png": body(IMAGE)}) as web, serve({}) as proxy:
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
        loader = DecodingLoader(EngineConfig(allow_private_addresses=True), READERS)
        try:
            return await loader.load(parts, lambda media: media)
        finally:
            await loader.close()

    return asyncio.run(run())


# Rule 4: limits


def endless(head, piece):
    def response(stream):
        stream.sendall(head)
        while True:  # until the client disconnects
            stream.sendall(piece)

    return response


HEAD = b"HTTP/1.1 200 OK\r\n"
FLOODS = {
    "an endless body": endless(HEAD + b"\r\n", b"x" * 65536),
    "endless chunks": endless(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"10000\r\n" + b"x" * 65536 + b"\r\n"),
    "a body that is larger than allowed": body(b"x" * 100_001),
    "a declared length over the limit": raw(HEAD + b"Content-Length: 100001\r\n\r\n"),
    "a declared length of twenty digits": raw(HEAD + b"Content-Length: 99999999999999999999\r\n\r\n"),
}
MALFORMED = {
    "fewer bytes than declared": raw(HEAD + b"Content-Length: 5000\r\n\r\n" + IMAGE),
    "a length of five thousand digits": raw(HEAD + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n"),
    "a negative length": raw(HEAD + b"Content-Length: -1\r\n\r\n" + IMAGE),
    "a length in words": raw(HEAD + b"Content-Length: many\r\n\r\n" + IMAGE),
    "two lengths": raw(HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n" + IMAGE),
    "broken chunks": raw(HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"),
    "a compressed bomb": body(gzip.compress(bytes(50_000_000)), "Content-Encoding: gzip"),
    "another encoding": body(IMAGE, "Content-Encoding: br, secret"),
    "an endless head": endless(HEAD, b"X-Secret: " + b"y" * 1000 + b"\r\n"),
    "not HTTP": raw(b"SSH-2.0-secret\r\n"),
    "nothing": raw(b""),
    "an error with text": body(b"secret of /etc/passwd", status="500 secret"),
    "a redirect to nowhere": body(b"", status="302 Found"),
    "a redirect to an invalid URL": raw(b"HTTP/1.1 302 Found\r\nLocation: \xff\xfe://\r\nContent-Length: 0\r\n\r\n"),
}
SLOW = {
    "/drip": [HEAD + b"Content-Length: 1000\r\n\r\n", b"x"],
    "/head": [HEAD[:5], HEAD[5:9]],
    "/silence": [b"", b""],
}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
def test_security_04_download_over_the_limit_is_aborted(open_server, flood):
    with serve({"/a.png": flood}) as web:
        assert open_server.rejection(image(web.url("/a.png")), code="media_too_large").startswith("The media exceeds")


@pytest.mark.parametrize("kind", [image, video])
def test_security_04_inline_and_local_media_have_the_same_limits(open_server, folder, kind):
    (folder / "large.bin").write_bytes(bytes(300_001))
    for url in (data_url(bytes(300_001)), "large.bin"):
        open_server.rejection(kind(url), code="media_too_large")


@pytest.mark.parametrize("malformed", MALFORMED.values(), ids=MALFORMED)
def test_security_05_malformed_response_gets_a_fixed_message(open_server, malformed):
    with serve({"/a.png": malformed}) as web:
        message = open_server.rejection(image(web.url("/a.png")))
    assert message in {
        "The media could not be fetched: the connection failed, or took too long. Check the URL, or send a data: URL.",
        "The host of this URL did not return the media. Check the URL.",
        "The host of this URL sends compressed content. Send a data: URL.",
        (
            "The URL is not a plain http: or https: URL. Remove user names, spaces, backslashes and unusual host"
            " notations."
        ),
    }


def test_security_04_slow_fetch_times_out_without_blocking(open_server):
    """The engine's clock is advanced to just before the timeout, when the servers send more data."""
    begun, over = threading.Semaphore(0), threading.Event()

    def response(first, then):
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
    responses = {path: response(*pieces) for path, pieces in SLOW.items()}
    with serve(responses) as web, ThreadPoolExecutor(len(SLOW)) as pool:
        slow = [pool.submit(open_server.rejection, image(web.url(path)), code="media_unreachable") for path in SLOW]
        all_have_sent()
        assert open_server.chat(WORDS).status_code == 200
        assert not any(future.done() for future in slow)
        open_server.skip(SILENCE_SECONDS - 1)
        more.set()
        all_have_sent()
        open_server.skip(LIMITS["image_fetch_timeout"] - SILENCE_SECONDS + 2)
        assert len({future.result(timeout=HANG) for future in slow}) == 1
        over.set()


class ConcurrencyGauge:
    """Counts concurrent responses. One is counted as ended before its last bytes are sent."""

    def __init__(self):
        self.max = self._now = 0
        self._lock = threading.Lock()

    def response(self, stream):
        stream.sendall(HEAD + b"\r\n")
        with self._lock:
            self._now += 1
            self.max = max(self.max, self._now)
        threading.Event().wait(0.1)  # time for other fetches to start
        with self._lock:
            self._now -= 1
        stream.sendall(IMAGE)


@pytest.mark.slow
def test_security_04_concurrent_fetches_are_limited(open_server):
    gauge = ConcurrencyGauge()
    with serve({f"/{index}": gauge.response for index in range(16)}) as web, ThreadPoolExecutor(2) as pool:
        halves = [[image(web.url(f"/{index}")) for index in some] for some in (range(8), range(8, 16))]
        assert [response.status_code for response in pool.map(lambda parts: open_server.chat(*parts), halves)] == [
            200,
            200,
        ]
    assert len(web.requests) == 16
    assert gauge.max <= 4


INVALID = {
    "too many images": ([GOOD] * 8, {}, "messages[0].content[8]"),
    "a part of an unknown type": ([{"type": "smell"}], {}, "messages[0].content[1].type"),
    "a forbidden source": ([image("/etc/passwd")], {}, "messages[0].content[1]"),
    "a value out of range": ([], {"temperature": 3}, "temperature"),
    "an unsupported field": ([], {"functions": [{"name": "f"}]}, "functions"),
    "a token outside the vocabulary": ([], {"logit_bias": {"99999999": 1}}, "logit_bias"),
}


@pytest.mark.parametrize(("parts", "fields", "param"), INVALID.values(), ids=INVALID)
def test_security_04_invalid_request_fetches_nothing(open_server, parts, fields, param):
    with serve({"/a.png": body(IMAGE)}) as web:
        open_server.rejection(image(web.url("/a.png")), *parts, param=param, **fields)
        threading.Event().wait(0.05)
    assert not web.requests


# Rule 5: errors name the part


def test_security_05_error_names_only_the_part(open_server):
    with serve({"/text": body(b"secret: not an image")}) as web:
        gone = web.url("/gone")
        bad = {image(web.url("/text"))["image_url"]["url"]: "media_undecodable", gone: "media_unreachable"}
        for url, code in bad.items():
            history = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
            message = {"role": "user", "content": [WORDS, GOOD, image(url)]}
            open_server.rejection(param="messages[2].content[2]", code=code, messages=[*history, message])
            frames = [image_url(), url]
            open_server.rejection(video(frames), param=f"{PART}.video_url.url[1]", code=code)
    with serve({}) as web:
        closed = web.url("/a.png")
    open_server.rejection(image(closed), code="media_unreachable")  # the port is closed


# Rule 39: fetches are shared fairly


async def as_client(name, work):
    """Await work as a client does, in a task of its own context."""
    current_client.set(Client(id=name))
    return await work


def test_security_39_slow_urls_of_one_key_leave_a_fetch_to_others():
    config = EngineConfig(allow_private_addresses=True, limits={"max_fetches": 4}, image_fetch_timeout=10 * HANG)
    ended = threading.Event()

    async def run(web):
        fetcher = Fetcher(config)
        slow, fast = (check_url(web.url(path), path=PART, config=config) for path in ("/slow", "/fast"))
        attack = [
            asyncio.create_task(as_client("alice", fetcher.get(slow, kind="image", path=PART))) for _ in range(20)
        ]
        await asyncio.to_thread(until, lambda: len(web.requests) == 4)  # alone, a client has all
        for _ in range(2):
            fetching = asyncio.create_task(as_client("bob", fetcher.get(fast, kind="image", path=PART)))
            assert await asyncio.wait_for(fetching, HANG) == IMAGE
        assert len(web.requests) == 6
        for task in attack:
            task.cancel()
        await asyncio.gather(*attack, return_exceptions=True)
        await fetcher.close()

    with serve({"/slow": raw(then=lambda: ended.wait(HANG)), "/fast": body(IMAGE)}) as web:
        asyncio.run(run(web))
        ended.set()


def test_security_39_slow_names_of_one_key_leave_a_resolver_thread(monkeypatch):
    """Their threads stay occupied after the requests have ended."""
    ended, looked_up = threading.Event(), []

    def look_up(host, port, **options):
        looked_up.append(host)
        if host == "slow.example":
            ended.wait(HANG)
        return [(None, None, None, "", (PUBLIC, port))]

    async def run():
        resolve = SystemResolver()
        for _ in range(2):
            attack = [asyncio.create_task(as_client("alice", resolve("slow.example", 80))) for _ in range(20)]
            await asyncio.to_thread(until, lambda: len(looked_up) == RESOLVER_THREADS)
            for task in attack:
                task.cancel()
            await asyncio.gather(*attack, return_exceptions=True)
        answer = asyncio.create_task(as_client("bob", resolve("fast.example", 80)))
        assert await asyncio.wait_for(answer, HANG) == [PUBLIC]
        await resolve.close()

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    try:
        asyncio.run(run())
    finally:
        ended.set()
    assert looked_up == ["slow.example"] * RESOLVER_THREADS + ["fast.example"]
