"""`dashinfer-vlm run`."""

from __future__ import annotations

from typing import Any

from dashinfer_vlm_core.config import EngineConfig
from dashinfer_vlm_core.config.folders import expand_user
from dashinfer_vlm_core.models.checkpoint import HUB_ID
from dashinfer_vlm_core.models.files import missing_weights
from dashinfer_vlm_core.models.hub import cached_snapshot
from dashinfer_vlm_core.models.hub_requests import Hub
from dashinfer_vlm_core.plugins import load_plugins

from .chat import ChatCommand, chat
from .engines import log_warnings_only
from .pull import HUB_OPTION, interruptible, pull_model

SERVER_OPTIONS = {"api_base", "api_key"}


def _run(*, config: EngineConfig, hub: Hub, **options: Any) -> None:
    log_warnings_only()
    if hub == "modelscope" or _must_be_downloaded(config):
        with interruptible(config, hub):
            folder = pull_model(config.model_copy(update={"device": "cpu"}), hub)
        if hub == "modelscope":  # by its name, the model would be looked up on the Hugging Face Hub
            config = config.model_copy(update={"model": str(folder), "served_model_name": config.name})
    assert chat.callback
    chat.callback(config=config, **options, **dict.fromkeys(SERVER_OPTIONS))


def _must_be_downloaded(config: EngineConfig) -> bool:
    model = config.model
    if model in load_plugins().models or expand_user(model).exists() or not HUB_ID.fullmatch(model):
        return False
    folder = cached_snapshot(model, revision=config.revision)
    return folder is None or bool(missing_weights(folder))


class RunCommand(ChatCommand):
    """As for `chat`, but a single word is a model, which may have to be downloaded."""

    def is_model(self, text: str) -> bool:
        return len(text.split()) == 1 or super().is_model(text)


run = RunCommand(
    "run",
    callback=_run,
    params=[*(param for param in chat.params if param.name not in SERVER_OPTIONS), HUB_OPTION],
    help="""Download a model if it is not on this machine, and chat with it.

    MODEL is a Hugging Face model ID, a registered name, or a checkpoint folder. A single argument with spaces is
    PROMPT. Everything else is as for `chat`.
    """,
)
