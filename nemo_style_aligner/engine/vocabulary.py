"""What an engine has to know of a model's tokenizer."""

from __future__ import annotations

from typing import Any

from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.grammar import Grammars
from nemo_style_aligner.engine.text.tokenizer import Tokenizer, TokenizerError


def vocabulary_options(architecture: ModelArchitecture, tokenizer: Tokenizer) -> dict[str, Any]:
    """Options of the vocabulary and the tokenizer that every engine takes; see `GenerationEngine`.

    Raises:
        TokenizerError: the model cannot make the token that ends responses.
    """
    if tokenizer.eos_id >= architecture.vocab_size:
        raise TokenizerError(
            f"the tokenizer's EOS has the id {tokenizer.eos_id}, but the model's vocabulary has "
            f"{architecture.vocab_size} tokens: no response would end. Give the model its own tokenizer"
        )
    limit = min(tokenizer.vocab_size, architecture.vocab_size)
    return {
        "eos_id": tokenizer.eos_id,
        "more_eos_ids": tokenizer.stop_ids[1:],
        "vocab_limit": limit,
        "detokenize": tokenizer.ids_to_text,
        "token_to_id": tokenizer.token_to_id,
        "grammars": Grammars(tokenizer, limit),
    }
