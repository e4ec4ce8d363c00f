"""Write a checkpoint in the published Qwen2-VL file layout: `python -m training.export RUN CHECKPOINT`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from training import batches, sizes, tokenizer
from training.network import Architecture
from training.train import PLAN, PROGRESS

CONTEXT = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What a checkpoint has besides its weights."""

    architecture: Architecture
    tokenizer: Tokenizer
    min_pixels: int = sizes.MIN_PIXELS
    max_pixels: int = sizes.MAX_PIXELS
    max_new_tokens: int = 64

    def token(self, text: str) -> int:
        found: int | None = self.tokenizer.token_to_id(text)
        assert found is not None
        return found


def export(weights: Mapping[str, Tensor], published: Published, folder: Path) -> None:
    """Write all files except the model card; `weights` have the network's names and are fp32."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: _published(name, value) for name, value in weights.items() if not name.startswith("heads.")}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes it readable by its owner only
    tokenizer.write(published.tokenizer, folder)
    _dump(folder / "config.json", _config(published))
    _dump(folder / "generation_config.json", _generation(published))
    _dump(folder / "preprocessor_config.json", _preprocessor(published))


def _published(name: str, value: Tensor) -> Tensor:
    if name == "visual.patch_embed.proj.weight":  # a convolution in published checkpoints
        value = value.view(-1, 3, sizes.TEMPORAL_PATCH, sizes.PATCH, sizes.PATCH)
    return value.to(torch.bfloat16).contiguous()


def _config(published: Published) -> dict[str, Any]:
    architecture = published.architecture
    return {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "attention_dropout": 0.0,
        "bos_token_id": published.token("<|endoftext|>"),
        "eos_token_id": published.token("<|im_end|>"),
        "hidden_act": "silu",
        "hidden_size": architecture.hidden_size,
        "image_token_id": published.token("<|image_pad|>"),
        "initializer_range": 0.02,
        "intermediate_size": architecture.intermediate_size,
        "max_position_embeddings": CONTEXT,
        "max_window_layers": architecture.num_hidden_layers,
        "model_type": "qwen2_vl",
        "num_attention_heads": architecture.num_attention_heads,
        "num_hidden_layers": architecture.num_hidden_layers,
        "num_key_value_heads": architecture.num_key_value_heads,
        "rms_norm_eps": architecture.rms_norm_eps,
        "rope_scaling": {"type": "mrope", "mrope_section": list(architecture.mrope_section)},
        "rope_theta": architecture.rope_theta,
        "sliding_window": CONTEXT,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "video_token_id": published.token("<|video_pad|>"),
        "vision_config": {
            "depth": architecture.depth,
            "embed_dim": architecture.embed_dim,
            "hidden_act": "quick_gelu",
            "hidden_size": architecture.hidden_size,
            "in_channels": 3,
            "in_chans": 3,
            "mlp_ratio": 4,
            "model_type": "qwen2_vl",
            "num_heads": architecture.num_heads,
            "patch_size": sizes.PATCH,
            "spatial_merge_size": sizes.FACTOR // sizes.PATCH,
            "spatial_patch_size": sizes.PATCH,
            "temporal_patch_size": sizes.TEMPORAL_PATCH,
        },
        "vision_end_token_id": published.token("<|vision_end|>"),
        "vision_start_token_id": published.token("<|vision_start|>"),
        "vision_token_id": published.token("<|vision_pad|>"),
        "vocab_size": architecture.vocab_size,
    }


def _generation(published: Published) -> dict[str, Any]:
    return {
        "bos_token_id": published.token("<|endoftext|>"),
        "do_sample": False,
        "eos_token_id": [published.token("<|im_end|>"), published.token("<|endoftext|>")],
        "max_new_tokens": published.max_new_tokens,
        "pad_token_id": published.token("<|endoftext|>"),
    }


def _preprocessor(published: Published) -> dict[str, Any]:
    return {
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": list(batches.MEAN),
        "image_processor_type": "Qwen2VLImageProcessor",
        "image_std": list(batches.DEVIATION),
        "max_pixels": published.max_pixels,
        "merge_size": sizes.FACTOR // sizes.PATCH,
        "min_pixels": published.min_pixels,
        "patch_size": sizes.PATCH,
        "processor_class": "Qwen2VLProcessor",
        "resample": 3,
        "rescale_factor": 1 / 255,
        "size": {"longest_edge": published.max_pixels, "shortest_edge": published.min_pixels},
        "temporal_patch_size": sizes.TEMPORAL_PATCH,
    }


def _dump(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m training.export", description=__doc__)
    parser.add_argument("run", type=Path, help="folder that the training wrote")
    parser.add_argument("checkpoint", type=Path, help="folder for the checkpoint")
    options = parser.parse_args(arguments)
    learner = torch.load(options.run / PROGRESS, weights_only=True)["learner"]
    # The running average is more accurate than the last weights and has larger margins between logits.
    published = Published(architecture=PLAN.sizes, tokenizer=tokenizer.build())
    export(learner["average"] or learner["weights"], published, options.checkpoint)


if __name__ == "__main__":
    main()
