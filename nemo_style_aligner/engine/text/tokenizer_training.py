"""Train tokenizers for tiny models, as in tests, demonstrations and benchmarks."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import tokenizers
import transformers

from nemo_style_aligner.engine.text.tokenizer import Tokenizer, TokenizerError, load_tokenizer, save_made


def train_character_tokenizer(chars: Iterable[str], directory: str | Path) -> Tokenizer:
    """Make a tokenizer with one token per character, for tiny models, and save it as a Hugging Face directory.

    ``chars`` are the characters to know: a string or several, in any order, repeats welcome (a corpus will do).
    Any text of known characters, spaces and newlines included, is decoded exactly; an unknown character
    becomes ``<|unk|>``. Ids: ``<|endoftext|>`` 0 (ends a response), ``<|pad|>`` 1, ``<|unk|>`` 2, then the
    characters in code point order.
    """
    specials = ["<|endoftext|>", "<|pad|>", "<|unk|>"]
    alphabet = sorted({character for text in chars for character in text})
    if not alphabet:
        raise TokenizerError("a character tokenizer needs at least one character")
    vocabulary = {token: i for i, token in enumerate(specials + alphabet)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<|unk|>"))
    every_character = tokenizers.Regex(r"[\s\S]")
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(every_character, behavior="isolated")
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_special_tokens(specials)
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|endoftext|>", pad_token="<|pad|>", unk_token="<|unk|>"
    )
    save_made(made, directory)
    return load_tokenizer(directory)


def train_bpe_tokenizer(texts: Iterable[str], vocab_size: int, directory: str | Path) -> Tokenizer:
    """Make a byte-level BPE tokenizer whose digits stay single tokens, and save it as a Hugging Face directory.

    Any text is decoded exactly. ``<|endoftext|>`` has id 0, ends a response and pads. ``vocab_size`` is an upper
    limit, but the 256 bytes and ``<|endoftext|>`` are always included.
    """
    eos = "<|endoftext|>"
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = tokenizers.pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([digits, byte_level])
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[eos],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    save_made(transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, pad_token=eos), directory)
    return load_tokenizer(directory)
