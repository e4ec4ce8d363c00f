"""LoRA adapters that PEFT trained and saved: our logits equal those of PEFT's own model.

Needs the package `peft`, which is not a dependency of the project.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from dashinfer_vlm_core.models.lora import read_lora
from dashinfer_vlm_core.models.qwen2_vl.config import read_spec
from tests.lora_folders import ATTENTION, MLP
from tests.plugins.oracle import Oracle, collect, decoding, ids, prompt, visual

peft = pytest.importorskip("peft", reason="PEFT is not installed. Install `peft`.")

# The warnings are about what PEFT and transformers use of each other.
pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore")]

CONFIGS = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "all-linear": {"target_modules": "all-linear"},
    "rslora": {"target_modules": [*ATTENTION, *MLP], "use_rslora": True, "lora_alpha": 3},
    "patterns": {
        "target_modules": [*ATTENTION, *MLP],
        "rank_pattern": {"q_proj": 6, r"layers\.1\.mlp\.up_proj": 2},
        "alpha_pattern": {"down_proj": 5, r"language_model\.layers\.0\.self_attn\.o_proj": 1},
    },
    "saved modules": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    "embedding and head": {"target_modules": ["embed_tokens", "lm_head", "k_proj"]},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_logprobs_equal_peft(oracles, tmp_path, name):
    base = oracles("mha-untied")
    adapted = Oracle(base.folder, _train(base, tmp_path / "adapter", CONFIGS[name]))
    lora = read_lora("a", str(tmp_path / "adapter"), read_spec(base.folder))
    for request in (prompt(1, 20, logprobs=0), visual(5, (1, 4, 6), 7, width=base.width, logprobs=0)):

        async def decode(request=request):
            async with decoding(base.decoder()) as decoder:
                return await collect(decoder, replace(request, lora=lora))

        tokens = asyncio.run(decode())
        expected = adapted.greedy(request)
        logprobs = adapted.logits(request, expected).log_softmax(-1)
        assert ids(tokens) == expected != base.greedy(request)
        assert [token.logprob for token in tokens] == pytest.approx(
            [float(logprobs[step, token]) for step, token in enumerate(expected)], abs=1e-4
        )


def _train(base, folder, config):
    """Return the model of `base` with a random adapter of PEFT's, which is saved to `folder`."""
    from transformers import Qwen2VLForConditionalGeneration

    model = Qwen2VLForConditionalGeneration.from_pretrained(base.folder, dtype="float32")
    torch.manual_seed(1)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, **{"lora_alpha": 8, **config})).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name or "lora_embedding" in name:  # PEFT's initial values are zero
                parameter.normal_(std=0.3)
            elif "modules_to_save" in name:
                parameter.add_(0.2 * parameter.std() * torch.randn_like(parameter))
    adapted.save_pretrained(folder)
    return adapted.base_model.model
