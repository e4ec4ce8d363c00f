"""Generate greedy completions of conversations with vLLM."""

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams

if __name__ == "__main__":
    request = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(
        model=request["model"],
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=4,
        enforce_eager=True,  # compiling takes minutes
        enable_prefix_caching=False,
        limit_mm_per_prompt={"image": 1, "video": 0},
        skip_mm_profiling=True,
    )
    sampling = SamplingParams(
        temperature=0, max_tokens=request["max_tokens"], ignore_eos=True, logprobs=1, detokenize=False
    )
    outputs = llm.chat(request["conversations"], sampling, use_tqdm=False)
    result = [
        {
            "prompt_token_ids": list(output.prompt_token_ids),
            "token_ids": list(output.outputs[0].token_ids),
            "logprobs": [
                step[token].logprob
                for token, step in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
            ],
        }
        for output in outputs
    ]
    Path(sys.argv[2]).write_text(json.dumps(result))
