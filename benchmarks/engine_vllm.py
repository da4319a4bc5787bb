"""The child of benchmarks/engine.py that runs vLLM, in vLLM's own environment.

    PYTHON engine_vllm.py MODEL_FOLDER DTYPE MAX_MODEL_LEN

Reads one JSON list [prompts, tokens] a line: makes `tokens` tokens for each prompt, greedily, and answers with a line
that begins with ANSWER and holds the seconds it took.
"""

from __future__ import annotations

import json
import os
import sys
import time

ANSWER = "seconds: "


def main() -> None:
    """Until the parent closes the pipe."""
    folder, dtype, longest = sys.argv[1], sys.argv[2], int(sys.argv[3])
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=folder, dtype=dtype, enforce_eager=True, max_model_len=longest, enable_prefix_caching=False, seed=0
    )

    def seconds(prompts: list[list[int]], tokens: int) -> float:
        how = SamplingParams(temperature=0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        engine.generate([{"prompt_token_ids": one} for one in prompts], how, use_tqdm=False)
        return time.perf_counter() - began

    seconds([[1, 2, 3]], 2)
    print(f"{ANSWER}0", flush=True)
    for line in sys.stdin:
        prompts, tokens = json.loads(line)
        print(f"{ANSWER}{seconds(prompts, tokens)}", flush=True)


if __name__ == "__main__":
    main()
