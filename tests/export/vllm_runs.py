"""Run by an interpreter that has vLLM: greedy generation with a draft head. `vllm_runs.py TARGET SPECULATIVE PROMPTS`,
the last two as JSON; prints a JSON line of the outputs and of vLLM's counters."""

from __future__ import annotations

import json
import sys

NEW = 24


def main(target: str, speculative: str, prompts: str) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        target, speculative_config=json.loads(speculative), dtype="float32", max_model_len=128, max_num_seqs=2,
        enforce_eager=True, skip_tokenizer_init=True, enable_prefix_caching=False, disable_log_stats=False,
        generation_config="vllm",
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": p} for p in json.loads(prompts)], params, use_tqdm=False)
    counters = {
        m.name.removeprefix("vllm:spec_decode_num_"): getattr(m, "value", None) or list(getattr(m, "values", ()))
        for m in llm.get_metrics()
        if m.name.startswith("vllm:spec_decode_num_")
    }
    print(json.dumps({"tokens": [list(o.outputs[0].token_ids) for o in outputs], "counters": counters}))


if __name__ == "__main__":
    main(*sys.argv[1:])
