"""Run llama.cpp's conversion script on a checkpoint whose tokenizer it does not know.

    python convert_to_gguf.py SOURCES MODEL OUT [options of the script]

The script identifies the pre-tokenizer by a hash of a sample's tokens, which differs for a tokenizer with another
vocabulary. All checkpoints of the benchmarks use Qwen2's pre-tokenizer.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main() -> None:
    sources, model, out, *options = sys.argv[1:]
    sys.path[:0] = [sources, str(Path(sources, "gguf-py"))]
    from conversion import base  # llama.cpp's

    base.TextModel.get_vocab_base_pre = lambda *_: "qwen2"
    base.ModelBase.no_mtp = True  # engines are compared without speculation, and the models have no head for it
    script = Path(sources, "convert_hf_to_gguf.py")
    sys.argv = [str(script), model, "--outfile", out, *options]
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
