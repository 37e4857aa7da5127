"""llama.cpp on one thread, as a child process: `PYTHON -I llama_cpp.py`, in an environment with llama-cpp-python and gguf.

Imports nothing of Hearth, which that environment lacks. Reads JSON requests `{"do": METHOD, ...}` from standard input, a line
each, and answers each with a line.
"""

import ctypes
import json
import os
import sys
import time
from typing import Any

import numpy as np

_UBATCH_ROWS = 512  # rows that llama.cpp computes at once: its default


def make(path: str, config: dict[str, Any]) -> dict[str, Any]:
    """Write a Llama of random weights as GGUF, all matrices in Q4_0, without a vocabulary."""
    import gguf

    hidden, ffn, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    kv_width = config["num_key_value_heads"] * hidden // heads
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    random = np.random.default_rng(0)

    def add(name: str, num_outputs: int, num_inputs: int) -> None:
        weight = random.standard_normal((num_outputs, num_inputs), dtype=np.float32) * 0.02
        kind = gguf.GGMLQuantizationType.Q4_0
        writer.add_tensor(name, gguf.quants.quantize(weight, kind), raw_dtype=kind)

    add("token_embd.weight", config["vocab_size"], hidden)
    add("output.weight", config["vocab_size"], hidden)
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    for layer in range(config["num_hidden_layers"]):
        add(f"blk.{layer}.attn_q.weight", hidden, hidden)
        add(f"blk.{layer}.attn_k.weight", kv_width, hidden)
        add(f"blk.{layer}.attn_v.weight", kv_width, hidden)
        add(f"blk.{layer}.attn_output.weight", hidden, hidden)
        add(f"blk.{layer}.ffn_gate.weight", ffn, hidden)
        add(f"blk.{layer}.ffn_up.weight", ffn, hidden)
        add(f"blk.{layer}.ffn_down.weight", hidden, ffn)
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", np.ones(hidden, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {}


class _Model:
    """A loaded model with a context of its own."""

    def __init__(self, path: str, context: int) -> None:
        import llama_cpp

        self._library = llama_cpp
        self._model = llama_cpp.Llama(
            path, n_ctx=context, n_batch=context, n_ubatch=_UBATCH_ROWS, n_threads=1, n_threads_batch=1, verbose=False
        )
        self._vocab_size = self._model.n_vocab()

    def describe(self) -> dict[str, Any]:
        system = self._library.llama_print_system_info().decode()
        return {"version": self._library.__version__, "system": system}

    def generate(self, prompt: list[int], num_tokens: int) -> dict[str, Any]:
        """Generate greedily; returns the seconds of prefill and of all tokens after the first."""
        self._model.reset()
        self._library.llama_memory_clear(self._library.llama_get_memory(self._model.ctx), True)
        began = time.perf_counter()
        self._model.eval(prompt)
        tokens = [self._likeliest()]
        first = time.perf_counter()
        for _ in range(num_tokens - 1):
            self._model.eval(tokens[-1:])
            tokens.append(self._likeliest())
        return {"tokens": tokens, "prefill": first - began, "decode": time.perf_counter() - first}

    def _likeliest(self) -> int:
        logits = self._library.llama_get_logits_ith(self._model.ctx, -1)
        return int(
            np.ctypeslib.as_array(ctypes.cast(logits, ctypes.POINTER(ctypes.c_float)), (self._vocab_size,)).argmax()
        )


def main() -> None:
    """Answer requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the library prints does not mix with answers
    model: _Model
    for line in sys.stdin:
        request = json.loads(line)
        method = request.pop("do")
        if method == "make":
            answer = make(**request)
        elif method == "load":
            model = _Model(**request)
            answer = model.describe()
        else:
            answer = model.generate(**request)
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
