"""http and https sources, against servers that lie, stall, flood, redirect or change their address."""

from __future__ import annotations

import asyncio
import gzip
import socket
import ssl
import threading
from pathlib import Path

import httpx
import pytest

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.errors import MediaError, MediaRefused, MediaTooLarge, MediaUnreachable, QueueFull
from dashinfer_vlm_core.media.fetch import ByteBudget, Fetcher, FetchStats, direct_transport
from dashinfer_vlm_core.media.url_policy import RESOLVER_THREADS, check_url, is_public
from tests.cases import cases
from tests.clock import run as run_with_clock
from tests.clock import skippable_loop
from tests.waiting import HANG, until
from tests.web import LoopbackTransport, body, fake_resolver, raw, redirect, serve

PART = "messages[0].content[1]"
PICTURE = b"not really a picture, but whole"
PUBLIC = "93.184.216.34"
CERTIFICATE = Path(__file__).parent.parent / "pictures_test.pem"

HERE = EngineConfig(allow_private_addresses=True, image_max_bytes=1000, image_fetch_timeout=2 * HANG)
WORLD = EngineConfig(image_max_bytes=1000, image_fetch_timeout=2 * HANG)


async def no_hosts(host, port):
    raise AssertionError(f"{host} should not have been looked up")


def fetch(url, config=HERE, *, resolve=no_hosts, transport=None, kind="image"):
    async def run():
        fetcher = Fetcher(config, resolve=resolve, transport=transport)
        try:
            return await fetcher.get(check_url(url, path=PART, config=config), kind=kind, path=PART)
        finally:
            await fetcher.close()

    return asyncio.run(run())


async def skipping(work, seconds, *, once):
    """Return the result of `work`; its clock skips `seconds` once a server thread sets the event `once`."""
    working = asyncio.ensure_future(work)
    assert await asyncio.to_thread(once.wait, HANG)
    await skippable_loop().askip(seconds)
    return await asyncio.wait_for(working, HANG)


def fetch_and_skip(url, config, seconds, *, once, resolve=no_hosts, kind="image"):
    """Like `fetch`, with a clock that skips `seconds`."""

    async def main():
        fetcher = Fetcher(config, resolve=resolve)
        try:
            checked = check_url(url, path=PART, config=config)
            return await skipping(fetcher.get(checked, kind=kind, path=PART), seconds, once=once)
        finally:
            await fetcher.close()

    return run_with_clock(main())


def test_body_is_complete():
    with serve({"/a.png?size=2": body(PICTURE)}) as web:
        assert fetch(web.url("/a.png?size=2#part")) == PICTURE


def test_chunked_body_is_complete():
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    with serve({"/": raw(chunked)}) as web:
        assert fetch(web.url("/")) == b"abcde"


def test_request_has_user_agent_and_no_other_headers(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("all_proxy", "http://127.0.0.1:9")
    answer = body(PICTURE, "Set-Cookie: tracking=1")
    with serve({"/again": redirect("/"), "/": answer}) as web:
        fetch(web.url("/again"))
    for head in web.requests:
        fields = {line.partition(":")[0].lower() for line in head.split("\r\n")[1:] if line}
        assert fields == {"host", "user-agent", "accept", "accept-encoding"}


@cases(
    "url",
    [
        "http://good.example@127.0.0.1/",
        "http://good.example:secret@127.0.0.1/",
        "http://good.example@evil.example/",
        "http://user:secret@good.example/",
        "http://127.0.0.1\\@good.example/",
        "http:\\\\127.0.0.1\\",
        "http://good.example\t.evil.example/",
        "http://good.example/\r\nHost: evil.example",
        "http://good.example /",
        "http://good.example\u00a0/",
        "http://good.example\x00.evil.example/",
        "http://2130706433/",
        "http://0x7f000001/",
        "http://0x7f.0.0.1/",
        "http://0177.0.0.1/",
        "http://127.1/",
        "http://1.2.3.4.5/",
        "http://%31%32%37.0.0.1/",
        "http://127。0。0。1/",
        "http://\uff11\uff12\uff17.0.0.1/",
        "http://good.example./",
        "http://localhost./",
        "http://good..example/",
        "http://.good.example/",
        "http://[::1%25lo]/",
        "http://[::1",
        "http://good.example:99999/",
        "http://good.example:0/",
        "http:///etc/passwd",
        "http:good.example",
        "http://",
        "https://",
        "http://" + "a" * 70000,
    ],
)
def test_ambiguous_url_is_rejected(url):
    with pytest.raises(MediaRefused) as caught:
        check_url(url, path=PART, config=WORLD)
    assert caught.value.param == PART


@cases(
    "url",
    [
        "http://good.example/a.png",
        "HTTPS://Good.Example:8443/a%20b.png?x=1&y=http://127.0.0.1/",
        "https://bücher.example/ä.png",
        "https://xn--bcher-kva.example/a.png",
        "http://93.184.216.34/a.png",
        "http://[2606:2800:220:1:248:1893:25c8:1946]/a.png",
        "http://3com.example/",
        "http://a_b.good.example/",
    ],
)
def test_ordinary_url_is_accepted(url):
    assert check_url(url, path=PART, config=WORLD).scheme in ("http", "https")


@cases(
    "address",
    [
        "127.0.0.1",
        "127.255.255.254",
        "0.0.0.0",
        "10.0.0.1",
        "172.16.0.1",
        "192.168.1.1",
        "100.64.0.1",
        "169.254.169.254",
        "192.0.0.1",
        "192.0.0.192",
        "168.63.129.16",
        "192.0.2.1",
        "192.88.99.1",
        "198.18.0.1",
        "198.51.100.1",
        "203.0.113.1",
        "224.0.0.1",
        "224.0.1.1",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::127.0.0.1",
        "::ffff:127.0.0.1",
        "::ffff:93.184.216.34",
        "64:ff9b::7f00:1",
        "64:ff9b::a9fe:a9fe",
        "64:ff9b:1::5db8:d822",
        "100::1",
        "2001::1",
        "2001:db8::1",
        "2002:7f00:1::",
        "2002:5db8:d822::",
        "fc00::1",
        "fd00:ec2::254",
        "fe80::1",
        "fe80::1%lo",
        "fec0::1",
        "ff02::1",
        "ff0e::1",
    ],
)
def test_private_address_is_rejected_as_literal_and_resolved(address):
    assert not is_public(address)
    literal = f"[{address}]" if ":" in address else address
    with pytest.raises(MediaRefused):
        check_url(f"http://{literal}/", path=PART, config=WORLD)
    with pytest.raises(MediaRefused) as caught:
        fetch("http://good.example/", WORLD, resolve=fake_resolver({"good.example": [address]}))
    assert address not in caught.value.message


@pytest.mark.parametrize("address", [PUBLIC, "8.8.8.8", "2606:2800:220:1:248:1893:25c8:1946", "64:ff9b::5db8:d822"])
def test_public_address_is_accepted(address):
    assert is_public(address)


def test_host_with_one_private_address_is_rejected():
    transport = LoopbackTransport()
    resolve = fake_resolver({"good.example": [PUBLIC, "10.0.0.1"]})
    with pytest.raises(MediaRefused):
        fetch("http://good.example/", WORLD, resolve=resolve, transport=transport)
    assert transport.addresses == []


def test_connection_uses_the_checked_address():
    transport = LoopbackTransport()
    changing = fake_resolver({"good.example": [[PUBLIC], ["127.0.0.1"]]})
    with serve({"/": body(PICTURE)}) as web:
        assert fetch(web.url("/", "good.example"), WORLD, resolve=changing, transport=transport) == PICTURE
    assert transport.addresses == [PUBLIC]
    assert f"host: good.example:{web.port}" in web.requests[0].lower()


def test_host_that_becomes_private_on_redirect_is_rejected():
    transport = LoopbackTransport()
    changing = fake_resolver({"good.example": [[PUBLIC], ["127.0.0.1"]]})
    with serve({"/": redirect("/secret"), "/secret": body(PICTURE)}) as web, pytest.raises(MediaRefused):
        fetch(web.url("/", "good.example"), WORLD, resolve=changing, transport=transport)
    assert len(web.requests) == 1


@cases(
    "location",
    [
        "http://127.0.0.1/",
        "http://169.254.169.254/latest/meta-data/",
        "http://[::1]/",
        "//10.0.0.1/",
        "http://inside.example/",
        "http://good.example@127.0.0.1/",
        "http://2130706433/",
        "/\\127.0.0.1/",
        "file:///etc/passwd",
        "ftp://good.example/",
        "gopher://127.0.0.1/",
    ],
)
def test_each_redirect_is_checked(location):
    resolve = fake_resolver({"good.example": [PUBLIC], "inside.example": ["192.168.0.7"]})
    transport = LoopbackTransport()
    with serve({"/": redirect(location)}) as web, pytest.raises(MediaRefused) as caught:
        fetch(web.url("/", "good.example"), WORLD, resolve=resolve, transport=transport)
    assert caught.value.param == PART
    assert transport.addresses == [PUBLIC]


def test_at_most_three_redirects_are_followed():
    chain = {f"/{i}": redirect(f"/{i + 1}") for i in range(4)} | {"/4": body(PICTURE)}
    with serve(chain) as web:
        assert fetch(web.url("/1")) == PICTURE
        with pytest.raises(MediaRefused, match="redirects too often"):
            fetch(web.url("/0"))


def test_redirect_loop_ends():
    with serve({"/": redirect("/")}) as web, pytest.raises(MediaRefused):
        fetch(web.url("/"))
    assert len(web.requests) == 4


@pytest.mark.parametrize("host", ["good.example", "GOOD.example", "bücher.example", "xn--bcher-kva.example"])
def test_allowed_domain_is_fetched(host):
    config = EngineConfig(allowed_media_domains=("good.example", "Bücher.example"))
    check_url(f"https://{host}/", path=PART, config=config)


@cases("host", ["evil.example", "good.example.evil.example", "notgood.example", "sub.good.example", "example", PUBLIC])
def test_allowed_domain_matches_whole_host_names(host):
    config = EngineConfig(allowed_media_domains=("good.example",))
    with pytest.raises(MediaRefused, match="does not fetch from that host"):
        check_url(f"https://{host}/", path=PART, config=config)


def test_allowed_domain_with_private_address_is_rejected():
    config = EngineConfig(allowed_media_domains=("good.example",))
    with pytest.raises(MediaRefused):
        fetch("http://good.example/", config, resolve=fake_resolver({"good.example": ["127.0.0.1"]}))


def test_redirect_out_of_allowed_domains_is_rejected():
    config = EngineConfig(allowed_media_domains=("good.example",), allow_private_addresses=True)
    resolve = fake_resolver({"good.example": ["127.0.0.1"], "evil.example": ["127.0.0.1"]})
    with serve({}) as web:
        web.responses["/"] = redirect(web.url("/picture", "evil.example"))
        with pytest.raises(MediaRefused, match="does not fetch from that host"):
            fetch(web.url("/", "good.example"), config, resolve=resolve)


def test_remote_media_can_be_disabled():
    with pytest.raises(MediaRefused):
        check_url("https://good.example/", path=PART, config=EngineConfig(allow_remote_media=False))


def test_https_sends_server_name_and_verifies_certificate():
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context(cafile=CERTIFICATE)
    server.load_cert_chain(CERTIFICATE)
    resolve = fake_resolver({"pictures.test": ["127.0.0.1"], "other.test": ["127.0.0.1"]})
    with serve({"/": body(PICTURE)}, tls=server) as web:
        url = web.url("/", "pictures.test", "https")
        assert fetch(url, resolve=resolve, transport=direct_transport(client)) == PICTURE
        with pytest.raises(MediaUnreachable):  # the certificate is for another name
            fetch(web.url("/", "other.test", "https"), resolve=resolve, transport=direct_transport(client))
        with pytest.raises(MediaUnreachable):  # no trusted authority signed it
            fetch(url, resolve=resolve)
    assert web.server_names == ["pictures.test", "other.test", "pictures.test"]
    assert f"host: pictures.test:{web.port}" in web.requests[0].lower()


def test_next_address_is_tried_if_connection_fails():
    resolve = fake_resolver({"good.example": ["127.0.0.2", "127.0.0.1"]})
    with serve({"/": body(PICTURE)}) as web:
        assert fetch(web.url("/", "good.example"), resolve=resolve) == PICTURE


def test_body_size_limit_is_exact():
    with serve({"/limit": body(b"x" * 1000), "/more": body(b"x" * 1001)}) as web:
        assert len(fetch(web.url("/limit"))) == 1000
        with pytest.raises(MediaTooLarge) as caught:
            fetch(web.url("/more"))
    assert caught.value.param == PART


def test_content_length_above_limit_is_rejected_before_body():
    stalled = threading.Event()
    with serve({"/": raw(b"HTTP/1.1 200 OK\r\nContent-Length: 9000000000\r\n\r\n", then=stalled.wait)}) as web:
        with pytest.raises(MediaTooLarge):
            fetch(web.url("/"))
        stalled.set()


def test_endless_body_is_stopped_at_limit():
    sent = []

    def endless(stream):
        stream.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            sent.append(stream.send(b"x" * 65536))

    with serve({"/": endless}) as web, pytest.raises(MediaTooLarge):
        fetch(web.url("/"))
    assert sum(sent) < 50_000_000


def test_endless_chunks_are_stopped_at_limit():
    def endless(stream):
        stream.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            stream.sendall(b"1\r\nx\r\n" * 100)

    with serve({"/": endless}) as web, pytest.raises(MediaTooLarge):
        fetch(web.url("/"))


@cases(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nContent-Length: five\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\nshort",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 1_000_000,
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
        b"",
    ],
)
def test_malformed_or_truncated_response_is_unreachable(answer):
    with serve({"/": raw(answer)}) as web, pytest.raises(MediaUnreachable) as caught:
        fetch(web.url("/"))
    assert caught.value.param == PART


def test_bytes_beyond_content_length_are_ignored():
    with serve({"/": raw(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nshort" + b"x" * 5000)}) as web:
        assert fetch(web.url("/")) == b"short"


@cases("encoding", ["gzip", "deflate", "br", "zstd", "gzip, gzip", "GZIP"])
def test_compressed_body_is_not_decompressed(encoding):
    bomb = gzip.compress(b"\0" * 500_000)
    assert len(bomb) < HERE.image_max_bytes
    with serve({"/": body(bomb, f"Content-Encoding: {encoding}")}) as web, pytest.raises(MediaUnreachable):
        fetch(web.url("/"))


@pytest.mark.parametrize(
    "status", ["404 Not Found", "500 Oops", "204 No Content", "206 Partial Content", "304 Not Modified"]
)
def test_error_status_is_unreachable_and_body_not_shown(status):
    with serve({"/": body(b"internal secret", status=status)}) as web, pytest.raises(MediaUnreachable) as caught:
        fetch(web.url("/"))
    assert "secret" not in caught.value.message
    assert "127.0.0.1" not in caught.value.message


@pytest.fixture
def patient(monkeypatch):
    """Disable the read timeout, so that only the deadline ends a fetch."""
    monkeypatch.setattr("dashinfer_vlm_core.media.fetch.SILENCE_SECONDS", 100 * HANG)


def test_slow_drip_ends_at_total_timeout(patient):
    """One byte every eight seconds: each pause is short, but the total is too long."""
    config = EngineConfig(allow_private_addresses=True, image_fetch_timeout=30)
    more, sent = threading.Semaphore(0), threading.Semaphore(0)

    def drip(stream):
        stream.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n")
        sent.release()
        while more.acquire(timeout=HANG):
            stream.sendall(b"x")
            sent.release()

    async def main(url):
        fetcher = Fetcher(config)
        fetching = asyncio.ensure_future(fetcher.get(check_url(url, path=PART, config=config), kind="image", path=PART))
        assert await asyncio.to_thread(sent.acquire, timeout=HANG)
        for _ in range(3):
            more.release()
            assert await asyncio.to_thread(sent.acquire, timeout=HANG)
            await skippable_loop().askip(8)
        assert not fetching.done()
        await skippable_loop().askip(8)
        with pytest.raises(MediaUnreachable):
            await asyncio.wait_for(fetching, HANG)
        await fetcher.close()

    with serve({"/": drip}) as web:
        run_with_clock(main(web.url("/")))


@pytest.mark.parametrize("prefix", [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"])
def test_silent_server_ends_at_timeout_of_media_kind(patient, prefix):
    config = EngineConfig(allow_private_addresses=True, image_fetch_timeout=600, video_fetch_timeout=5)
    silent, stalled = threading.Event(), threading.Event()
    with serve({"/": raw(prefix, then=lambda: (silent.set(), stalled.wait()))}) as web:
        with pytest.raises(MediaUnreachable):
            fetch_and_skip(web.url("/"), config, 6, once=silent, kind="video")
        stalled.set()


def test_hanging_resolver_ends_at_timeout():
    asked = threading.Event()

    async def hang(host, port):
        asked.set()
        await asyncio.Event().wait()

    config = EngineConfig(allow_private_addresses=True, image_fetch_timeout=5)
    with pytest.raises(MediaUnreachable):
        fetch_and_skip("http://good.example/", config, 6, once=asked, resolve=hang)


def test_slow_lookups_use_separate_threads_and_fetch_timeout(monkeypatch):
    found, threads = threading.Event(), []

    def slow(*arguments, **options):
        threads.append(threading.current_thread().name)
        found.wait(HANG)
        raise OSError

    async def run():
        fetcher = Fetcher(EngineConfig(image_fetch_timeout=2 * HANG, limits={"max_fetches": 40}))
        url = check_url("http://good.example/", path=PART, config=WORLD)
        slow_ones = [asyncio.ensure_future(fetcher.get(url, kind="image", path=PART)) for _ in range(40)]
        # The event loop's own threads are free.
        await asyncio.to_thread(until, lambda: len(threads) == RESOLVER_THREADS)
        await skippable_loop().askip(3 * HANG)
        errors = await asyncio.gather(*slow_ones, return_exceptions=True)
        await asyncio.wait_for(fetcher.close(), HANG)
        return errors

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    try:
        errors = run_with_clock(run())
    finally:
        found.set()
    assert {type(error) for error in errors} == {MediaUnreachable}
    assert len(threads) == RESOLVER_THREADS, "what timed out in the queue is never looked up"
    assert all(name.startswith("dashinfer-vlm-names") for name in threads)


@pytest.mark.parametrize("table", [{}, {"good.example": [[]]}])
def test_host_without_address_is_unreachable(table):
    with pytest.raises(MediaUnreachable) as caught:
        fetch("http://good.example/", resolve=fake_resolver(table))
    assert "no such host" not in caught.value.message


def test_closed_port_is_unreachable():
    with serve({}) as web:
        url = web.url("/")
    with pytest.raises(MediaUnreachable):
        fetch(url)


def test_loopback_from_system_resolver_is_rejected():
    async def run():
        fetcher = Fetcher(WORLD)
        try:
            await fetcher.get(httpx.URL("http://localhost/"), kind="image", path=PART)
        finally:
            await fetcher.close()

    with pytest.raises(MediaRefused):
        asyncio.run(run())


def test_concurrent_fetches_are_limited():
    config = EngineConfig(allow_private_addresses=True, limits={"max_fetches": 2})

    async def run(url):
        fetcher = Fetcher(config)
        checked = check_url(url, path=PART, config=config)
        answers = await asyncio.gather(*(fetcher.get(checked, kind="image", path=PART) for _ in range(6)))
        await fetcher.close()
        return answers

    asked, seen, lock = [], [], threading.Lock()
    in_pairs = threading.Barrier(2, timeout=HANG)

    def answer(stream):
        with lock:
            asked.append(stream)
            seen.append(len(asked))
        in_pairs.wait()  # two are in flight, and a third one would be counted
        with lock:  # before the response: after it, the next request may arrive while this connection closes
            asked.remove(stream)
        body(PICTURE)(stream)

    with serve({"/": answer}) as web:
        assert asyncio.run(run(web.url("/"))) == [PICTURE] * 6
    assert max(seen) == 2


def test_fetch_works_after_every_failure():
    with serve({"/bad": raw(b"nonsense\r\n\r\n"), "/good": body(PICTURE)}) as web:

        async def run():
            fetcher = Fetcher(HERE)
            bad, good = (check_url(web.url(path), path=PART, config=HERE) for path in ("/bad", "/good"))
            with pytest.raises(MediaError):
                await fetcher.get(bad, kind="image", path=PART)
            try:
                return await fetcher.get(good, kind="image", path=PART)
            finally:
                await fetcher.close()

        assert asyncio.run(run()) == PICTURE


def test_timeout_waiting_for_slot_is_retryable():
    """The error must not be that the media cannot be fetched, because no fetch was attempted."""
    config = EngineConfig(
        allow_private_addresses=True, limits={"max_fetches": 1}, image_fetch_timeout=5, video_fetch_timeout=10 * HANG
    )

    async def run(url):
        fetcher = Fetcher(config)
        checked = check_url(url, path=PART, config=config)
        slow = asyncio.ensure_future(fetcher.get(checked, kind="video", path=PART))
        assert await asyncio.to_thread(arrived.wait, HANG)
        with pytest.raises(QueueFull):
            await skipping(fetcher.get(checked, kind="image", path=PART), 6, once=arrived)
        go.set()
        assert await slow == PICTURE
        assert await fetcher.get(checked, kind="image", path=PART) == PICTURE
        await fetcher.close()
        return fetcher.stats

    arrived, go = threading.Event(), threading.Event()

    def slowly(stream):
        arrived.set()
        go.wait(HANG)
        body(PICTURE)(stream)

    with serve({"/": slowly}) as web:
        stats = run_with_clock(run(web.url("/")))
    assert stats == FetchStats(fetched=2, failed=0, bytes=2 * len(PICTURE))


@pytest.mark.parametrize(("space", "refused"), [(2 * len(PICTURE), False), (2 * len(PICTURE) - 1, True)])
def test_media_of_one_request_share_a_limit(space, refused):
    config = EngineConfig(allow_private_addresses=True, limits={"max_fetched_bytes": space})

    async def run(web):
        fetcher, budget = Fetcher(config), ByteBudget(config.limits.max_fetched_bytes)
        urls = [check_url(web.url(path), path=PART, config=config) for path in ("/a", "/b")]
        try:
            return [await fetcher.get(url, kind="image", path=PART, budget=budget) for url in urls]
        finally:
            await fetcher.close()

    with serve({"/a": body(PICTURE), "/b": body(PICTURE)}) as web:
        if refused:
            with pytest.raises(MediaTooLarge, match="in total") as caught:
                asyncio.run(run(web))
            assert caught.value.param == PART
        else:
            assert asyncio.run(run(web)) == [PICTURE, PICTURE]
