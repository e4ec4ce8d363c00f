"""The engine in front of replicas."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict

import pytest

from dashinfer_vlm_core.engine import ChatEngine
from dashinfer_vlm_ray import ray_engine
from dashinfer_vlm_ray.engine_replica import EngineReplica, log_to_serve
from dashinfer_vlm_ray.ray_engine import RayEngine


def test_replicas_serve_every_kind_of_request():
    requests = {name for name in vars(ChatEngine) if name.startswith("a")} - {"add_observer", "aload", "aunload"}
    assert "aembed_tokens" in requests
    assert requests <= vars(RayEngine).keys()
    assert {name[1:] for name in requests} <= vars(EngineReplica).keys()


def test_unexpected_error_does_not_end_the_reports(monkeypatch, caplog):
    errors = [KeyError("frame"), TypeError("frame"), asyncio.CancelledError()]

    class FailingEngine(RayEngine):
        async def refresh(self):
            raise errors.pop(0)

    monkeypatch.setattr(ray_engine, "NOT_READY_SECONDS", 0)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(FailingEngine(None, model="demo").watch())
    assert [record.exc_info[0] for record in caplog.records] == [KeyError, TypeError]


def test_plugins_log_with_the_handlers_of_serve(monkeypatch):
    loggers = defaultdict(lambda: logging.Logger("any"))
    handlers = [logging.NullHandler()]
    loggers["ray.serve"].handlers = handlers
    with monkeypatch.context() as patch:
        patch.setattr(logging, "getLogger", loggers.__getitem__)
        log_to_serve()
    for name in ("core", "ray", "server", "torch", "qwen3_vl", "redis"):
        assert loggers[f"dashinfer_vlm_{name}"].handlers == handlers
