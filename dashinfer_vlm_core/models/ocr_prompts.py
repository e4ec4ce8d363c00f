"""The prompts with which checkpoints were trained to convert the image of a page to text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .spec import ModelSpec

_GREEDY: Mapping[str, float] = {"temperature": 0.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class OcrPrompt:
    """How a checkpoint is asked for the text of a page.

    Attributes:
        text: the prompt, after the image.
        sampling: sampling parameters, as fields of a chat request.
        has_front_matter: whether the response begins with metadata in YAML, which are not part of the page.
    """

    text: str
    sampling: Mapping[str, float] = field(default_factory=lambda: _GREEDY)
    has_front_matter: bool = False


_OLMOCR = OcrPrompt(  # https://github.com/allenai/olmocr/blob/main/olmocr/prompts/prompts.py
    text="Attached is one page of a document that you must process. Just return the plain text representation of this"
    " document as if you were reading it naturally. Convert equations to LateX and tables to HTML.\n"
    "If there are any figures or charts, label them with the following markdown syntax ![Alt text describing the"
    " contents of the figure](page_startx_starty_width_height.png)\n"
    "Return your output as markdown, with a front matter section on top specifying values for the primary_language,"
    " is_rotation_valid, rotation_correction, is_table, and is_diagram parameters.",
    has_front_matter=True,
)

_NANONETS = OcrPrompt(  # https://huggingface.co/nanonets/Nanonets-OCR2-3B
    text="Extract the text from the above document as if you were reading it naturally. Return the tables in html"
    " format. Return the equations in LaTeX representation. If there is an image in the document and image caption is"
    " not present, add a small description of the image inside the <img></img> tag; otherwise, add the image caption"
    " inside <img></img>. Watermarks should be wrapped in brackets. Ex: <watermark>OFFICIAL COPY</watermark>. Page"
    " numbers should be wrapped in brackets. Ex: <page_number>14</page_number> or <page_number>9/22</page_number>."
    " Prefer using ☐ and ☑ for check boxes."
)

_CHANDRA_TAGS = (
    "math", "br", "i", "b", "u", "del", "sup", "sub", "table", "tr", "td", "p", "th", "div", "pre", "h1", "h2", "h3",
    "h4", "h5", "ul", "ol", "li", "input", "a", "span", "img", "hr", "tbody", "small", "caption", "strong", "thead",
    "big", "code",
)  # fmt: skip
_CHANDRA_ATTRIBUTES = (
    "class", "colspan", "rowspan", "display", "checked", "type", "border", "value", "style", "href", "alt", "align",
)  # fmt: skip


def _chandra(tags: tuple[str, ...], attributes: tuple[str, ...], *, images: str = "", more: str = "") -> OcrPrompt:
    return OcrPrompt(
        text="OCR this image to HTML.\n\n"
        f"Only use these tags {list(tags)}, and these attributes {list(attributes)}.\n\n"
        "Guidelines:\n"
        "* Inline math: Surround math with <math>...</math> tags. Math expressions should be rendered in"
        " KaTeX-compatible LaTeX. Use display for block math.\n"
        "* Tables: Use colspan and rowspan attributes to match table structure.\n"
        "* Formatting: Maintain consistent formatting with the image, including spacing, indentation,"
        " subscripts/superscripts, and special characters.\n"
        "* Images: Include a description of any images in the alt attribute of an <img> tag. Do not fill out the src"
        f" property.{images}\n"
        "* Forms: Mark checkboxes and radio buttons properly.\n"
        "* Text: join lines together properly into paragraphs using <p>...</p> tags.  Use <br> tags for line breaks"
        f" within paragraphs, but only when absolutely necessary to maintain meaning.\n{more}"
        "* Use the simplest possible HTML structure that accurately represents the content of the block.\n"
        "* Make sure the text is accurate and easy for a human to read and interpret.  Reading order should be correct"
        " and natural."
    )


# `OCR_PROMPT` of https://github.com/datalab-to/chandra/blob/master/chandra/prompts.py, versions 0.1 and 0.2.
_CHANDRA = _chandra(_CHANDRA_TAGS, _CHANDRA_ATTRIBUTES)
_CHANDRA_2 = _chandra(
    (*_CHANDRA_TAGS, "chem"),
    (*_CHANDRA_ATTRIBUTES, "data-bbox", "data-label"),
    images=" Describe in detail inside the div tag. Also convert charts to high fidelity data, and convert diagrams to"
    " mermaid.",
    more="* Chemistry: Use <chem>...</chem> tags for chemical formulas with reactive SMILES.\n"
    "* Lists: Preserve indents and proper list markers.\n",
)

_MINERU = OcrPrompt(  # https://github.com/opendatalab/mineru-vl-utils/blob/main/mineru_vl_utils/mineru_client.py
    text="\nText Recognition:",
    sampling={**_GREEDY, "presence_penalty": 1.0, "frequency_penalty": 0.05, "no_repeat_ngram_size": 100},
)

_QWEN3_VL = OcrPrompt(  # https://github.com/QwenLM/Qwen3-VL/blob/main/cookbooks/document_parsing.ipynb
    text="qwenvl markdown"
)

_OTHER = OcrPrompt(
    text="Transcribe this page as Markdown, in reading order. Write tables as HTML and formulas as LaTeX. Return only"
    " the transcription."
)

_BY_NAME = (
    ("olmocr", _OLMOCR),
    ("nanonets-ocr", _NANONETS),
    ("chandra-ocr-2", _CHANDRA_2),
    ("chandra", _CHANDRA),
    ("mineru", _MINERU),
)
"""Prompts by a part of the checkpoint's name in lower case; the first match counts."""

_BY_TYPE = {"qwen3_vl": _QWEN3_VL, "qwen3_vl_moe": _QWEN3_VL}


def find_ocr_prompt(model: str, spec: ModelSpec) -> OcrPrompt:
    """Return the prompt of a checkpoint: by its name, by its type, or the first example prompt of a plugin's model.

    Args:
        model: the name by which it was loaded, such as a Hugging Face model ID.
        spec: the checkpoint; its folder in the Hugging Face cache contains the model ID.
    """
    cached = [part for part in spec.folder.parts if part.startswith("models--")]
    names = " ".join([Path(model).name, spec.folder.name, *cached]).lower()
    examples = [OcrPrompt(text=text) for text in spec.card.example_prompts[:1]]
    by_name = [prompt for name, prompt in _BY_NAME if name in names]
    by_type = [_BY_TYPE[spec.model_type]] if spec.model_type in _BY_TYPE else []
    return [*by_name, *by_type, *examples, _OTHER][0]
