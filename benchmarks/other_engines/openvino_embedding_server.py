"""OpenVINO GenAI behind OpenAI's embeddings: openvino_embedding_server.py EXPORTED_MODEL PORT THREADS.

Texts are embedded in batches; its pipeline gives all prompts of a batch the same images, so that images are embedded
one by one.
"""

from __future__ import annotations

import sys

import numpy as np
import openvino
import openvino_genai as genai
from embedding_wire import Item, Vectors, serve

PROMPT = "<|im_start|>system\n{}<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
"""The pipeline applies chat templates without the beginning of a response."""
IMAGE = "<ov_genai_image_0>"


def main() -> None:
    pipeline = genai.EmbeddingPipeline(sys.argv[1], "CPU", INFERENCE_NUM_THREADS=int(sys.argv[3]))

    def embed(items: list[Item]) -> Vectors:
        texts = [PROMPT.format(item.instruction, item.text) for item in items if not item.image]
        vectors = iter(pipeline.embed(texts).embeddings.data.tolist() if texts else [])
        return [embed_image(item) if item.image else next(vectors) for item in items]

    def embed_image(item: Item) -> list[float]:
        image = openvino.Tensor(np.asarray(item.image))
        found = pipeline.embed(PROMPT.format(item.instruction, IMAGE), images=[image])
        vector: list[float] = found.embeddings.data[0].tolist()
        return vector

    serve(embed, int(sys.argv[2]))


if __name__ == "__main__":
    main()
