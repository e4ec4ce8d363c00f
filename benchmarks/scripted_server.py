"""A server whose decoder takes no time, so that only the server's own work is measured.

    python -m benchmarks.scripted_server PORT

It has the bundled checkpoint's tokenizer and chat template. A response has as many tokens as the request allows, at
most those of `TEXT`; to a request with `CALL_TOP_P`, it is a tool call.
"""

from __future__ import annotations

import gc
import sys

import uvicorn

from dashinfer_vlm_core.decoders import DecodeRequest
from dashinfer_vlm_core.testing import scripted_engine
from dashinfer_vlm_server import create_app
from dashinfer_vlm_server.serving import uvicorn_config
from dashinfer_vlm_server.settings import Settings
from dashinfer_vlm_server.sockets import Address

CALL_TOP_P = 0.5
TEXT = "A red circle is left of a blue square. " * 200
TEXT_TOKENS = len(TEXT.split())
"""A lower bound: each word has at least one token."""
CALL = '<tool_call>\n{"name": "count", "arguments": {"color": "red"}}\n</tool_call>'


def respond(request: DecodeRequest) -> str:
    """Return the text of a response."""
    return CALL if request.sampling.top_p == CALL_TOP_P else TEXT


def main() -> None:
    with scripted_engine(respond) as engine:
        config = uvicorn_config(create_app(engine, Settings()), Address())
        config.port = int(sys.argv[1])
        gc.freeze()  # as `dashinfer-vlm serve` does: loaded objects are not scanned
        uvicorn.Server(config).run()


if __name__ == "__main__":
    main()
