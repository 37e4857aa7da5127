"""The reference for comparisons: `transformers` on one device with the same weights.

`python -m agent.worker.transformer.reference MODEL_DIR` reads a JSON list of texts on stdin and prints one JSON object
with their normalised mean-pooled embeddings.
"""

from __future__ import annotations

import json
import sys

import torch
from transformers import AutoModel, AutoTokenizer


def reference_embeddings(model_dir: str, texts: list[str]) -> torch.Tensor:
    """Normalised embeddings [N,H], float32, computed one text at a time: without padding, as in Hearth."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    model = AutoModel.from_pretrained(model_dir, local_files_only=True, dtype=torch.float32).eval()
    with torch.inference_mode():
        pooled = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(dim=0) for text in texts]
    return torch.nn.functional.normalize(torch.stack(pooled), dim=-1)


if __name__ == "__main__":
    vectors = reference_embeddings(sys.argv[1], json.load(sys.stdin))
    print(json.dumps({"embeddings": vectors.tolist()}))
