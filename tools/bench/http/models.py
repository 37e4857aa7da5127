"""Decoders of random weights that have what chat clients need: a tokenizer and a chat template with tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.bench.results import REPOSITORY
from tools.bench.shapes import save_random_model

# A Llama whose steps take a millisecond, so that what the gateway adds is seen.
TINY: Mapping[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "vocab_size": 1024, "max_position_embeddings": 1024,
}  # fmt: skip
_SPECIAL = ("<|begin|>", "<|start|>", "<|end|>")
_TEMPLATE = (
    "{{ bos_token }}{% if tools %}<|start|>tools\n{% for tool in tools %}{{ tool.function | tojson }}\n{% endfor %}<|end|>\n"
    "{% endif %}{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}<|end|>\n"
    "{% endfor %}<|start|>assistant\n"
)


def chat_directory(config: Mapping[str, Any], directory: Path) -> Path:
    """A model of this shape without an end token: its answers are as long as they may be."""
    shape = {**config, "bos_token_id": None, "eos_token_id": None}
    save_random_model(directory, shape)
    save_tokenizer(directory, int(config["vocab_size"]))
    return directory


def save_tokenizer(directory: Path, vocab_size: int) -> None:
    """Byte-level BPE that was trained on this project's documents."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(_SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    texts = sorted(
        path for folder in (REPOSITORY / "docs", REPOSITORY / "hearth") for path in folder.rglob("*.[mp][dy]")
    )
    tokenizer.train([str(path) for path in texts], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"chat_template": _TEMPLATE, "bos_token": _SPECIAL[0], "eos_token": _SPECIAL[2]}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
