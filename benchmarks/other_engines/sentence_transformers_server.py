"""sentence-transformers behind OpenAI's embeddings: sentence_transformers_server.py MODEL PORT MAX_PIXELS."""

from __future__ import annotations

import sys
from typing import Any

from embedding_wire import BATCH, Item, Vectors, serve
from sentence_transformers import SentenceTransformer


def conversation(item: Item) -> list[dict[str, Any]]:
    part = {"type": "image", "image": item.image} if item.image else {"type": "text", "text": item.text}
    return [
        {"role": "system", "content": [{"type": "text", "text": item.instruction}]},
        {"role": "user", "content": [part]},
    ]


def main() -> None:
    model = SentenceTransformer(
        sys.argv[1],
        device="cpu",
        model_kwargs={"dtype": "bfloat16"},
        processor_kwargs={"max_pixels": int(sys.argv[3])},
    )

    def embed(items: list[Item]) -> Vectors:
        vectors = model.encode(
            [conversation(item) for item in items], batch_size=BATCH, show_progress_bar=False, convert_to_tensor=True
        )
        found: Vectors = vectors.float().tolist()
        return found

    serve(embed, int(sys.argv[2]))


if __name__ == "__main__":
    main()
