"""`nsa serve` and `nsa chat` as their users have them: a process, OpenAI's client, numbers of transformers."""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import http.server
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import requests
import torch
from click.testing import CliRunner
from job_processes import Job, environment, script, stored_weights
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file, save_file
from small_models import CHATML, SHAPE
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.parallel.groups import single_process
from nemo_style_aligner.engine.parallel.machine import free_port
from nemo_style_aligner.engine.text.tokenizer import load_tokenizer
from nemo_style_aligner.engine.text.tokenizer_training import train_bpe_tokenizer
from nemo_style_aligner.errors import UserError
from nemo_style_aligner.guard.secret import TOKEN_FILE_VARIABLE
from nemo_style_aligner.tools.cli.main import nsa
from nemo_style_aligner.tools.serving.checkpoint import load_model
from nemo_style_aligner.trainer.checkpoints.nemo_archive import save_nemo
from nemo_style_aligner.trainer.models.gpt import build_model

KEY = "sk-of-a-test"
PROMPT = "What is 12 times 3?"
MAX_LENGTH = 256
ORIGIN = "https://chat.example.org"
TEMPLATE = CHATML + "{% if add_generation_prompt and thinking is defined and not thinking %}no thoughts\n{% endif %}"
JSON = {"Content-Type": "application/json"}
KNOWN = {"Authorization": f"Bearer {KEY}"}
GREEDY = ("--temperature", "0", "--max-tokens", "9")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory: a tiny Llama, a byte-level tokenizer, a chat template."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    tokenizer = train_bpe_tokenizer([PROMPT, "The answer is 36, naturally. Größe 数"], 300, path)
    torch.manual_seed(5)
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        num_hidden_layers=2,
        max_position_embeddings=MAX_LENGTH,
        initializer_range=0.2,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_id,
        bos_token_id=None,
        **sizes,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@contextlib.contextmanager
def serving(folder: Path, log: Path, *options: str) -> Iterator[tuple[Job, str]]:
    """`nsa serve` as a process; its URL."""
    command = [
        sys.executable,
        "-m",
        "nemo_style_aligner",
        "serve",
        str(folder),
        "--port",
        "0",
        "--precision",
        "32",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEMO_STYLE_ALIGNER_TOKEN", KEY)
        job = Job([*command, "--num-slots", "8", *options], log)
    try:
        deadline = time.monotonic() + 120
        while not (found := re.search(r"ready: (\S+)/v1", job.output())):
            assert job.process.poll() is None and time.monotonic() < deadline, job.describe()
            time.sleep(0.1)
        yield job, found[1]
    finally:
        job.stop()


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(folder, tmp_path_factory.mktemp("serve") / "log", "--allow-origin", ORIGIN) as (job, url):
        yield url
        assert job.stop() == 0, job.describe()


@pytest.fixture(scope="module")
def client(server: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server}/v1", api_key=KEY, max_retries=0, timeout=60)


def running(url: str) -> dict[str, float]:
    text = requests.get(f"{url}/metrics", headers={"Authorization": f"Bearer {KEY}"}, timeout=10).text
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {sample.name.removeprefix("aligner_generation_"): sample.value for sample in samples}


def test_numbers_are_those_of_transformers(folder: Path, client: openai.OpenAI) -> None:
    """Greedy responses, and log-probs of prompts and responses, with several prompts of different lengths in one go."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), load_tokenizer(folder)
    prompts = [tokenizer.text_to_ids(text) for text in (PROMPT, "The", PROMPT * 4, "12 数")]
    answer = client.completions.create(
        model="tiny", prompt=prompts, max_tokens=12, temperature=0, echo=True, logprobs=3, stop=[]
    )
    for index, (prompt, choice) in enumerate(zip(prompts, answer.choices, strict=True)):
        assert choice.index == index and choice.logprobs is not None
        given = choice.logprobs
        made = len(given.tokens) - len(prompt)
        whole = model.generate(torch.tensor([prompt]), max_new_tokens=made, do_sample=False)
        logprobs = model(whole).logits[0].log_softmax(-1)
        expected = logprobs[:-1].gather(1, whole[0, 1:, None])[:, 0]
        assert given.token_logprobs[0] is None and given.top_logprobs[0] is None
        torch.testing.assert_close(torch.tensor(given.token_logprobs[1:]), expected, atol=2e-4, rtol=1e-4)
        for place in range(1, len(given.tokens)):
            best = sorted(given.top_logprobs[place].values(), reverse=True)[:3]
            torch.testing.assert_close(torch.tensor(best), logprobs[place - 1].topk(3).values, atol=2e-4, rtol=1e-4)
        assert choice.text.startswith(tokenizer.ids_to_text(prompt))


def test_scores_of_long_prompts_do_not_depend_on_chunks_or_neighbours(client: openai.OpenAI) -> None:
    """More rows than one pass scores; equal prompts side by side share no pages then."""
    prompt = (PROMPT + " The answer is 36. ") * 8
    options: dict[str, Any] = {"model": "tiny", "max_tokens": 0, "temperature": 0, "echo": True, "logprobs": 0}
    one = client.completions.create(prompt=prompt, **options)
    assert one.usage is not None and one.usage.completion_tokens == 0 and one.choices[0].text == prompt
    many = client.completions.create(prompt=[prompt] * 5, **options)
    scores = [choice.logprobs.token_logprobs[1:] for choice in [*one.choices, *many.choices] if choice.logprobs]
    for other in scores[1:]:
        assert other == pytest.approx(scores[0], abs=1e-4)


def test_seeds_choices_and_ids(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 16, "extra_body": {"ignore_eos": True}}
    several = client.completions.create(**options, n=3, seed=7)
    texts = [choice.text for choice in several.choices]
    assert len(set(texts)) == 3 and texts == [c.text for c in client.completions.create(**options, n=3, seed=7).choices]
    assert client.completions.create(**options, seed=7).choices[0].text == texts[0]
    assert client.completions.create(**options).choices[0].text != client.completions.create(**options).choices[0].text
    options["extra_body"] |= {"return_token_ids": True}
    answer = client.completions.create(**options, seed=7, logprobs=0, temperature=1).to_dict()
    (choice,) = answer["choices"]  # type: ignore[misc]
    assert choice["weight_version"] == 0 and len(choice["token_ids"]) == 16
    assert choice["sampling_logprobs"] == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-4)
    assert client.completions.create(**options, seed=7, temperature=0.5, top_p=0.5).choices[0].text != texts[0]


def test_streams_say_the_same_and_stop_strings_end_them(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 60, "seed": 3}
    options["extra_body"] = {"ignore_eos": True}
    whole = client.completions.create(**options).choices[0].text
    pieces = [c.choices[0].text for c in client.completions.create(**options, stream=True)]
    # How many pieces is a matter of the machine's load: tokens that wait for the writer go out together.
    assert "".join(pieces) == whole and sum(map(bool, pieces)) > 1
    echoed = client.completions.create(**options, stream=True, echo=True)
    assert "".join(chunk.choices[0].text for chunk in echoed) == PROMPT + whole
    end = whole[20:23]
    cut = client.completions.create(**options, stop=[end, "never there"])
    assert cut.choices[0].finish_reason == "stop" and cut.choices[0].text == whole[: whole.index(end)]
    stream = list(client.completions.create(**options, stop=end, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in stream if c.choices) == cut.choices[0].text
    assert stream[-1].usage == cut.usage


def test_conversations(client: openai.OpenAI, server: str) -> None:
    messages: list[Any] = [{"role": "system", "content": "Be short."}, {"role": "user", "content": PROMPT}]
    options: dict[str, Any] = {"model": "tiny", "messages": messages, "max_tokens": 20, "temperature": 0}
    answer = client.chat.completions.create(**options, logprobs=True, top_logprobs=2)
    (choice,) = answer.choices
    stream = client.chat.completions.create(**options, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in stream) == choice.message.content
    assert choice.logprobs is not None and choice.logprobs.content is not None and answer.usage is not None
    assert len(choice.logprobs.content) == answer.usage.completion_tokens
    assert choice.logprobs.content[0].logprob == choice.logprobs.content[0].top_logprobs[0].logprob
    text = (
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\n" + PROMPT + "<|im_end|>\n<|im_start|>assistant\n"
    )
    parts = [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]
    for body in ({"prompt": text}, {"messages": messages}, {"messages": [messages[0], *parts]}):
        reply = requests.post(f"{server}/tokenize", json=body, headers={"Authorization": f"Bearer {KEY}"}, timeout=10)
        assert reply.json()["count"] == answer.usage.prompt_tokens, reply.text
    prompt = client.completions.create(model="tiny", prompt=text, max_tokens=20, temperature=0)
    assert prompt.choices[0].text == choice.message.content


def test_tokens_that_are_parts_of_characters_have_their_bytes(client: openai.OpenAI) -> None:
    """And a place in the text: that of the character. So have special tokens, and those that follow either."""
    options: dict[str, Any] = {"model": "tiny", "max_tokens": 60, "temperature": 0, "extra_body": {"ignore_eos": True}}
    messages: Any = [{"role": "user", "content": "数"}]
    (choice,) = client.chat.completions.create(messages=messages, logprobs=True, **options).choices
    assert choice.logprobs is not None and choice.logprobs.content is not None
    scored = choice.logprobs.content
    assert any(token.token.startswith("token_id:") for token in scored), "the model says no part of a character"
    special = ("<|im_end|>", "<|endoftext|>")
    spelt = b"".join(bytes(token.bytes or []) for token in scored if token.token not in special)
    assert spelt.decode(errors="replace") == choice.message.content
    text = "Größe ☃<|endoftext|>12 ☃☃ The"
    echoed = client.completions.create(prompt=text, echo=True, logprobs=0, stop=[], **options).choices[0]
    assert echoed.logprobs is not None and echoed.logprobs.text_offset is not None
    places = [*zip(echoed.logprobs.tokens or [], echoed.logprobs.text_offset, strict=True)]
    assert {place for token, place in places if token.startswith("token_id:")} >= {6, 23, 24}
    whole = [(token, place) for token, place in places if not token.startswith("token_id:") and token not in special]
    assert all(echoed.text.startswith(token, place) for token, place in whole) and len(whole) > 10
    named = client.completions.create(
        model="tiny", prompt=text, logprobs=2, max_tokens=1, extra_body={"return_tokens_as_token_ids": True}
    )
    assert named.choices[0].logprobs is not None
    assert all(re.fullmatch(r"token_id:\d+", token) for token in named.choices[0].logprobs.tokens or [""])


def test_penalties_biases_and_ends_reach_the_engine(client: openai.OpenAI) -> None:
    """And special tokens are shown to those who want them; their log-probs are the model's own."""
    options: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 30, "temperature": 0, "logprobs": 0}
    more = {"ignore_eos": True, "return_token_ids": True}

    def ids(extra: Any = (), **fields: Any) -> list[int]:
        answer: Any = client.completions.create(**options, **fields, extra_body={**more, **dict(extra)}).to_dict()
        return list(answer["choices"][0]["token_ids"])

    plain = ids()
    assert len(set(plain)) < len(plain)
    assert len(set(ids(frequency_penalty=2, presence_penalty=2))) > len(set(plain))
    assert plain[0] not in ids(logit_bias={str(plain[0]): -100})
    assert ids(logit_bias={"77": 100}) == [77] * 30
    assert ids({"temperature": 1, "min_p": 1}) == plain
    (end,) = {plain[9]}
    assert ids({"stop_token_ids": [end]}) == plain[: plain.index(end) + 1]
    biased: Any = {"logit_bias": {"0": 100}, "extra_body": {"ignore_eos": True, "skip_special_tokens": False}}
    special = client.completions.create(**options, **biased).choices[0]
    assert special.text == "<|endoftext|>" * 30 and special.logprobs is not None
    assert max(special.logprobs.token_logprobs or [0]) < -0.01, "the log-probs are not those of the model"


def test_chunks_are_of_one_choice_and_the_last_has_its_end_alone(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "n": 3, "stream": True, "seed": 4}
    messages: Any = [{"role": "user", "content": PROMPT}]
    chats = [chunk.to_dict() for chunk in client.chat.completions.create(messages=messages, **options)]
    texts = [chunk.to_dict() for chunk in client.completions.create(prompt=PROMPT, logprobs=1, **options)]
    for chunks, empty in ((chats, {"delta": {}}), (texts, {"text": ""})):
        assert all(len(chunk["choices"]) == 1 for chunk in chunks)
        for index in range(3):
            *pieces, last = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
            assert last["finish_reason"] in ("length", "stop") and last.items() >= empty.items()
            assert pieces and not any(piece["finish_reason"] for piece in pieces)
    firsts = {chunk["choices"][0]["index"]: chunk["choices"][0]["delta"] for chunk in reversed(chats)}
    assert all(first["role"] == "assistant" for first in firsts.values())


def test_a_prompt_of_all_the_context_can_be_scored(folder: Path, client: openai.OpenAI) -> None:
    ids = load_tokenizer(folder).text_to_ids(PROMPT * 60)[:MAX_LENGTH]
    options: dict[str, Any] = {"model": "tiny", "echo": True, "logprobs": 0}
    given = client.completions.create(prompt=ids, max_tokens=0, **options).choices[0].logprobs
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = logprobs[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0]
    assert given is not None and given.token_logprobs is not None
    torch.testing.assert_close(torch.tensor(given.token_logprobs[1:]), expected, atol=2e-4, rtol=1e-4)
    # LiteLLM and others tell this error by its code, or by these words.
    for more in ({"prompt": ids, "max_tokens": 1}, {"prompt": "a", "max_tokens": 10**6}, {"prompt": [1] * 300}):
        with pytest.raises(openai.BadRequestError, match="maximum context length is 256 tokens") as caught:
            client.completions.create(model="tiny", **more)
        assert caught.value.code == "context_length_exceeded"


NOTHING: dict[str, Any] = {
    **dict.fromkeys(("use_beam_search", "echo", "logprobs", "stream", "include_stop_str_in_output"), False),
    **{key: {} for key in ("logit_bias", "stream_options", "metadata", "structured_outputs")},
    **{key: [] for key in ("tools", "functions", "stop", "stop_token_ids", "bad_words", "documents")},
    "tool_choice": "none",
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "service_tier": "auto",
    "n": 1.0,
    "best_of": 1,
    "max_tokens": 9.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "priority": 0,
    "top_p": 0,
    "user": "me",
    "store": True,
    "cache_salt": "x",
    "skip_special_tokens": True,
    "return_token_ids": False,
    "modalities": ["text"],
    "repetition_penalty": 1,
    "length_penalty": 1.0,
    "seed": 5.0,
    "guided_json": None,
    "guided_regex": None,
    "return_tokens_as_token_ids": False,
    "prompt_cache_key": "k",
    "safety_identifier": "s",
    "verbosity": "medium",
}


def test_fields_that_ask_for_nothing_are_accepted(server: str) -> None:
    """And change nothing: `top_p` 0 leaves the likeliest token, as temperature 0 does."""
    session = requests.Session()
    session.headers.update(KNOWN)
    for path, body in (
        ("completions", {"prompt": PROMPT, "max_tokens": 9, "temperature": 0}),
        ("chat/completions", {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 9, "temperature": 0}),
    ):
        plain = session.post(f"{server}/v1/{path}", json=body, timeout=30).json()["choices"]
        for name, value in NOTHING.items():
            sent = body | {name: value} | ({"temperature": 1} if name == "top_p" else {})
            reply = session.post(f"{server}/v1/{path}", json=sent, timeout=30)
            assert reply.status_code == 200 and reply.json()["choices"] == plain, (name, value, reply.text)
        two = session.post(f"{server}/v1/{path}", json=body | {"n": 2, "best_of": 2}, timeout=30)
        assert len(two.json()["choices"]) == 2
        for name, value in (("suffix", "b"), ("tool_choice", "required"), ("priority", 1), ("n", 1.5), ("best_of", 2)):
            reply = session.post(f"{server}/v1/{path}", json=body | {name: value}, timeout=30)
            assert reply.status_code == 400 and reply.json()["error"]["param"] == name, reply.text


def test_responses_that_are_begun_are_continued(folder: Path, client: openai.OpenAI, server: str) -> None:
    """As transformers renders them; whoever asks, by whichever client's field, gets what the text alone would."""
    tokenizer = load_tokenizer(folder)
    theirs = AutoTokenizer.from_pretrained(folder)
    user, begun = {"role": "user", "content": PROMPT}, {"role": "assistant", "content": "The answer is "}
    ids = theirs.apply_chat_template([user, begun], continue_final_message=True, return_dict=False)
    vllm = {"continue_final_message": True, "add_generation_prompt": False}
    for body in (
        {"messages": [user, begun], **vllm},
        {"messages": [user, begun | {"prefix": True}]},
        {"messages": [user, begun]},
    ):
        reply = requests.post(f"{server}/tokenize", json=body, headers=KNOWN, timeout=10)
        assert reply.json().get("tokens") == ids, reply.text
    options: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "temperature": 0}
    text = client.completions.create(prompt=tokenizer.ids_to_text(ids, keep_special=True), **options).choices[0].text
    messages: Any = [user, begun]
    answer = client.chat.completions.create(messages=messages, extra_body=vllm, **options)
    assert answer.choices[0].message.content == text
    for wrong, param in (
        ({"messages": [user], "continue_final_message": True}, "messages"),
        ({"messages": [begun, user | {"prefix": True}]}, "messages"),
        ({"messages": [user], "add_generation_prompt": False}, "add_generation_prompt"),
    ):
        reply = requests.post(f"{server}/v1/chat/completions", json=wrong, headers=KNOWN, timeout=10)
        assert reply.status_code == 400 and reply.json()["error"]["param"] == param, reply.text


def test_variables_of_the_chat_template(folder: Path, server: str) -> None:
    """They reach it, as transformers' do; one that it does not read is refused, unless it asks for nothing."""
    theirs = AutoTokenizer.from_pretrained(folder)
    user = {"role": "user", "content": PROMPT}

    def ids(**variables: Any) -> Any:
        body = {"messages": [user], "chat_template_kwargs": variables}
        reply = requests.post(f"{server}/tokenize", json=body, headers=KNOWN, timeout=10)
        return reply.json().get("tokens") or reply.json()["error"]["message"]

    def expected(**variables: Any) -> Any:
        return theirs.apply_chat_template([user], add_generation_prompt=True, return_dict=False, **variables)

    assert ids(thinking=False) == expected(thinking=False) != expected()
    assert ids(thinking=True) == ids(other=False) == expected()
    assert "'other' is nothing that the model's chat template reads" in ids(other=True)
    for name in ("messages", "eos_token", "chat_template"):
        assert "no variable" in ids(**{name: "x"})


def test_token_ids_stand_where_vllm_has_them(client: openai.OpenAI) -> None:
    """Of a conversation's prompt beside the choices, once; of a text's prompt in each choice."""
    options: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": 8,
        "extra_body": {"return_token_ids": True, "ignore_eos": True},
    }
    messages: Any = [{"role": "user", "content": PROMPT}]
    chat: Any = client.chat.completions.create(messages=messages, n=2, **options).to_dict()
    text: Any = client.completions.create(prompt=[PROMPT, "a"], **options).to_dict()
    assert len(chat["prompt_token_ids"]) == chat["usage"]["prompt_tokens"] and len(chat["choices"][1]["token_ids"]) == 8
    assert "prompt_token_ids" not in chat["choices"][0] and "prompt_token_ids" not in text
    assert [len(choice["prompt_token_ids"]) for choice in text["choices"]][1] == 1
    chunks: Any = [c.to_dict() for c in client.chat.completions.create(messages=messages, stream=True, **options)]
    assert chunks[0]["prompt_token_ids"] == chat["prompt_token_ids"] and "prompt_token_ids" not in chunks[1]
    assert sum(len(chunk["choices"][0].get("token_ids", [])) for chunk in chunks) == 8


def test_vllms_generate_takes_token_ids_and_gives_them(client: openai.OpenAI, server: str) -> None:
    """The ids and log-probs that completions give, of the distribution sampled from, spelt as vLLM does; streams, too.

    The bodies are those of renderers 0.1.12, the client of verifiers 0.4, and of vLLM's own tests.
    """
    ids = [5, 7, 9, 40]
    sampling = {"temperature": 0.7, "top_p": 0.9, "n": 2, "seed": 3, "max_tokens": 12, "ignore_eos": True}
    expected: Any = client.completions.create(
        model="tiny", prompt=ids, n=2, seed=3, max_tokens=12, temperature=0.7, top_p=0.9,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    ).to_dict()  # fmt: skip
    end = expected["choices"][0]["token_ids"][5]
    body = {
        "model": "tiny",
        "token_ids": ids,
        "sampling_params": {**sampling, "stop_token_ids": [], "logprobs": 1, "skip_special_tokens": False},
        "cache_salt": "an episode",
        "priority": 0,
    }

    def ask(**changes: Any) -> Any:
        url = f"{server}/inference/v1/generate"
        return requests.post(url, json={**body, **changes}, headers=KNOWN | {"X-Session-ID": "1"}, timeout=30)

    answer = ask().json()
    assert answer["request_id"] and answer["usage"] == expected["usage"]
    for choice, other in zip(answer["choices"], expected["choices"], strict=True):
        assert (choice["token_ids"], choice["finish_reason"]) == (other["token_ids"], "length")
        content = choice["logprobs"]["content"]
        assert [token["token"] for token in content] == [f"token_id:{i}" for i in other["token_ids"]]
        assert [token["logprob"] for token in content] == other["sampling_logprobs"]
    chunks = [json.loads(line[6:]) for line in ask(stream=True).iter_lines() if line.startswith(b"data: {")]
    for index, choice in enumerate(answer["choices"]):
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == index]
        assert [i for part in parts for i in part["token_ids"]] == choice["token_ids"] and len(parts) > 3
        assert [t for part in parts for t in (part["logprobs"] or {}).get("content", [])] == choice["logprobs"][
            "content"
        ]
    stopped = ask(sampling_params=body["sampling_params"] | {"stop_token_ids": [end], "logprobs": None}).json()
    first = stopped["choices"][0]
    assert (first["finish_reason"], first["logprobs"]) == ("stop", None)
    assert (
        first["token_ids"] == expected["choices"][0]["token_ids"][: 1 + expected["choices"][0]["token_ids"].index(end)]
    )
    for wrong, param in (
        ({"token_ids": None}, "token_ids"),
        ({"token_ids": []}, "token_ids"),
        ({"features": {"image": 1}}, "features"),
        ({"temperature": 1}, "temperature"),
        ({"sampling_params": {"logprobs": 2}}, "logprobs"),
        ({"sampling_params": {"stream": True}}, "stream"),
        ({"sampling_params": {"prompt_logprobs": 1}}, "prompt_logprobs"),
        ({"token_ids": ids * 99}, "token_ids"),
    ):
        reply = ask(**wrong)
        assert reply.status_code == 400 and reply.json()["error"]["param"] == param, reply.text


def test_what_nemo_gym_asks_of_a_policy(server: str) -> None:
    """NeMo-Gym 0.7's model server: ids of prompt and response, and the log-probs of these under their ids."""
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": PROMPT}],
        "logprobs": True,
        "top_logprobs": 0,
        "return_tokens_as_token_ids": True,
        "return_token_ids": True,
        "max_tokens": 5,
        "parallel_tool_calls": True,
        "metadata": {},
        "store": False,
    }
    reply = requests.post(f"{server}/v1/chat/completions", json=body, headers=KNOWN, timeout=30).json()
    (choice,) = reply["choices"]
    tokens = [token["token"] for token in choice["logprobs"]["content"]]
    assert tokens == [f"token_id:{i}" for i in choice["token_ids"]] and reply["prompt_token_ids"]


def test_the_page_needs_no_key_and_reaches_nobody_else(server: str) -> None:
    """What it asks for has one; its script is the one that its policy names."""
    page = requests.get(server, timeout=10)
    policy, text = page.headers["Content-Security-Policy"], page.content.decode()
    script = text.split("<script>")[1].split("</script>")[0].encode()
    assert page.status_code == 200 and base64.b64encode(hashlib.sha256(script).digest()).decode() in policy
    assert "connect-src 'self'" in policy and "default-src 'none'" in policy
    assert not re.search(r"https?://|src=|innerHTML", text) and KEY not in text and "tiny" not in text
    assert requests.post(server, timeout=10).status_code in (401, 405)
    assert requests.get(f"{server}/v1/models", timeout=10).status_code == 401


def test_other_clients_ways_in(server: str) -> None:
    """Azure's and Anthropic's header for the key, a slash at the end, a body in chunks; and who has the wrong one."""
    for name in ("api-key", "x-api-key"):
        reply = requests.get(f"{server}/v1/models/", headers={name: KEY}, timeout=10)
        assert reply.status_code == 200 and reply.json()["data"][0]["id"] == "tiny"
        wrong = requests.get(f"{server}/v1/models", headers={name: "wrong"}, timeout=10)
        assert wrong.status_code == 401 and wrong.json()["error"]["code"] == "invalid_api_key"
    body = json.dumps({"prompt": PROMPT * 10, "max_tokens": 1}).encode()
    pieces = (body[i : i + 7] for i in range(0, len(body), 7))
    chunked = requests.post(f"{server}/v1/completions", data=pieces, headers=KNOWN | JSON, timeout=10)
    assert chunked.status_code == 200, chunked.text
    stranger = requests.post(f"{server}/v1/completions", data=iter([b" " * 99999]), headers=JSON, timeout=10)
    assert stranger.status_code == 401


def test_pages_of_an_allowed_origin_may_ask_and_no_others(server: str) -> None:
    """What a browser asks before it sends a key has no key; answers and errors say who may read them."""
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    url, body = f"{server}/v1/completions", {"prompt": "a", "max_tokens": 1}
    before = requests.options(url, headers={"Origin": ORIGIN, **asks}, timeout=10)
    assert before.status_code == 204 and before.headers["Access-Control-Allow-Headers"] == asks[[*asks][1]]
    assert "POST" in before.headers["Access-Control-Allow-Methods"]
    for key, status in ((KNOWN, 200), ({}, 401)):
        reply = requests.post(url, json=body, headers={"Origin": ORIGIN, **key}, timeout=10)
        assert reply.status_code == status and reply.headers["Access-Control-Allow-Origin"] == ORIGIN
    other = requests.options(url, headers={"Origin": "https://evil.example.org", **asks}, timeout=10)
    assert other.status_code == 401 and "Access-Control-Allow-Origin" not in other.headers


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"frequency_penalty": 2.5}, "frequency_penalty"),
    ({"extra_body": {"min_p": 1.5}}, "min_p"),
    ({"extra_body": {"stop_token_ids": [99999]}}, "stop_token_ids"),
    ({"extra_body": {"nobody_knows": 1}}, "nobody_knows"),
    ({"extra_body": {"guided_json": []}}, "guided_json"),
    ({"max_tokens": MAX_LENGTH}, "max_tokens"),
    ({"temperature": -0.5}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"logprobs": 50}, "logprobs"),
    ({"stop": [""]}, "stop"),
    ({"prompt": [99999]}, "prompt"),
    ({"prompt": [[1, 2], []]}, "prompt"),
    ({"n": 100000}, "n"),
    ({"best_of": 4}, "best_of"),
    ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options"),
]


@pytest.mark.parametrize("fields, param", REFUSED, ids=[param for _, param in REFUSED])
def test_what_is_not_supported_is_refused_by_name(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**{"model": "tiny", "prompt": PROMPT, **fields})
    assert caught.value.param == param and f"{param}" in caught.value.message


def test_no_value_of_a_field_breaks_the_service(server: str) -> None:
    """Whatever it is, it is used or refused; and if it is refused, the message names the field."""
    values: list[Any] = [
        -1,
        0,
        3,
        1.5,
        10**30,
        True,
        "",
        "a",
        "\ud800",
        [],
        [1],
        ["a"],
        [[1], "a"],
        [True],
        [-1],
        {},
        [{}],
    ]
    names = "prompt messages max_tokens max_completion_tokens temperature top_p top_k n stop seed logprobs top_logprobs"
    names += " echo stream stream_options min_tokens repetition_penalty ignore_eos user model best_of tools other"
    names += " min_p presence_penalty frequency_penalty logit_bias stop_token_ids skip_special_tokens tool_choice"
    names += " token_ids sampling_params request_id response_format structured_outputs guided_json guided_regex"
    names += " guided_choice guided_grammar"
    good = {"completions": {"prompt": "a", "max_tokens": 2}, "chat/completions": {"messages": [{"role": "user"}]}}
    good["chat/completions"] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    good["../inference/v1/generate"] = {"token_ids": [5], "sampling_params": {"max_tokens": 2}}
    session = requests.Session()
    session.headers["Authorization"] = f"Bearer {KEY}"
    for path, body in good.items():
        for name in names.split():
            for value in values:
                reply = session.post(f"{server}/v1/{path}", json=body | {name: value}, timeout=30)
                assert reply.status_code in (200, 400, 404), (name, value, reply.text)
                assert reply.status_code == 200 or reply.json()["error"]["param"], (name, value, reply.text)
    for body in ("", "[]", "{", "null", "\xff", '{"prompt": NaN}', "[" * 100000):
        fields = {"Content-Type": "application/json"}
        assert session.post(f"{server}/v1/completions", data=body, headers=fields, timeout=30).status_code == 400


def _too_much(longest: int) -> Iterator[tuple[str, str]]:
    """Paths and bodies whose work would grow as the square of their size, or that are longer than the model can be."""
    keys = ", ".join(f'"k{i}": 0' for i in range(60000))
    yield "completions", f'{{{keys}, "k59999": 1}}'
    yield "completions", json.dumps({"prompt": [[1]] * 200_000})
    yield "completions", json.dumps({"prompt": ["a"] * 200_000})
    yield "completions", json.dumps({"prompt": "a" * longest})
    yield "completions", json.dumps({"prompt": [1] * longest})
    yield "completions", json.dumps({"prompt": "a", "stop": "a" * longest})
    turn = {"role": "user", "content": "a"}
    yield "chat/completions", json.dumps({"messages": [turn] * 200_001})
    yield "chat/completions", json.dumps({"messages": [turn | {"content": "a" * longest}]})
    yield "chat/completions", json.dumps({"messages": [turn | {"content": [{"type": "text", "text": "a"}] * longest}]})
    yield "chat/completions", json.dumps({"messages": [turn | {"reasoning": "a" * longest}]})
    yield "chat/completions", json.dumps({"messages": [{"role": "a" * longest, "content": "a"}]})


def test_no_body_takes_long_or_concerns_another_client(server: str) -> None:
    session = requests.Session()
    session.headers.update({"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"})
    for path, body in _too_much(1_000_000):
        began = time.monotonic()
        reply = session.post(f"{server}/v1/{path}", data=body, timeout=60)
        assert reply.status_code == 400 and len(reply.text) < 1000, (body[-80:], reply.text[:1000])
        assert time.monotonic() - began < 30, body[-80:]  # not minutes
    for path, body in (("tokenize", {"prompt": "a" * 1_000_000}), ("detokenize", {"tokens": [1] * 1_000_000})):
        assert session.post(f"{server}/{path}", data=json.dumps(body), timeout=60).status_code == 400
    hi = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    assert session.post(f"{server}/v1/chat/completions", json=hi, timeout=30).status_code == 200


def test_who_may_ask_and_what_is_there(client: openai.OpenAI, server: str) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"] and client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="'gpt-9' is not served here"):
        client.completions.create(model="gpt-9", prompt="a")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    assert requests.get(f"{server}/health", timeout=10).status_code == 200
    known = {"Authorization": f"Bearer {KEY}"}
    plain = requests.post(f"{server}/v1/completions", data="{}", headers=known, timeout=10)
    assert plain.status_code == 415  # what a page of another site can send without asking
    user = {"role": "user", "content": "a"}
    for message in ({"role": "user"}, "text", user | {"content": [{"type": "image_url"}]}, user | {"name": "Bob"}):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="tiny", messages=[message])  # type: ignore[list-item]
        assert caught.value.param == "messages"


def test_many_clients_at_once(client: openai.OpenAI) -> None:
    """More streams than slots, each with sampling of its own: each is as it would be alone."""
    ways: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.7},
        {"top_p": 0.8},
        {"extra_body": {"top_k": 5}},
    ]
    requests_ = [{"prompt": PROMPT[: 4 + i], "seed": i, "max_tokens": 24, **ways[i % 4]} for i in range(16)]
    alone = [client.completions.create(model="tiny", **request).choices[0].text for request in requests_]
    together: dict[int, str] = {}

    def ask(number: int) -> None:
        stream = client.completions.create(model="tiny", stream=True, **requests_[number])
        together[number] = "".join(chunk.choices[0].text for chunk in stream)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[number] for number in range(16)] == alone


def test_clients_that_leave_free_their_slots(client: openai.OpenAI, server: str) -> None:
    options: dict[str, Any] = {"model": "tiny", "prompt": "a", "max_tokens": 240, "extra_body": {"ignore_eos": True}}
    before = running(server)["abandoned_responses_total"]
    streams = [client.completions.create(**options, n=8, stream=True) for _ in range(2)]
    next(iter(streams[0]))
    for stream in streams:
        stream.close()
    with pytest.raises(openai.APITimeoutError):  # in the middle of an answer that is no stream
        client.with_options(timeout=0.02).completions.create(**options, n=64)
    deadline = time.monotonic() + 20
    while (now := running(server))["running_responses"] + now["waiting_responses"]:
        assert time.monotonic() < deadline, now
        time.sleep(0.05)
    assert now["abandoned_responses_total"] > before
    options["max_tokens"] = 2
    assert client.completions.create(**options).choices[0].finish_reason == "length"


def test_limits_and_a_graceful_stop(folder: Path, tmp_path: Path) -> None:
    """What is too much is refused with 429; a stop lets a stream finish, refuses what comes after, and ends with 0."""
    options = ("--max-queued", "4", "--timeout", "30", "--special-tokens-as-text")
    with serving(folder, tmp_path / "log", *options) as (job, url):
        asked = {"messages": [{"role": "user", "content": "<|endoftext|>"}]}
        known = {"Authorization": f"Bearer {KEY}"}
        answer = requests.post(f"{url}/tokenize", json=asked, headers=known, timeout=10)
        assert load_tokenizer(folder).eos_id not in answer.json()["tokens"]
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
        fields: dict[str, Any] = {"model": "tiny", "prompt": "a", "extra_body": {"ignore_eos": True}}
        streams = [iter(client.completions.create(**fields, max_tokens=250, n=4, stream=True))]
        text = next(streams[0]).choices[0].text
        # A tiny model may have finished by the time that the next request arrives: that one then fills the server.
        with pytest.raises(openai.RateLimitError, match="try again"):
            while len(streams) < 100:
                streams.append(iter(client.completions.create(**fields, max_tokens=250, n=4, stream=True)))
        job.process.send_signal(signal.SIGTERM)
        time.sleep(0.05)
        for stream in streams:
            ends = [choice for chunk in stream for choice in chunk.choices]
            assert [end.finish_reason for end in ends].count("length") == 4
            text += "".join(end.text for end in ends)
        assert text and job.wait(30) == 0, job.describe()


def test_two_ranks_serve_one_model_and_end_together(folder: Path, server: str, tmp_path: Path) -> None:
    """The answers of one rank; idle ranks hear of their leader; one that dies ends the server, which names it."""
    known = {"Authorization": f"Bearer {KEY}"}

    def answer(url: str, number: int) -> list[str]:
        asked = {"model": "tiny", "prompt": [7, 20 + number], "max_tokens": 12, "seed": number, "n": 3}
        response = requests.post(f"{url}/v1/completions", json=asked, headers=known, timeout=60)
        return [choice["text"] for choice in response.json()["choices"]]

    def held(url: str) -> str:
        asked = {"prompt": "a", "max_tokens": 90, "seed": 3, "guided_regex": "(naturally|answer|Gr){30}"}
        return str(requests.post(f"{url}/v1/completions", json=asked, headers=known, timeout=60).json()["choices"][0])

    with serving(folder, tmp_path / "log", "--tensor-parallel-size", "2") as (job, url):
        with ThreadPoolExecutor(6) as threads:
            found = list(threads.map(functools.partial(answer, url), range(6)))
        assert found == [answer(server, number) for number in range(6)]
        assert held(url) == held(server), "a grammar, which only the rank that samples has compiled"
        ranks = psutil.Process(job.process.pid).children()
        assert len(ranks) == 2
        next(rank for rank in ranks if rank.environ()["RANK"] == "1").kill()
        assert job.wait(60) not in (0, None), job.describe()
        assert "rank 1 was ended by signal 9" in job.output()


def test_what_cannot_be_served_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    damaged = tmp_path / "damaged"
    shutil.copytree(folder, damaged)
    weights = load_file(damaged / "model.safetensors")
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, damaged / "model.safetensors", metadata={"format": "pt"})
    cases: list[tuple[Path, dict[str, int], str]] = [
        (damaged, {}, r"damaged: model.norm.weight has values that are NaN or infinite"),
        (folder / "model.safetensors", {}, "has weights alone: give the folder"),
        (tmp_path, {}, "is a tokenizer: make a .nemo archive of it first"),
        (folder, {"kv_cache_tokens": 16}, "kv_cache_tokens=16 cannot hold one sequence of 256 tokens"),
        (folder, {"max_length": MAX_LENGTH + 1}, "fewer than a maximum length of 257"),
    ]
    with single_process(1):
        for path, options, message in cases:
            with pytest.raises(UserError, match=message):
                load_model(path, precision="32", num_slots=1, **options)


@pytest.mark.long
def test_checkpoints_that_cannot_be_served(folder: Path, tmp_path: Path) -> None:
    """One line that says what is missing, and status 2; a taken port is said before anything is loaded."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for given, message in ((0, "lacks model.safetensors"), (port, f"cannot listen on 127.0.0.1:{port}")):
            done = subprocess.run(
                [sys.executable, "-m", "nemo_style_aligner", "serve", str(tmp_path), "--port", str(given)],
                env=environment(),
                capture_output=True,
                text=True,
                timeout=120,
            )
            assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


def chat(model: str, *options: str) -> subprocess.CompletedProcess[str]:
    """`nsa chat` with lines from a pipe."""
    command = [sys.executable, "-m", "nemo_style_aligner", "chat", model, *GREEDY, *options]
    lines = "hello\n/system Be short.\nhello\n/reset\n/what\nhello\n"
    return subprocess.run(command, input=lines, env=environment(), capture_output=True, text=True, timeout=120)


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = tmp_path / "key"
    path.write_text(KEY)
    path.chmod(0o600)
    return str(path)


def test_chat_with_a_server(server: str, key_file: str) -> None:
    done = chat(server, "--api-key-file", key_file)
    before, _, after = done.stdout.partition("/what is no command\n")
    last = after.split("ends a response\n")[1]
    assert done.returncode == 0 and last.strip() and before.endswith(last), "/reset keeps the system prompt alone"
    for url, said in ((server, "answers 401"), ("http://127.0.0.1:9/v1", "cannot be talked to")):
        wrong = chat(url)
        assert wrong.returncode == 2 and said in wrong.stderr and "Traceback" not in wrong.stderr


class Foreign(http.server.BaseHTTPRequestHandler):
    """A server of another make: answers each request with what stands in ``said``: its type, and its body."""

    said: tuple[int, str, bytes] = (200, "", b"")

    def do_GET(self) -> None:
        self._send(200, "application/json", b'{"data": [{"id": "x\\u001b]0;title\\u0007"}]}')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._send(*self.said)

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def foreign() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Foreign) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


STREAM, WHOLE = "text/event-stream; charset=utf-8", "application/json"
END = b'data: {"choices":[{"delta":null,"finish_reason":"stop"}]}\n\n'
SAID: dict[str, tuple[int, str, bytes, str]] = {
    "no space, a null delta, no [DONE]": (
        200,
        STREAM,
        b'data:{"choices":[{"delta":{"content":"Hi"}}]}\n\n' + END,
        "Hi",
    ),
    "several lines of data": (
        200,
        STREAM,
        b': ping\n\nevent: x\ndata: {"choices":\ndata: [{"text":"Hi"}]}\n\n' + END,
        "Hi",
    ),
    "CR LF, null content": (200, STREAM, b'data: {"choices":[{"delta":{"content":null}}]}\r\n\r\n' + END, ""),
    "parts": (
        200,
        STREAM,
        b'data: {"choices":[{"delta":{"content":[{"type":"text","text":"H"},{"text":"i"}]}}]}\n\ndata: [DONE]\n\n',
        "Hi",
    ),
    "no choices": (200, STREAM, b'data: {"choices":[],"usage":{}}\n\ndata: {"x": 1}\n\n' + END, ""),
    "a whole answer": (200, WHOLE, b'{"choices":[{"message":{"role":"assistant","content":"Hi"}}]}', "Hi"),
    "control sequences": (
        200,
        STREAM,
        b'data: {"choices":[{"delta":{"content":"a\\u001b]52;c;eA==\\u0007b\\u009b1m\\tc\\n"}}]}\n\n' + END,
        r"a\x1b]52;c;eA==\x07b\x9b1m" + "\tc\n",
    ),
    "an error that is text": (200, STREAM, b'data: {"error": "too \\u001b[2Jlong"}\n\n', r"says: too \x1b[2Jlong"),
    "an error in the body": (500, WHOLE, b'{"error": "out of memory"}', "answers 500: out of memory"),
    "another error": (422, WHOLE, b'{"detail": [{"msg": "no"}]}', "answers 422: [{'msg': 'no'}]"),
    "a page": (502, "text/html", b"<h1>Bad \x1b[2J</h1>", r"answers 502: <h1>Bad \x1b[2J"),
    "text for an event": (200, STREAM, b"data: oh no\n\n", "says: oh no"),
    "an answer of another kind": (200, WHOLE, b'{"choices": [3]}', "none of a chat"),
    "a stream that breaks off": (200, STREAM, b'data: {"choices":[{"delta":{"content":"Hi"}}]}\n\n', "broken off"),
}


@pytest.mark.parametrize("case", SAID)
def test_chat_is_a_client_of_any_server(case: str, foreign: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever form it answers; a request that fails is told by the status, and no terminal obeys a server."""
    *said, expected = SAID[case]
    monkeypatch.setattr(Foreign, "said", tuple(said))
    result = CliRunner(catch_exceptions=False).invoke(nsa, ["chat", foreign], input="hello\n")
    if result.exit_code:
        assert result.exit_code == 1 and expected in result.stderr and "Traceback" not in result.stderr
    else:
        assert result.stdout == f"{expected}\n" and not result.stderr
    assert bool(result.exit_code) == any(word in case for word in ("error", "page", "event", "kind", "breaks"))


@pytest.mark.long
def test_chat_with_a_checkpoint(folder: Path, server: str, key_file: str) -> None:
    done = chat(str(folder), "--precision", "32")
    assert done.returncode == 0 and done.stdout == chat(server, "--api-key-file", key_file).stdout, done.stderr


LM_EVAL_TASK = """
task: TASK
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: TYPE
doc_to_text: "{{question}}"
doc_to_target: "{{target}}"
target_delimiter: ""
"""


@pytest.mark.long
def test_lm_eval_gets_the_numbers_of_transformers(folder: Path, server: str, tmp_path: Path) -> None:
    """`local-completions` with the server's tokenizer, against lm-eval's own `hf` model."""
    pytest.importorskip("lm_eval", reason="NOT TESTED: lm-eval is not installed (pip install 'lm-eval[api,hf]')")
    pytest.importorskip("accelerate", reason="NOT TESTED: lm-eval's hf model needs accelerate")
    data = tmp_path / "data.jsonl"
    rows = [(PROMPT, " 36"), (PROMPT * 3, " 36, naturally."), ("The answer is", " 36"), ("12 times", " 3")]
    data.write_text("".join(json.dumps({"question": q, "target": t}) + "\n" for q, t in rows))
    for name, kind, more in (
        ("own_likelihood", "loglikelihood", "metric_list: [{metric: perplexity}, {metric: acc}]"),
        ("own_rolling", "loglikelihood_rolling", "metric_list: [{metric: bits_per_byte}]"),
        ("own_text", "generate_until", 'generation_kwargs: {until: ["7"], max_gen_toks: 20, temperature: 0}'),
    ):
        text = LM_EVAL_TASK.replace("TASK", name).replace("TYPE", kind).replace("FILE", str(data))
        (tmp_path / f"{name}.yaml").write_text(f"{text}{more}\n")
    samples = {}
    models = {
        "local-completions": f"model=tiny,base_url={server}/v1/completions,auth_token={KEY},max_length={MAX_LENGTH},"
        "num_concurrent=2,max_retries=1",
        "hf": f"pretrained={folder},dtype=float32,max_length={MAX_LENGTH}",
    }
    for model, arguments in models.items():
        command = [sys.executable, "-m", "lm_eval", "run", "--model", model, "--model_args", arguments]
        command += ["--tasks", "own_likelihood,own_rolling,own_text", "--include_path", str(tmp_path), "--log_samples"]
        offline = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": KEY}
        done = subprocess.run(
            [*command, "--output_path", str(tmp_path / model)],
            env={**environment(), **offline},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        files = {f.name.split("_2")[0]: f for f in (tmp_path / model).glob("**/samples_*.jsonl")}
        samples[model] = {name: list(map(json.loads, file.open())) for name, file in files.items()}
    assert samples["hf"].keys() == samples["local-completions"].keys() and len(samples["hf"]) == 3
    for name, expected in samples["hf"].items():
        for one, other in zip(expected, samples["local-completions"][name], strict=True):
            assert _numbers(other["resps"]) == pytest.approx(_numbers(one["resps"]), abs=1e-3), name
            assert re.sub(r"[-\d.]+e?[-\d]*", "", str(one["resps"])) == re.sub(
                r"[-\d.]+e?[-\d]*", "", str(other["resps"])
            )


VERIFIERS_TASKS = """import verifiers.v1 as vf


class LineTask(vf.Task[vf.TaskData]):
    @vf.reward(weight=1.0)
    async def reward(self, trace: vf.Trace) -> float:
        return 0.5


class LineTaskset(vf.Taskset[LineTask, vf.TasksetConfig]):
    def load(self) -> list[LineTask]:
        return [LineTask(vf.TaskData(prompt=f"What is 12 times {i}?"), self.config.task) for i in range(4)]


__all__ = ["LineTaskset"]
"""


def test_episodes_of_verifiers_have_ids_masks_and_log_probs(folder: Path, server: str, tmp_path: Path) -> None:
    """`vf-eval --client.type train`, which asks /inference/v1/generate."""
    program = os.environ.get("VF_EVAL") or shutil.which("vf-eval")
    if program is None:
        pytest.skip("NOT TESTED: pip install verifiers uv, in an environment of its own, and VF_EVAL=.../bin/vf-eval")
    (tmp_path / "lines_v1").mkdir()
    (tmp_path / "lines_v1" / "__init__.py").write_text(VERIFIERS_TASKS)
    agent = ["--env.agent.harness.id", "null", "--env.agent.runtime.type", "subprocess", "-o", str(tmp_path / "runs")]
    client = ["--client.type", "train", "--client.base-url", f"{server}/v1", "--client.api-key-var", "KEY_OF_TEST"]
    client += ["-m", "tiny", "--client.renderer-model-name", str(folder), "--sampling.max-tokens", "24"]
    path = os.pathsep.join([str(Path(program).parent), os.environ["PATH"]])
    added = {"KEY_OF_TEST": KEY, "PYTHONPATH": str(tmp_path), "PATH": path, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [program, "lines-v1", "--no-push", "--no-rich", *agent, *client],
        env={**environment(), **added},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    (traces,) = (tmp_path / "runs").glob("*/traces.jsonl")
    episodes = list(map(json.loads, traces.open()))
    assert len(episodes) == 4 and all(episode["ok"] for episode in episodes), done.stdout[-3000:]
    for node in (node for episode in episodes for node in episode["traces"][0]["nodes"] if node["sampled"]):
        assert len(node["token_ids"]) == len(node["mask"]) and sum(node["mask"]) == len(node["logprobs"]) > 0


def _numbers(responses: Any) -> list[float]:
    return [float(number) for number in re.findall(r"-\d+\.\d+", str(responses))]


@pytest.mark.long
def test_the_policy_during_training(tmp_path: Path, one_rank: None) -> None:
    """Whoever asks, the run is the same to the last bit; an answer is of one version of the weights, and says which."""
    tokenizer = train_bpe_tokenizer([PROMPT], 300, tmp_path / "tokenizer")
    shape = SHAPE | {"vocab_size": tokenizer.vocab_size}
    architecture = ModelArchitecture(**shape)
    model = build_model(architecture, {}, torch.float32)
    save_nemo(tmp_path / "base.nemo", model, architecture.to_nemo_config() | {"encoder_seq_length": 64}, tokenizer)
    prompts, function = tmp_path / "prompts.jsonl", tmp_path / "rewards.py"
    prompts.write_text("".join(json.dumps({"text": f"What is {i} times 3?"}) + "\n" for i in range(16)))
    function.write_text("def reward(prompt, response, line):\n    return float(len(response))\n")
    port = free_port()
    served = tuple(f"trainer.ppo.serve_policy.{key}" for key in ("enable=True", f"port={port}", "max_length=64"))
    weights, seen = [], []
    for name, more in (("alone", ()), ("asked", served)):
        flags = [
            f"pretrained_checkpoint.restore_from_path={tmp_path / 'base.nemo'}",
            f"model.data.data_prefix={{train: [{prompts}], validation: [{prompts}], test: [{prompts}]}}",
            f"exp_manager.explicit_log_dir={tmp_path / name}",
            f"trainer.ppo.rewards=[{{source: '{function}:reward'}}]",
            *("trainer.precision=32", "trainer.ppo.estimator=grpo", "trainer.ppo.num_rollouts_per_prompt=4"),
            *("trainer.ppo.max_epochs=12", "trainer.ppo.max_steps=40", "trainer.ppo.val_check_interval=0"),
            *("model.encoder_seq_length=64", "model.global_batch_size=16", "model.micro_batch_size=4"),
            *("model.ppo.num_rollout_samples=4", "model.ppo.length_params.max_length=16", "model.optim.lr=1e-3"),
            *("trainer.ppo.save_interval=0", *more),
        ]
        job = Job(script("train_gpt_ppo_actor.py", *flags), tmp_path / f"{name}.log")
        secret = Path(os.environ[TOKEN_FILE_VARIABLE]).read_text().strip()
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=secret, max_retries=0, timeout=60)
        options: dict[str, Any] = {"model": "policy", "prompt": PROMPT, "max_tokens": 20, "echo": True, "logprobs": 0}
        while more and job.process.poll() is None:
            with contextlib.suppress(openai.APIConnectionError, openai.InternalServerError):
                (choice,) = client.completions.create(**options, n=1).to_dict()["choices"]  # type: ignore[misc]
                seen.append((choice["weight_version"], choice["logprobs"]["token_logprobs"][1:6]))
            time.sleep(0.02)
        job.check(240)
        assert (f"policy served on http://127.0.0.1:{port}/v1" in job.output()) == bool(more)
        weights.append(stored_weights(next((tmp_path / name / "checkpoints").glob("*.nemo"))))
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    of_version = dict(seen)
    assert len(of_version) > 2 and min(of_version) >= 0, seen
    assert all(scores == pytest.approx(of_version[version], abs=1e-5) for version, scores in seen)
    assert len({tuple(scores) for scores in of_version.values()}) > 2, "not all updates change weights: truncation"
