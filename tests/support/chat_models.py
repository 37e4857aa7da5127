"""Tokenizers and chat templates for tests, made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n    {% if message['role'] == 'system' %}{% continue %}{% endif %}"
    "{{ '<|' + message['role'] + '|>' }}{{ message['content'] | trim }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def save_byte_level(directory: Path, adds_bos: bool = True) -> Path:
    """A GPT-2-like tokenizer: every byte is a token, a few merges, four special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w")]
    vocabulary = {text: index for index, text in enumerate([*letters, *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    if adds_bos:
        bos = tokenizer.token_to_id("<s>")
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    tokenizer.enable_truncation(5)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def write_config(directory: Path, **config: Any) -> Path:
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


# ---- a model that says what a test wants ----------------------------------------------------------------------------

TOOL_TEMPLATE = (
    "{{ bos_token }}{% if tools %}<|tools|>{{ tools | tojson }}{% endif %}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' }}{{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{{ eos_token }}{% endfor %}"
    "{{ '<|answer|>' if messages[-1]['role'] == 'tool' else '<|call|>' if tools else '<|assistant|>' }}"
)


def save_scripted_chat(directory: Path, call: str, answer: str, context_tokens: int = 640) -> Path:
    """A Llama whose weights map each token to the next one of a script.

    With tools it calls one (`call` is the JSON), after a tool's result it says `answer`, and without tools "hello".
    Where a mask demands JSON, it closes an object behind a boolean.
    """
    import torch
    from support.models import save_random_model, small_decoder
    from tokenizers import AddedToken, Tokenizer
    from transformers import LlamaForCausalLM

    save_byte_level(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    marks = ["<|tools|>", "<|system|>", "<|tool|>", "<|call|>", "<|answer|>"]
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in marks])
    tokenizer.add_tokens([AddedToken(text) for text in ("<tool_call>", call, "</tool_call>", answer)])
    tokenizer.save(str(directory / "tokenizer.json"))
    write_config(directory, chat_template=TOOL_TEMPLATE, bos_token="<s>", eos_token="</s>")
    script = [
        ("<|call|>", "<tool_call>"), ("<tool_call>", call), (call, "</tool_call>"), ("</tool_call>", "</s>"),
        ("<|answer|>", answer), (answer, "</s>"), ("<|assistant|>", "hello"), ("hello", "</s>"),
        ("e", "}"),
    ]  # fmt: skip
    end = tokenizer.token_to_id("</s>")
    shape = {"vocab_size": 512, "max_position_embeddings": context_tokens, "tie_word_embeddings": False}
    save_random_model(directory, small_decoder("llama", eos_token_id=end, **shape), generates=True)
    model = LlamaForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.norm.weight.fill_(1.0)
        embedding = model.model.embed_tokens.weight
        embedding.normal_(0, 1)
        model.lm_head.weight.zero_()
        for token, following in script:
            model.lm_head.weight[tokenizer.token_to_id(following)] += embedding[tokenizer.token_to_id(token)]
    model.save_pretrained(directory)
    return directory
