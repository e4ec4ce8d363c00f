"""Complete prompts greedily with vLLM, and record the tokens that its head for multi-token prediction drafts."""

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

drafts = []
propose = SpecDecodeBaseProposer.propose


def record(self, *args, **options):
    found = propose(self, *args, **options)
    drafts.append(found[0].tolist())
    return found


if __name__ == "__main__":
    request = json.loads(Path(sys.argv[1]).read_text())
    SpecDecodeBaseProposer.propose = record
    llm = LLM(
        model=request["model"],
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=1,
        enforce_eager=True,  # compiling takes minutes
        enable_prefix_caching=False,
        limit_mm_per_prompt={"image": 0, "video": 0},
        speculative_config={"method": "mtp", "num_speculative_tokens": request["num_drafts"]},
    )
    sampling = SamplingParams(temperature=0, max_tokens=request["max_tokens"], ignore_eos=True, detokenize=False)
    result = []
    for token_ids in request["prompts"]:
        drafts.clear()
        (output,) = llm.generate({"prompt_token_ids": token_ids}, sampling, use_tqdm=False)
        result.append({"token_ids": list(output.outputs[0].token_ids), "drafts": list(drafts)})
    Path(sys.argv[2]).write_text(json.dumps(result))
