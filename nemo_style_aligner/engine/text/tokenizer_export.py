"""A tokenizer's files for programs outside this project, which then write texts as the model was trained on them."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

from nemo_style_aligner.engine.text.sentencepiece_model import put_around_texts
from nemo_style_aligner.engine.text.text_format import ChatPromptTokens
from nemo_style_aligner.engine.text.tokenizer import GENERATION_CONFIG, Tokenizer, TokenizerError, load_tokenizer

logger = logging.getLogger(__name__)

_TEMPLATE, _CONFIG, _FAST = "chat_template.jinja", "tokenizer_config.json", "tokenizer.json"


def save_as_trained(tokenizer: Tokenizer, directory: Path, *, scores: bool = False) -> None:
    """Write a Hugging Face directory whose chat template, BOS rule and end tokens are those of ``tokenizer.format``.

    What the format does not know stays as the tokenizer has it.

    Args:
        scores: the model is a reward model: with ``append_eod``, texts get an EOS token.
    """
    tokenizer.save(directory)
    written = tokenizer.format
    _write_ends(tokenizer, directory)
    if written.chat == "text" and tokenizer.chat_template is not None:
        logger.warning(
            "the model was trained on texts of another form than the tokenizer's chat template: it is left out, "
            "since a chat server would speak it"
        )
        _write_template(directory, None)
    elif written.chat == "markers" and written.chat_prompt_tokens is not None:
        _write_template(directory, _template_of(written.chat_prompt_tokens, bool(written.add_bos)))
    elif written.add_bos and tokenizer.chat_template is not None and not _renders_bos(tokenizer):
        _write_template(directory, "{{- bos_token }}" + tokenizer.chat_template)
    append_eod = bool(scores and written.append_eod)
    if written.add_bos is not None or append_eod:
        _write_special_tokens(tokenizer, directory, written.add_bos, append_eod)


def _write_ends(tokenizer: Tokenizer, directory: Path) -> None:
    """Have the generation config name what ends responses: tokens by id, other strings as transformers knows them."""
    ends = [end for end in tokenizer.format.end_strings if tokenizer.token_to_id(end) is None]
    config = json.loads(tokenizer.generation_config or "{}")
    stop_ids = list(tokenizer.stop_ids)
    if set(stop_ids) - {tokenizer.eos_id} - set(_as_list(config.get("eos_token_id"))) or ends:
        config |= {"eos_token_id": stop_ids if stop_ids[1:] else stop_ids[0]}
        config |= {"stop_strings": ends} if ends else {}
        (directory / GENERATION_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]


def _write_template(directory: Path, template: str | None) -> None:
    """Replace a directory's chat templates, wherever they are written; None: by none."""
    (directory / _TEMPLATE).unlink(missing_ok=True)
    (directory / "chat_template.json").unlink(missing_ok=True)
    shutil.rmtree(directory / "additional_chat_templates", ignore_errors=True)
    file = directory / _CONFIG
    config = json.loads(file.read_text(encoding="utf-8"))
    if config.pop("chat_template", None) is not None:
        file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if template is not None:
        (directory / _TEMPLATE).write_text(template, encoding="utf-8")


def _template_of(tokens: ChatPromptTokens, with_bos: bool) -> str:
    """The chat template that renders what `ChatRenderer` renders in markers: a system turn, then all others."""
    parts = (tokens.system_turn_start, tokens.turn_start, tokens.end_of_turn, tokens.end_of_name)
    system, turn, end, name = (json.dumps(text, ensure_ascii=False) for text in parts)
    return (
        ("{{- bos_token }}" if with_bos else "")
        + "{%- set first = messages[0]['content'] if messages and messages[0]['role'] == 'system' else '' -%}"
        f"{{{{- {system} + 'System' + {name} + first + {end} }}}}"
        "{%- for message in messages -%}{%- if not (loop.first and message['role'] == 'system') -%}"
        f"{{{{- {turn} + message['role'].capitalize() + {name} + message['content'] + {end} }}}}"
        "{%- endif -%}{%- endfor -%}"
        f"{{%- if add_generation_prompt -%}}{{{{- {turn} + 'Assistant' + {name} }}}}{{%- endif -%}}"
    )


def _renders_bos(tokenizer: Tokenizer) -> bool:
    try:
        text = tokenizer.apply_chat_template([{"role": "user", "content": "a"}])
    except TokenizerError:
        return False
    return tokenizer.text_to_ids(text)[:1] == [tokenizer.bos_id]


def _write_special_tokens(tokenizer: Tokenizer, directory: Path, add_bos: bool | None, append_eod: bool) -> None:
    """Have the files put BOS before texts (None: as they do), and EOS behind them, or not: servers do as they say."""
    import tokenizers

    adds_bos = load_tokenizer(directory).adds_bos
    add_bos = adds_bos if add_bos is None else add_bos
    file = directory / _CONFIG
    config = json.loads(file.read_text(encoding="utf-8")) | {"add_bos_token": add_bos, "add_eos_token": append_eod}
    file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if not (directory / _FAST).is_file() or (adds_bos == add_bos and not append_eod):
        return
    fast = tokenizers.Tokenizer.from_file(str(directory / _FAST))
    fast.post_processor = tokenizers.processors.Sequence([])
    put_around_texts(fast, tokenizer.bos_id if add_bos else None, tokenizer.eos_id if append_eod else None)
    fast.save(str(directory / _FAST))
