"""Write docs/clients.md from the results of the tests that are marked `client`.

scripts/test --junitxml=results.xml
scripts/test --interop --junitxml=interop.xml
python -m tests.clients.table results.xml interop.xml
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tests.support import FAILED, SKIPPED, SUPPORTED, describe_environment, read_properties

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
PROPERTY = "client"
JAVASCRIPT = Path(__file__).parents[1] / "interop" / "javascript" / "package.json"

CLIENTS = {
    "openai": "[openai](openai.md)",
    "openai-responses": "openai, [Responses API](responses.md)",
    "openai-agents": "OpenAI Agents SDK (Chat Completions)",
    "openai-agents-responses": "OpenAI Agents SDK (Responses API)",
    "litellm": "[LiteLLM](litellm.md), functions",
    "litellm-server": "LiteLLM, functions with a server",
    "litellm-router": "LiteLLM, Router",
    "litellm-proxy": "LiteLLM, proxy",
    "langchain": "[LangChain](langchain.md)",
    "langchain-server": "LangChain with a server",
    "chat-openai": "LangChain's `ChatOpenAI` (Chat Completions)",
    "chat-openai-responses": "LangChain's `ChatOpenAI` (Responses API)",
    "langgraph": "LangChain agent (LangGraph)",
    "llama-index": "LlamaIndex `OpenAILike`",
    "anthropic": "[anthropic](anthropic.md)",
    "chat-anthropic": "LangChain's `ChatAnthropic`",
    "litellm-anthropic": "LiteLLM, `anthropic/`",
    "anthropic-js": "[anthropic](anthropic.md) for JavaScript",
    "ollama": "[ollama](ollama.md)",
    "chat-ollama": "LangChain's `ChatOllama`",
    "llama-index-ollama": "LlamaIndex `Ollama`",
    "litellm-ollama": "LiteLLM, `ollama_chat/`",
    "ollama-js": "[ollama](ollama.md) for JavaScript",
    "openai-js": "openai for JavaScript (Chat Completions)",
    "openai-js-responses": "openai for JavaScript (Responses API)",
    "ai-sdk": "Vercel AI SDK, `@ai-sdk/openai-compatible`",
    "ai-sdk-responses": "Vercel AI SDK, `@ai-sdk/openai` (Responses API)",
    "langchain-js": "LangChain.js `ChatOpenAI` (Chat Completions)",
    "langchain-js-responses": "LangChain.js `ChatOpenAI` (Responses API)",
    "mineru": "MinerU, `mineru-vl-utils`",
    "docling": "Docling, `ApiVlmEngineOptions`",
    "olmocr": "olmOCR, `olmocr`",
    "litellm-ocr": "LiteLLM, [`ocr`](documents.md#convert-to-markdown)",
    "langchain-ocr": "LangChain, `LiteLLMOCRLoader`",
    "vllm-style": "[`VLM`](media.md#offline-inference-with-vlm), like vLLM's `LLM`",
    "curl": "[curl](http.md)",
}
FEATURES = {
    "text": "Text",
    "image": "Image",
    "video": "Video",
    "stream": "Stream",
    "tools": "Tools",
    "structured": "Structured output",
    "usage": "Usage",
    "errors": "Errors",
    "cancel": "Cancel",
}
POOLING_CLIENTS = {
    "openai-embeddings": "[openai](openai.md)",
    "litellm-embeddings": "LiteLLM, functions",
    "litellm-proxy-embeddings": "LiteLLM, proxy",
    "langchain-embeddings": "LangChain",
    "openai-embeddings-langchain": "LangChain's `OpenAIEmbeddings`",
    "llama-index-embeddings": "LlamaIndex `OpenAILikeEmbedding`",
}
POOLING_FEATURES = {
    "embed-text": "Text",
    "embed-image": "Image",
    "rank": "Reranking",
    "pooling-errors": "Errors",
}
PACKAGES = (
    "openai",
    "anthropic",
    "litellm",
    "langchain-core",
    "langchain-openai",
    "langchain-anthropic",
    "ollama",
    "langchain-ollama",
    "llama-index-llms-ollama",
    "langchain",
    "langgraph",
    "openai-agents",
    "llama-index-llms-openai-like",
    "llama-index-embeddings-openai-like",
    "mineru-vl-utils",
    "docling-slim",
    "olmocr",
    "langchain-litellm",
)

_NOT_TEXT = ("embed-image", "rank")
REASONS: Mapping[tuple[str, str], str] = {
    ("vllm-style", "stream"): "`generate` and `chat` return complete outputs, as in vLLM. Use `Engine.stream`.",
    ("llama-index", "video"): "LlamaIndex does not convert its video blocks to a part of a request.",
    ("ai-sdk-responses", "video"): "`@ai-sdk/openai` rejects videos. Use `@ai-sdk/openai-compatible`.",
    ("langchain-js-responses", "video"): "`ChatOpenAI` drops `video_url` parts. Use Chat Completions.",
    **dict.fromkeys(
        (("chat-anthropic", "video"), ("litellm-anthropic", "video")),
        "Anthropic's API has no videos. The `video` block of [this server](anthropic.md) is an addition.",
    ),
    **dict.fromkeys(
        ((name, "video") for name in ("ollama", "chat-ollama", "llama-index-ollama", "litellm-ollama", "ollama-js")),
        "[Ollama's API](ollama.md) has no videos.",
    ),
    **dict.fromkeys(
        (("chat-openai", "video"), ("chat-openai-responses", "video")),
        "`ChatOpenAI` does not convert LangChain's video blocks. Use `ChatDashInferVLM`.",
    ),
    **dict.fromkeys(
        (
            *(("mineru", feature) for feature in ("video", "tools", "structured", "usage")),
            *(("docling", feature) for feature in ("text", "video", "tools", "structured")),
            *(("olmocr", feature) for feature in ("text", "video", "stream", "tools", "cancel")),
            *(("litellm-ocr", feature) for feature in ("text", "video", "stream", "tools", "structured", "cancel")),
            *(("langchain-ocr", name) for name in FEATURES if name not in {"image", "errors"}),
        ),
        "It sends pages as images or PDFs, and reads text.",
    ),
    **dict.fromkeys(
        (
            ("openai-embeddings", "rank"),
            *((name, each) for name in ("openai-embeddings-langchain", "llama-index-embeddings") for each in _NOT_TEXT),
        ),
        "The client has no method for it.",
    ),
}
"""Why a cell has no test."""

INTRODUCTION = """\
# Clients

What works with which client library. "{supported}": tests run the real library with this feature and passed.
"{skipped}": a test exists, but this machine could not run it. A number is a footnote with the reason.
`tests/clients/table.py` writes this page from the results of a test run.

"""

NOTES = """
* **Image, Video**: the decoder receives the same visual tokens as for a direct request.
* **Tools**: the client parses a tool call; agents also run the tool, and send its result. With `VLM`, a call
  is a part of the text.
* **Structured output**: the response follows a schema, which is enforced, and the client returns an object.
* **Usage**: the client reports the engine's token counts, with those of images.
* **Errors**: the client raises an exception for an invalid request, and for a failure in the middle of a stream. With
  curl, the exit status is 22 and the last event of the stream has an `error`. Docling and olmOCR report which page
  failed.
* **Cancel**: closing the stream ends the request in the engine. With LlamaIndex, cancel the task that reads the stream:
  closing the stream leaves its connection open. The JavaScript clients take an `AbortSignal`. `VLM` ends all requests
  on Ctrl-C.

`createOpenAICompatible` of the AI SDK needs `supportsStructuredOutputs: true`, and `includeUsage: true` for the usage
of streams. LiteLLM's `ollama_chat/` needs `extra_headers={{"Content-Type": "application/json"}}`, unless the server has
API keys.

## Embeddings and reranking

Results equal those of `VLM`. `OpenAIEmbeddings` needs `check_embedding_ctx_length=False`: otherwise, it sends token IDs
of another vocabulary.

{pooling}
## Versions

{versions}

{environment}
"""


def mark_property(client: str, feature: str) -> tuple[str, str]:
    """Return the property that a test's mark adds to its result.

    Raises:
        KeyError: the client or feature has no row or column.
    """
    for name, table in ((client, {**CLIENTS, **POOLING_CLIENTS}), (feature, {**FEATURES, **POOLING_FEATURES})):
        if name not in table:
            raise KeyError(f"`client` names {name!r}, which is not one of {', '.join(table)}")
    return PROPERTY, f"{client} {feature} {SUPPORTED}"


def render(outcomes: Mapping[tuple[str, ...], str], versions: str, environment: str) -> str:
    """Render the page: in each table a row for each client, and a column for each feature."""
    footnotes: list[str] = []
    chat, pooling = (
        _table(clients, features, outcomes, footnotes)
        for clients, features in ((CLIENTS, FEATURES), (POOLING_CLIENTS, POOLING_FEATURES))
    )
    numbered = "".join(f"{number}. {text}\n" for number, text in enumerate(footnotes, 1))
    introduction = INTRODUCTION.format(supported=SUPPORTED, skipped=SKIPPED)
    return f"{introduction}{chat}\n{numbered}" + NOTES.format(
        pooling=pooling, versions=versions, environment=environment
    )


def _table(
    clients: Mapping[str, str],
    features: Mapping[str, str],
    outcomes: Mapping[tuple[str, ...], str],
    footnotes: list[str],
) -> str:
    lines = [f"| Client | {' | '.join(features.values())} |\n", f"|---{'|---' * len(features)}|\n"]
    for client, title in clients.items():
        cells = [_cell((client, feature), outcomes, footnotes) for feature in features]
        lines.append(f"| {title} | {' | '.join(cells)} |\n")
    return "".join(lines)


def _cell(key: tuple[str, str], outcomes: Mapping[tuple[str, ...], str], footnotes: list[str]) -> str:
    if key not in REASONS:
        return outcomes.get(key, "-")
    if REASONS[key] not in footnotes:
        footnotes.append(REASONS[key])
    return f"no ({footnotes.index(REASONS[key]) + 1})"


def describe_versions() -> str:
    """Return the versions of the installed client libraries, and of the JavaScript ones."""
    python = ", ".join(f"{name} {found}" for name in PACKAGES if (found := _version(name)))
    return f"{python}. JavaScript: {', '.join(f'{name} {pin}' for name, pin in _javascript_pins().items())}."


def _javascript_pins() -> dict[str, str]:
    return json.loads(JAVASCRIPT.read_text(encoding="utf-8"))["dependencies"]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", type=Path, nargs="+", help="JUnit XML reports of test runs")
    parser.add_argument("--versions", default="", help="versions of libraries of another environment")
    arguments = parser.parse_args()
    outcomes: dict[tuple[str, ...], str] = {}
    for report in arguments.reports:
        found = read_properties(report, PROPERTY)
        outcomes |= {key: outcome for key, outcome in found.items() if outcomes.get(key, SKIPPED) == SKIPPED}
    if failed := sorted(key for key, outcome in outcomes.items() if outcome == FAILED):
        raise SystemExit(f"Fix these first: {failed}")
    versions = arguments.versions or describe_versions()
    PAGE.write_text(render(outcomes, versions, describe_environment()), encoding="utf-8")


if __name__ == "__main__":
    main()
