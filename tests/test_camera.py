"""examples/camera asks about folders, videos and streams in bounded memory, and writes a page."""

from __future__ import annotations

import html
import re
import runpy
import socket
import sys
import threading
from types import SimpleNamespace

import pytest

from dashinfer_vlm_core import Engine, EngineConfig
from tests.pages import ROOT
from tests.samples import encode, encode_video, noise
from tests.waiting import HANG

PROGRAM = ROOT / "examples/camera/camera.py"
CAMERA = SimpleNamespace(**runpy.run_path(str(PROGRAM)))
FIGURES = re.compile(r"(\d+) requests, [\d.]+ per second, (\d+)% of the pairs of frames and (\d+)% of the tokens")


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Run the program in an empty folder, without waiting; return what it prints, and its page."""

    def run(*arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["camera.py", *map(str, arguments)])
        runpy.run_path(str(PROGRAM), run_name="__main__")
        return capsys.readouterr().out.splitlines(), (tmp_path / "camera.html").read_text("utf-8")

    return run


def frames_of(seconds):
    return [url for second in seconds for url in second]


def test_folder_is_read_in_pairs(tmp_path, run):
    for number in range(5):
        (tmp_path / f"{number}.png").write_bytes(encode(noise(56, 56, number)))
    (tmp_path / "notes.txt").write_text("Not a frame.")
    question = "What is <this>?"
    printed, page = run(tmp_path, "--question", question)
    assert [line.partition(":")[0] for line in printed[:2]] == ["1 s", "2 s"]
    assert FIGURES.match(printed[2])[1] == "2"
    assert page.count("<time>") == 2
    assert f"<h1>{html.escape(question)}</h1>" in page
    assert 'src="data:image/jpeg;base64,' in page


def test_video_has_two_frames_per_second(tmp_path):
    file = tmp_path / "video.mp4"
    file.write_bytes(encode_video(25, fps=10))
    assert len(list(CAMERA.video_frames(str(file)))) == 5
    file.write_bytes(b"Not a video.")
    with pytest.raises(OSError, match="cannot be read as a video"):
        next(CAMERA.video_frames(str(file)))


def test_stream_is_opened_by_its_address():
    data = encode_video(40, fps=4, container="mpegts", codec="mpeg2video")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def send():
            connection, _ = listener.accept()
            with connection:
                connection.sendall(data)

        sender = threading.Thread(target=send)
        sender.start()
        frames = list(CAMERA.video_frames(f"tcp://127.0.0.1:{listener.getsockname()[1]}"))
        sender.join()
    assert len(frames) == 20


@pytest.mark.parametrize("fails", [False, True])
def test_seconds_that_the_model_has_no_time_for_are_skipped(fails):
    ended = threading.Event()

    def stream():
        yield from range(10)
        ended.set()
        if fails:
            raise OSError("The camera is lost.")

    reader = CAMERA.LiveReader(stream(), 3)
    assert ended.wait(HANG)
    received = iter(reader)
    assert next(received) == [7, 8, 9]
    with pytest.raises(OSError, match="lost") if fails else pytest.raises(StopIteration):
        next(received)


def test_simulation_has_flat_memory_and_hits(run):
    printed, page = run("--simulate", 0.005, "--seconds", 4)
    figures = [tuple(map(int, FIGURES.match(line).groups())) for line in printed[:-1]]
    assert [requests for requests, *_ in figures] == list(range(2, 19, 2))
    assert all(70 <= pairs <= 75 for _, pairs, _ in figures[-3:])
    memory = [int(line.rpartition(", ")[2].removesuffix(" MiB")) for line in printed[:-1]]
    assert memory[-1] - memory[4] < 48
    assert page.count("<time>") == 18


def test_window_drops_the_oldest_frames():
    sent = []

    class RecordingEngine(Engine):
        def chat(self, request):
            (video, _) = request["messages"][0]["content"]
            sent.append(video["video_url"]["url"])
            return super().chat(request)

    with RecordingEngine(EngineConfig()) as engine:
        window = CAMERA.Window(engine, "Which way does the circle move?", 2)
        seconds = list(CAMERA.seconds_of(CAMERA.simulated_frames(4)))
        for second in seconds:
            window.ask([second])
    assert sent == [frames_of(seconds[max(0, end - 2) : end]) for end in (1, 2, 3, 4)]


def test_simulation_needs_no_source(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["camera.py", "missing", "--simulate", "24"])
    assert CAMERA.parse_arguments().simulate == 24
