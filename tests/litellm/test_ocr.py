"""`litellm.ocr()`, unchanged, against the server. LiteLLM knows Mistral's API under the name of its provider."""

from __future__ import annotations

import asyncio

import litellm
import pytest

from dashinfer_vlm_core.errors import InvalidParameter
from dashinfer_vlm_core.testing import scripted_engine
from tests.pdfs import document
from tests.samples import data_url, encode, noise
from tests.server.conftest import serving

PDF = data_url(document("One", "Two", size=(84, 84)), "application/pdf")


@pytest.fixture
def ocr(tiny_checkpoint):
    engine = scripted_engine(
        "# Page", "# Page", InvalidParameter("This is wrong."), model=str(tiny_checkpoint), served_model_name="tiny"
    )
    with engine, serving(engine) as server:

        def ocr(document, function=litellm.ocr, **options):
            return function("mistral/tiny", document, api_base=f"{server.url}/v1", api_key="none", **options)

        yield ocr


@pytest.mark.client("litellm-ocr", "image")
@pytest.mark.client("litellm-ocr", "usage")
@pytest.mark.client("litellm-ocr", "errors")
def test_litellm_reads_pages_and_reports_errors(ocr):
    found = ocr({"type": "document_url", "document_url": PDF}, pages=[1], include_image_base64=False)
    assert [(page.index, page.markdown, page.dimensions.width) for page in found.pages] == [(1, "# Page", 168)]
    assert (found.model, found.usage_info.pages_processed) == ("tiny", 1)
    image = {"type": "image_url", "image_url": data_url(encode(noise(84, 84)))}
    assert asyncio.run(ocr(image, litellm.aocr)).pages[0].markdown == "# Page"
    with pytest.raises(Exception, match="This is wrong"):
        ocr(image)
