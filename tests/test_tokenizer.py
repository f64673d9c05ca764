"""Tokenizers: round trips, special tokens, chat templates, saving; and no network, ever."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tokenizers
import transformers
from small_models import CHATML

from nemo_style_aligner.engine.grammar import Grammars, lark_grammar, vocabulary_bytes
from nemo_style_aligner.engine.text.tokenizer import Tokenizer, TokenizerError, load_tokenizer, save_made
from nemo_style_aligner.engine.text.tokenizer_training import train_bpe_tokenizer, train_character_tokenizer

TEXT = "User: What is 6+10?\nAssistant: 16\n\n  two  spaces\tand a tab "


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a tokenizer opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def characters(tmp_path: Path) -> Tokenizer:
    return train_character_tokenizer(TEXT + "é😀", tmp_path / "characters")


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama-like model: BPE with byte fallback, white space kept."""
    directory = tmp_path_factory.mktemp("sentencepiece")
    corpus = directory / "corpus.txt"
    corpus.write_text("\n".join(f"User: What is {a}+{b}? Assistant: {a + b}" for a in range(30) for b in range(30)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(directory / "tiny"), vocab_size=320, model_type="bpe",
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2,
    )  # fmt: skip
    return directory / "tiny.model"


def metaspace_tokenizer(directory: Path, legacy: bool) -> Tokenizer:
    """Hugging Face's form of Llama-2's or Mistral's: a space before a text, or (legacy) before each part between
    special tokens."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first")
    decoders = tokenizers.decoders
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    backend.train_from_iterator(["User: What is 6+10?\nAssistant: It is fine\n", "Hello: fine hello"] * 4, trainer)
    if legacy:
        backend.pre_tokenizer = None  # type: ignore[assignment]
        backend.normalizer = tokenizers.normalizers.Sequence(
            [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
        )
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    save_made(made, directory)
    return load_tokenizer(directory)


# Double spaces, indentation, leading and trailing spaces, what normalization changes, what no vocabulary has.
TEXTS = [
    TEXT, "a  b", "   leading", " one", "trailing  ", "def f(x):\n    if x:\n\treturn  x", "", " ", "\n", "  \n  ",
    "\t", "ﬁne ①  e\u0301  \u3000wide", "😀 数学", "▁under _ score", "1+1 = 2;  12345", "\r\nUser:",
]  # fmt: skip
TRAINED = {
    "bpe": {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity",
            "remove_extra_whitespaces": False, "split_digits": True, "max_sentencepiece_length": 8},
    "unigram": {"model_type": "unigram", "byte_fallback": True, "normalization_rule_name": "identity",
                "remove_extra_whitespaces": False},
    "nfkc": {"model_type": "bpe", "byte_fallback": True},
    "no prefix": {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity",
                  "remove_extra_whitespaces": False, "add_dummy_prefix": False, "user_defined_symbols": ["<sep>"]},
    "no bytes": {"model_type": "unigram", "normalization_rule_name": "nmt_nfkc_cf"},
}  # fmt: skip


@pytest.mark.parametrize("kind", TRAINED)
def test_a_sentencepiece_model_has_its_own_ids(kind: str, tmp_path: Path) -> None:
    """Also once it is saved; and what transformers reads then differs in white space at the beginning alone."""
    corpus = [f"User: What is {a}+{b}?  It is   {a + b}, def f(x):    return" for a in range(30) for b in range(9)]
    (tmp_path / "corpus.txt").write_text("\n".join(corpus))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "corpus.txt"), model_prefix=str(tmp_path / "tiny"), vocab_size=340,
        minloglevel=2, **{"hard_vocab_limit": False, **TRAINED[kind]},
    )  # fmt: skip
    itself = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tiny.model"))
    read = load_tokenizer(tmp_path / "tiny.model")
    read.save(tmp_path / "archive")
    again = load_tokenizer(tmp_path / "archive")
    again.save(tmp_path / "next")
    parts = ["User: 6", "It is  16", " 3"]
    for tokenizer in (read, again, load_tokenizer(tmp_path / "next")):
        assert tokenizer.texts_to_ids(TEXTS) == [itself.encode(text) for text in TEXTS]
        assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.unk_id) == (1, 2, 2, 0)
        assert all(tokenizer.ids_to_text(itself.encode(text)) == itself.decode(itself.encode(text)) for text in TEXTS)
        assert tokenizer.text_to_ids("</s>".join(parts)) == read.text_to_ids("</s>".join(parts))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "archive")
    for text in (*TEXTS, "</s>".join(parts)):
        if not text.startswith((" ", "\t", "\r", "▁")):  # docs/checkpoints.md
            assert theirs.encode(text, add_special_tokens=False) == read.text_to_ids(text), text
    files = {file.name: file.read_bytes() for file in (tmp_path / "archive").iterdir()}
    assert files == {file.name: file.read_bytes() for file in (tmp_path / "next").iterdir()}


def test_settings_of_hugging_faces_beside_a_sentencepiece_model_are_refused(
    sentencepiece_model: Path, tmp_path: Path
) -> None:
    """They give other ids than the model alone."""
    shutil.copy(sentencepiece_model, tmp_path / "tokenizer.model")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer", "legacy": True}))
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json, .*: make one with transformers 4"):
        load_tokenizer(tmp_path)


@pytest.fixture(params=["sentencepiece", "metaspace", "legacy metaspace", "bytes", "characters"])
def any_tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    if request.param == "sentencepiece":
        return load_tokenizer(request.getfixturevalue("sentencepiece_model"))
    if request.param == "bytes":
        return train_bpe_tokenizer([TEXT] * 4, 400, tmp_path / "bytes")
    if request.param == "characters":
        return train_character_tokenizer([chr(c) for c in range(127)], tmp_path / "characters")
    return metaspace_tokenizer(tmp_path / "metaspace", legacy=request.param.startswith("legacy"))


def test_parts_of_a_text_have_its_tokens(any_tokenizer: Tokenizer) -> None:
    parts = ["\x00System\n\n\x11User\nWhat", " is 6+10?\n", "\x11", "Assistant\n", "fine", " hello</s>", "\n<s>User:"]
    encoded = any_tokenizer.parts_to_ids(parts)
    assert len(encoded) == len(parts) and [i for ids in encoded for i in ids] == any_tokenizer.text_to_ids(
        "".join(parts)
    )
    assert any_tokenizer.parts_to_ids([]) == [] and any_tokenizer.parts_to_ids(["", "6", ""])[::2] == [[], []]


def test_a_part_that_would_join_with_the_one_before_is_cut(any_tokenizer: Tokenizer) -> None:
    """As behind a prompt that ends with a space: its ids stay those of the prompt alone."""
    prompt, response = any_tokenizer.parts_to_ids(["Assistant: ", "fine"])
    assert prompt == any_tokenizer.text_to_ids("Assistant: ")
    assert any_tokenizer.ids_to_text([*prompt, *response]) == "Assistant: fine"
    assert response == any_tokenizer.text_to_ids("Assistant:fine")[len(any_tokenizer.text_to_ids("Assistant:")) :]


def test_character_tokenizer_round_trip(characters: Tokenizer) -> None:
    for text in (TEXT, "é😀", " ", "\n", ""):
        ids = characters.text_to_ids(text)
        assert len(ids) == len(text) and characters.ids_to_text(ids) == text
    assert characters.vocab_size == 3 + len(set(TEXT + "é😀"))
    assert max(characters.text_to_ids(TEXT)) < characters.vocab_size


def test_character_tokenizer_special_tokens(characters: Tokenizer) -> None:
    assert (characters.eos_id, characters.pad_id, characters.bos_id) == (0, 1, None)
    assert characters.token_to_id("<|endoftext|>") == 0 and characters.token_to_id("no such token") is None
    assert characters.text_to_ids("<|endoftext|>") == [0]
    six = characters.text_to_ids("6")
    assert characters.ids_to_text([*six, 0, 1, 1]) == "6"
    assert characters.text_to_ids("Z") == [characters.token_to_id("<|unk|>")]
    assert characters.texts_to_ids(["6", "16"]) == [six, characters.text_to_ids("16")]
    assert characters.texts_to_ids([]) == []


def test_end_strings_that_could_never_be_found_are_refused(any_tokenizer: Tokenizer) -> None:
    end = any_tokenizer.ids_to_text([any_tokenizer.eos_id], keep_special=True)
    any_tokenizer.check_end_strings([end, "User:", "\n", "§"])
    if any_tokenizer.text_to_ids(end) == [any_tokenizer.eos_id]:  # sentencepiece does not read control tokens in texts
        for string in (f"{end}\n", f"User{end}"):
            with pytest.raises(TokenizerError, match=r"would never be found: .* is a special token.* alone"):
                any_tokenizer.check_end_strings([string])


def test_a_byte_of_a_byte_level_vocabulary_is_not_the_character_that_it_is_spelt_as(tmp_path: Path) -> None:
    tokenizer = train_bpe_tokenizer([TEXT] * 4, 400, tmp_path / "bytes")
    for character in "»é¶":
        assert tokenizer.token_to_id(character) is None and len(tokenizer.text_to_ids(character)) == 2
    assert tokenizer.token_to_id("a") == tokenizer.text_to_ids("a")[0]


def test_character_tokenizer_does_not_depend_on_the_order_of_its_corpus(tmp_path: Path) -> None:
    a = train_character_tokenizer(["abc", "cab"], tmp_path / "a")
    b = train_character_tokenizer("bca", tmp_path / "b")
    assert a.text_to_ids("abc") == b.text_to_ids("abc") == [3, 4, 5]
    with pytest.raises(TokenizerError, match="at least one character"):
        train_character_tokenizer("", tmp_path / "c")


def test_bpe_tokenizer_keeps_digits_apart_and_makes_the_round_trip(tmp_path: Path) -> None:
    tokenizer = train_bpe_tokenizer(["User: What is 12+34?\nAssistant: 46"] * 4, 300, tmp_path / "bpe")
    digits = [tokenizer.token_to_id(digit) for digit in "0123456789"]
    prompt, response = "User: What is 7+85?\nAssistant:", " 92"
    ids = tokenizer.text_to_ids(prompt + response)
    assert [digits.index(i) for i in ids if i in digits] == [7, 8, 5, 9, 2]
    assert ids == tokenizer.text_to_ids(prompt) + tokenizer.text_to_ids(response)  # as in a rollout
    assert len(ids) < len(prompt)
    for text in (prompt + response, "Grüße, 世界!\n\t x  y"):
        assert tokenizer.ids_to_text(tokenizer.text_to_ids(text)) == text
    assert tokenizer.eos_id == tokenizer.pad_id == 0


def with_class(directory: Path, name: str, **config: object) -> None:
    """Make a directory look as if it were written for one of transformers' classes, with tokenizer.json as it is."""
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": name} | config))


@pytest.fixture(params=["characters", "sentencepiece", "GPT2Tokenizer", "LlamaTokenizer", "LlamaTokenizer legacy"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A tokenizer's, of a class that transformers 5 would build anew without what its tokenizer.json says."""
    path = tmp_path / "tokenizer"
    if request.param == "characters":
        train_character_tokenizer(TEXT + "é😀", path)
    elif request.param == "sentencepiece":
        load_tokenizer(request.getfixturevalue("sentencepiece_model")).save(path)
    elif request.param == "GPT2Tokenizer":
        train_bpe_tokenizer([TEXT + " 12 123\n\n1"] * 9, 400, path)  # splits off every digit first
        with_class(path, "GPT2Tokenizer", add_prefix_space=False)
    else:
        legacy = request.param.endswith("legacy")
        metaspace_tokenizer(path, legacy)
        with_class(path, "LlamaTokenizer", legacy=legacy, add_bos_token=True)
    return path


def test_saved_tokenizer_is_the_same(directory: Path, tmp_path: Path) -> None:
    loaded = load_tokenizer(directory)
    loaded.save(tmp_path / "copy")
    copy = load_tokenizer(str(tmp_path / "copy"))
    for name in ("eos_id", "bos_id", "pad_id", "unk_id", "vocab_size", "special_ids", "chat_template"):
        assert getattr(copy, name) == getattr(loaded, name)
    eos = copy.ids_to_text([copy.eos_id], keep_special=True)
    texts = [TEXT, "\n\n1", "12  + 123", f"{eos}User: 6{eos} 16", f"6{eos}\n{eos}"]
    own = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    for text in texts:
        ids = loaded.text_to_ids(text)
        assert copy.text_to_ids(text) == own.encode(text, add_special_tokens=False).ids == ids, text
    assert copy.fingerprint() == loaded.fingerprint()
    files = {file.name: file.read_bytes() for file in directory.iterdir()}
    assert files == {file.name: file.read_bytes() for file in (tmp_path / "copy").iterdir()}


def test_what_is_made_here_is_what_old_and_new_transformers_can_read(directory: Path) -> None:
    """4.57 knows no ``TokenizersBackend``, and takes ``extra_special_tokens`` for a mapping."""
    config = json.loads((directory / "tokenizer_config.json").read_text())
    assert not {"extra_special_tokens", "backend", "is_local", "local_files_only"} & config.keys()
    if config["tokenizer_class"] == "PreTrainedTokenizerFast":
        theirs = transformers.AutoTokenizer.from_pretrained(directory)
        for text in (TEXT, "6  +  10\n\n1"):
            assert theirs.encode(text, add_special_tokens=False) == load_tokenizer(directory).text_to_ids(text)
        assert theirs.eos_token_id == load_tokenizer(directory).eos_id


def test_a_fingerprint_tells_what_follows_special_tokens(tmp_path: Path) -> None:
    """As between Llama's tokenizers with and without ``legacy``, which put a space there or not."""
    tokenizer = metaspace_tokenizer(tmp_path / "new", legacy=False)
    old = metaspace_tokenizer(tmp_path / "old", legacy=True)
    assert tokenizer.text_to_ids("User: fine\n") == old.text_to_ids("User: fine\n")
    assert tokenizer.text_to_ids("<s>User:") != old.text_to_ids("<s>User:")
    assert tokenizer.fingerprint() != old.fingerprint()


def test_special_tokens_that_are_left_to_a_class_are_its(tmp_path: Path) -> None:
    """GPT-2's own files name none."""
    train_bpe_tokenizer([TEXT] * 4, 400, tmp_path)
    with_class(tmp_path, "GPT2Tokenizer")
    file = tmp_path / "tokenizer_config.json"
    config = json.loads(file.read_text())
    del config["eos_token"], config["pad_token"]
    file.write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.eos_id == tokenizer.bos_id == 0


def test_chat_template(characters: Tokenizer, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "6+10"}, {"role": "assistant", "content": "16"}]
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja"):
        characters.apply_chat_template(messages)
    characters.save(tmp_path / "chat")
    (tmp_path / "chat" / "chat_template.jinja").write_text(CHATML)
    chat = load_tokenizer(tmp_path / "chat")
    assert chat.chat_template == CHATML
    assert chat.apply_chat_template(messages[:1]) == "<|im_start|>user\n6+10<|im_end|>\n<|im_start|>assistant\n"
    assert chat.apply_chat_template(messages, add_generation_prompt=False).endswith("assistant\n16<|im_end|>\n")
    chat.save(tmp_path / "again")
    assert load_tokenizer(tmp_path / "again").chat_template == CHATML


def test_what_templates_say_of_the_date_does_not_depend_on_the_day(characters: Tokenizer, tmp_path: Path) -> None:
    """As Llama 3.2's template asks for it."""
    characters.save(tmp_path / "chat")
    (tmp_path / "chat" / "chat_template.jinja").write_text(
        "{%- if not date_string is defined %}{%- set date_string = strftime_now('%d %b %Y') %}{%- endif %}"
        "Today Date: {{ date_string }}"
    )
    chat = load_tokenizer(tmp_path / "chat")
    assert chat.apply_chat_template([{"role": "user", "content": "6"}]) == "Today Date: 26 Jul 2024"
    chat.chat_template = "{%- macro day() %}{{ strftime_now( '%Y-%m-%d') }}{% endmacro %}{{ day() }}"
    assert chat.apply_chat_template([{"role": "user", "content": "6"}]) == "2024-07-26"


def test_a_generation_config_goes_with_the_tokenizer(any_tokenizer: Tokenizer, tmp_path: Path) -> None:
    """From archive to archive, until the model is exported: it may say more than one way to end."""
    any_tokenizer.save(tmp_path / "plain")
    assert not (tmp_path / "plain" / "generation_config.json").exists()
    (tmp_path / "plain" / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    load_tokenizer(tmp_path / "plain").save(tmp_path / "again")
    assert load_tokenizer(tmp_path / "again").generation_config == '{"eos_token_id": [1, 2]}'


def test_a_generation_config_names_more_ends_of_responses(characters: Tokenizer) -> None:
    assert characters.stop_ids == (0,)
    for text, ids in (
        ('{"eos_token_id": [7, 0, 5]}', (0, 7, 5)),
        ('{"eos_token_id": 4}', (0, 4)),
        ('{"eos_token_id": null}', (0,)),
        ('{"temperature": 0.6}', (0,)),
    ):
        characters.generation_config = text
        assert characters.stop_ids == ids
    for text in ("[]", '{"eos_token_id": ["</s>"]}', "{"):
        characters.generation_config = text
        with pytest.raises(TokenizerError, match=r"generation_config\.json cannot be read"):
            _ = characters.stop_ids


def test_special_tokens_can_be_kept_in_text(any_tokenizer: Tokenizer) -> None:
    ids, eos = any_tokenizer.text_to_ids("User: fine"), any_tokenizer.eos_id
    spelt = any_tokenizer.ids_to_text([eos], keep_special=True)
    assert spelt and any_tokenizer.ids_to_text([eos]) == ""
    text = any_tokenizer.ids_to_text([*ids, eos, *ids, eos], keep_special=True)
    assert re.sub(" *", "", text) == f"User:fine{spelt}" * 2
    assert [i for i in any_tokenizer.text_to_ids(text) if i == eos] == [eos, eos]


def test_chat_template_sees_special_tokens_and_may_refuse(characters: Tokenizer, tmp_path: Path) -> None:
    characters.save(tmp_path / "chat")
    template = tmp_path / "chat" / "chat_template.jinja"
    template.write_text("{{ messages[0]['content'] }}{{ eos_token }}")
    assert load_tokenizer(tmp_path / "chat").apply_chat_template([{"role": "user", "content": "6"}]) == "6<|endoftext|>"
    template.write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TokenizerError, match="roles must alternate"):
        load_tokenizer(tmp_path / "chat").apply_chat_template([{"role": "user", "content": "6"}])


def test_sentencepiece_model(sentencepiece_model: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(sentencepiece_model)
    text = "User: What is 6+10?\nAssistant:  é"
    ids = tokenizer.text_to_ids(text)
    reference = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_model))
    assert ids == reference.encode(text) and tokenizer.texts_to_ids([text, "6"])[0] == ids
    assert tokenizer.ids_to_text([tokenizer.bos_id or 0, *ids, tokenizer.eos_id]) == text
    assert (tokenizer.eos_id, tokenizer.bos_id, tokenizer.pad_id, tokenizer.vocab_size) == (2, 1, 2, 320)
    assert tokenizer.token_to_id("</s>") == 2 and tokenizer.token_to_id("no such token") is None
    assert tokenizer.chat_template is None

    tokenizer.save(tmp_path / "saved")
    saved = load_tokenizer(tmp_path / "saved")
    saved.save(tmp_path / "saved")  # onto itself
    os.rename(tmp_path / "saved", tmp_path / "moved")
    saved.save(tmp_path / "again")  # an archive's files were temporary
    os.rename(tmp_path / "again", tmp_path / "saved")
    assert saved.text_to_ids(text) == ids and type(saved) is type(tokenizer)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert theirs.encode(text, add_special_tokens=False) == ids
    for marked in ("<s>User: 6</s>", "User: 6</s> Assistant: 12</s></s>\n", "</s>", "6<s>6</s", ""):
        assert saved.text_to_ids(marked) == theirs.encode(marked, add_special_tokens=False), marked


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("plain", [True, False])
def test_sentencepiece_models_as_a_tokenizer_json(kind: str, plain: bool, tmp_path: Path) -> None:
    """The ids are sentencepiece's, spaces and symbols of the user's included."""
    (tmp_path / "corpus.txt").write_text("\n".join(f"What is {a}  + {a % 7}? It is fine: {a}" for a in range(400)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "corpus.txt"), model_prefix=str(tmp_path / "tiny"), vocab_size=320, model_type=kind,
        byte_fallback=True, normalization_rule_name="identity" if plain else "nmt_nfkc",
        remove_extra_whitespaces=not plain, user_defined_symbols=["<extra_id_0>"], hard_vocab_limit=False,
        minloglevel=2,
    )  # fmt: skip
    tokenizer = load_tokenizer(tmp_path / "tiny.model")
    tokenizer.save(tmp_path / "saved")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    reference = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tiny.model"))
    for text in ("What is  12 +   3?", "It is<extra_id_0>fine: ½ é 😀", "fine\n\n  fine  ", "", "x"):
        assert theirs.encode(text, add_special_tokens=False) == reference.encode(text), text
    ids = reference.encode("What is  12 + 3?")
    assert theirs.decode([*ids, tokenizer.eos_id], skip_special_tokens=True) == tokenizer.ids_to_text(ids)
    for marked in ("<s>What is</s> 12 </s></s>", "</s>", "6<s>fine"):
        assert theirs.encode(marked, add_special_tokens=False) == tokenizer.text_to_ids(marked), marked


def test_sentencepiece_models_of_another_kind_are_saved_for_sentencepiece(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "corpus.txt").write_text("What is it? It is fine.\n" * 9)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "corpus.txt"), model_prefix=str(tmp_path / "c"), vocab_size=20, model_type="char",
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    tokenizer = load_tokenizer(tmp_path / "c.model")
    tokenizer.save(tmp_path / "saved")
    assert "no exact equivalent among" in caplog.text and not (tmp_path / "saved" / "tokenizer.json").exists()
    assert load_tokenizer(tmp_path / "saved").text_to_ids("It is") == tokenizer.text_to_ids("It is")


def test_sentencepiece_model_with_chat_template(sentencepiece_model: Path, tmp_path: Path) -> None:
    (tmp_path / "some.model").write_bytes(sentencepiece_model.read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}" + CHATML)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "6"}]).startswith("<s><|im_start|>user\n6")


def test_what_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="nothing is downloaded"):
        load_tokenizer("gpt2")
    with pytest.raises(TokenizerError, match=r"found neither"):
        load_tokenizer(tmp_path)
    (tmp_path / "broken.model").write_bytes(b"not a model")
    with pytest.raises(TokenizerError, match=r"broken\.model is not a sentencepiece model"):
        load_tokenizer(tmp_path / "broken.model")
    (tmp_path / "vocabulary.txt").write_text("a")
    with pytest.raises(TokenizerError, match=r"ending in \.model"):
        load_tokenizer(tmp_path / "vocabulary.txt")


def test_a_folder_with_two_tokenizers_or_templates_is_refused(sentencepiece_model: Path, tmp_path: Path) -> None:
    """Unless they say the same, as most models' folders do."""
    folder = tmp_path / "folder"
    train_bpe_tokenizer([TEXT], 300, folder)
    (folder / "tokenizer.model").write_bytes(sentencepiece_model.read_bytes())
    with pytest.raises(TokenizerError, match=r"two tokenizers: \d+ of the 320 pieces of tokenizer.model have the same"):
        load_tokenizer(folder)
    load_tokenizer(sentencepiece_model).save(tmp_path / "both")
    config = tmp_path / "both" / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": "</s>", "chat_template": "{{ messages }}\n"}))
    template = tmp_path / "both" / "chat_template.jinja"
    template.write_text("{{ messages }}")
    assert load_tokenizer(tmp_path / "both").text_to_ids(TEXT) == load_tokenizer(sentencepiece_model).text_to_ids(TEXT)
    template.write_text("{{ messages[0] }}")
    with pytest.raises(TokenizerError, match=r"two chat templates, which differ: chat_template\.jinja, and"):
        load_tokenizer(tmp_path / "both")
    template.unlink()
    (tmp_path / "both" / "tokenizer.json").unlink()
    (tmp_path / "both" / "other.model").write_bytes(sentencepiece_model.read_bytes())
    with pytest.raises(TokenizerError, match=r"one sentencepiece .model file, found other.model, tokenizer.model"):
        load_tokenizer(tmp_path / "both")


def test_bytes_of_tokens(any_tokenizer: Tokenizer) -> None:
    """Of those that are a part of a character, too: what a vocabulary lacks it spells in bytes."""
    text = "12 é 😀\n☃"
    ids = any_tokenizer.text_to_ids(text)
    if any_tokenizer.unk_id in ids:
        pytest.skip("this vocabulary has no bytes")
    assert b"".join(map(any_tokenizer.token_bytes, ids)).decode().strip() == text


def test_a_tokenizer_without_a_stop_token_is_refused(characters: Tokenizer, tmp_path: Path) -> None:
    characters.save(tmp_path / "endless")
    file = tmp_path / "endless" / "tokenizer_config.json"
    config = json.loads(file.read_text())
    del config["eos_token"]
    file.write_text(json.dumps(config))
    with pytest.raises(TokenizerError, match="end-of-sequence"):
        load_tokenizer(tmp_path / "endless")


def test_pad_falls_back_to_eos(characters: Tokenizer, tmp_path: Path) -> None:
    characters.save(tmp_path / "padless")
    file = tmp_path / "padless" / "tokenizer_config.json"
    config = json.loads(file.read_text())
    del config["pad_token"]
    file.write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path / "padless")
    assert tokenizer.pad_id == tokenizer.eos_id == 0


# ---- the bytes of tokens, for masks ---------------------------------------------------------------


def tokenizer_of(kind: str, folder: Path, sentencepiece_model: Path) -> Tokenizer:
    if kind == "byte level":
        return train_bpe_tokenizer([TEXT, "Größe 数 🙂"], 300, folder)
    if kind == "characters":
        return train_character_tokenizer(TEXT + "é😀", folder)
    if kind == "sentencepiece":
        return load_tokenizer(sentencepiece_model)
    if kind == "sentencepiece in Hugging Face's form":
        load_tokenizer(sentencepiece_model).save(folder)
        (folder / "tokenizer.model").unlink()
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "unk_token": "<unk>"}))
        return load_tokenizer(folder)
    return metaspace_tokenizer(folder, legacy=kind.endswith("legacy"))


KINDS = ["byte level", "characters", "sentencepiece", "sentencepiece in Hugging Face's form", "metaspace", "a legacy"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_tokens_are_those_that_they_add_to_a_response(
    kind: str, tmp_path: Path, sentencepiece_model: Path
) -> None:
    """Of every id; and a mask has exactly the ids with which a text can go on, ends among them only where it ends."""
    tokenizer = tokenizer_of(kind, tmp_path, sentencepiece_model)
    spelt = vocabulary_bytes(tokenizer, tokenizer.vocab_size)
    start = tokenizer.text_to_ids("a")
    before = tokenizer.ids_to_text(start)
    for first in range(0, tokenizer.vocab_size, 7):
        ids = [i for i in range(first, min(first + 40, tokenizer.vocab_size)) if i not in tokenizer.special_ids]
        ids = [i for i in ids if i != tokenizer.unk_id and "\ufffd" not in tokenizer.ids_to_text([*start, i])]
        assert tokenizer.ids_to_text([*start, *ids]) == before + b"".join(spelt[i] for i in ids).decode()
    whole_alphabet = kind not in ("characters", "metaspace", "a legacy")
    texts = ["What is 6", "What is 6+10?", "Größe 数 🙂" if whole_alphabet else "is 1?"]
    matcher = Grammars(tokenizer, tokenizer.vocab_size).matcher(
        lark_grammar("start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts))
    )
    mask = np.empty(matcher.num_bytes, dtype=np.uint8)
    wanted, made = texts[-1].encode(), b""
    while made != wanted:
        matcher.fill(mask)
        allowed = set(np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist())
        fitting = {i for i, token in enumerate(spelt) if any(t.encode().startswith(made + token) for t in texts)}
        fitting = {i for i in fitting if spelt[i] and i not in tokenizer.special_ids and i != tokenizer.unk_id}
        ends = set(tokenizer.stop_ids) if made.decode(errors="replace") in texts else set()
        assert allowed == fitting | ends
        token = max((i for i in fitting if wanted.startswith(made + spelt[i])), key=lambda i: len(spelt[i]))
        made += spelt[token]
        matcher.take([token])


def test_a_tokenizer_whose_tokens_depend_on_their_neighbours_makes_no_masks(tmp_path: Path) -> None:
    """Bytes that nobody can know would let through what is no JSON."""
    vocabulary = {"[UNK]": 0, "</s>": 1, "a": 2, "##b": 3, ",": 4, "it": 5, "'": 6, "s": 7}
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    backend.decoder = tokenizers.decoders.WordPiece(cleanup=True)
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", eos_token="</s>")
    save_made(made, tmp_path)
    with pytest.raises(TokenizerError, match="its decoder WordPiece may change"):
        Grammars(load_tokenizer(tmp_path), 8).matcher(lark_grammar('start: "a"'))
