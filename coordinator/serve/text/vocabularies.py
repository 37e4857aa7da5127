"""Whether two models mean the same by a token id, so that one can guess the tokens of the other."""

from __future__ import annotations

from pathlib import Path

from coordinator.serve.text.sentences import open_tokenizer
from hearth.errors import BadSetting
from hearth.plan.model_spec import ModelSpec

_ADVICE = "choose a draft model of the same family as the model, or omit --draft"


def check_vocabularies(model_dir: Path, model: ModelSpec, draft_dir: Path, draft: ModelSpec) -> None:
    """Compare the tokenizers, or the sizes of the vocabularies if a model has no tokenizer.

    With equal tokenizers the sizes may differ: some models round theirs up. Raises BadSetting, BadCheckpoint.
    """
    if not all((directory / "tokenizer.json").exists() for directory in (model_dir, draft_dir)):
        if model.vocab_size != draft.vocab_size:
            sizes = f"{draft.name} has {draft.vocab_size} tokens, {model.name} has {model.vocab_size}"
            raise BadSetting(setting="--draft", reason=f"its vocabulary is another one ({sizes}): {_ADVICE}")
        return
    own, other = (open_tokenizer(directory).get_vocab(with_added_tokens=True) for directory in (model_dir, draft_dir))
    differing = own.items() ^ other.items()
    if differing:
        token = min(differing, key=lambda item: item[1])[0]
        ids = f"{token!r} is {other.get(token, 'no token')} in {draft.name} and {own.get(token, 'no token')} in {model.name}"
        raise BadSetting(setting="--draft", reason=f"its vocabulary is another one ({ids}): {_ADVICE}")
