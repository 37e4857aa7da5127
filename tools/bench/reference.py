"""`transformers` on one emulated device: `python -m tools.bench.reference ipc://PATH`. Does not use Hearth's compute code."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

from tools.bench.child import serve


class Reference:
    """A model in `transformers`, in one or more formats, on one thread, as the reference."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._models: dict[str, Any] = {}

    def load(self, model_dir: str, dtype: str) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self._models[dtype] = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype)).eval()

    def generate(self, prompt: list[int], num_tokens: int, dtype: str) -> dict[str, Any]:
        """Generate greedily with the library's KV cache; returns the seconds of prefill and of all tokens after the first."""
        model = self._models[dtype]
        with torch.inference_mode():
            began = time.perf_counter()
            out = model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
            tokens = [int(out.logits[0, -1].argmax())]
            first = time.perf_counter()
            for _ in range(num_tokens - 1):
                out = model(torch.tensor([tokens[-1:]]), past_key_values=out.past_key_values, use_cache=True)
                tokens.append(int(out.logits[0, -1].argmax()))
            ended = time.perf_counter()
        return {"tokens": tokens, "prefill": first - began, "decode": ended - first}


if __name__ == "__main__":
    serve(sys.argv[1], Reference())
