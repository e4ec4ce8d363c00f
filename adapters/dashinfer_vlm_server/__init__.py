"""The ASGI server: OpenAI's chat completions over HTTP, in front of any engine.

    app = create_app(engine)  # an ASGI application: run it with uvicorn, or mount it in another one

`dashinfer-vlm serve` does both and owns the engine.
"""

from __future__ import annotations

from .app import create_app

__all__ = ["create_app"]
