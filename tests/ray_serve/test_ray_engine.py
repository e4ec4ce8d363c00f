"""The engine in front of replicas."""

from __future__ import annotations

from dashinfer_vlm_core.engine import ChatEngine
from dashinfer_vlm_ray.engine_replica import EngineReplica
from dashinfer_vlm_ray.ray_engine import RayEngine


def test_replicas_serve_every_kind_of_request():
    requests = {name for name in vars(ChatEngine) if name.startswith("a")} - {"add_observer", "aload", "aunload"}
    assert "aembed_tokens" in requests
    assert requests <= vars(RayEngine).keys()
    assert {name[1:] for name in requests} <= vars(EngineReplica).keys()
