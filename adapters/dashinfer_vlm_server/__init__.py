"""The ASGI server: OpenAI's chat completions over HTTP, in front of any engine.

    app = create_app(engine)  # an ASGI application: run it with uvicorn, or mount it in another one

`dashinfer-vlm serve` does both and owns the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .app import create_app

__all__ = ["create_app"]


def __getattr__(name: str) -> Any:
    """Import `create_app` on use: the plugin in this package loads without FastAPI, and says how to get it."""
    if name == "create_app":
        from .app import create_app

        return create_app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
