"""Answer a question from the pictures and PDF pages that fit it best: python pages.py [FILE... QUESTION]"""

from __future__ import annotations

import base64
import mimetypes
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pypdfium2 as pdfium
from langchain_core.documents import Document
from langchain_core.messages import HumanMessage
from langchain_core.vectorstores import InMemoryVectorStore

from dashinfer_vlm_langchain import ChatDashInferVLM, DashInferVLMEmbeddings

PICTURES = Path(__file__).parents[1] / "pictures"
DPI = 144


class PageEmbeddings(DashInferVLMEmbeddings):
    """Embeds documents whose text is the path of an image, so that every vector store can index images."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return self.embed_image(texts)


def pages(path: Path, folder: Path) -> Iterator[Document]:
    """Return a document for a picture, or for each page of a PDF, which is rendered to a file in `folder`."""
    if path.suffix.lower() != ".pdf":
        yield Document(str(path), metadata={"source": path.name})
        return
    images = Path(tempfile.mkdtemp(dir=folder))  # files in different folders can have the same name
    with pdfium.PdfDocument(path) as pdf:
        for number, page in enumerate(pdf, 1):
            image = images / f"{number}.png"
            page.render(scale=DPI / 72).to_pil().save(image)
            yield Document(str(image), metadata={"source": f"{path.name}, page {number}"})


def block(path: str) -> dict[str, str]:
    data = base64.b64encode(Path(path).read_bytes()).decode()
    return {"type": "image", "base64": data, "mime_type": mimetypes.guess_type(path)[0] or "image/png"}


*files, question = sys.argv[1:] or (*sorted(PICTURES.glob("*.png")), "Which picture has the star?")
with tempfile.TemporaryDirectory() as folder:
    store = InMemoryVectorStore(PageEmbeddings())  # model="Qwen/Qwen3-VL-Embedding-2B"
    store.add_documents([page for file in files for page in pages(Path(file), Path(folder))])
    found = store.similarity_search(question, k=2)
    chat = ChatDashInferVLM(temperature=0)  # model="Qwen/Qwen3-VL-4B-Instruct"
    images = [block(page.page_content) for page in found]
    answer = chat.invoke([HumanMessage([*images, {"type": "text", "text": question}])])
    print(answer.text, f"({'; '.join(page.metadata['source'] for page in found)})")
