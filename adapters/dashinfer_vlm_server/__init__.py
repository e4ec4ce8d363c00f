"""An ASGI server with OpenAI's chat completions API, for any engine.

    app = create_app(engine)  # an ASGI application: run it with uvicorn, or mount it in another one

`dashinfer-vlm serve` creates the engine and runs the application with uvicorn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dashinfer_vlm_core.errors import extra_required

if TYPE_CHECKING:
    from .app import create_app

__all__ = ["create_app"]


def __getattr__(name: str) -> Any:
    """Import `create_app` on first use: the plugin in this package must load, and report, without FastAPI."""
    if name == "create_app":
        with extra_required("The server", extra="server"):
            from .app import create_app

        return create_app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
