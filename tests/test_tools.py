"""Tools: a served model that calls some, calls in the forms of several families, and what is no call."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
import requests
import torch
from small_models import chatml_tokenizer
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from nemo_style_aligner.engine.parallel.groups import single_process
from nemo_style_aligner.engine.serving.app import ServedModel
from nemo_style_aligner.engine.serving.tool_calls import Call, CallReader, find_form
from nemo_style_aligner.engine.text.tokenizer import Tokenizer, load_tokenizer
from nemo_style_aligner.engine.text.tokenizer_training import train_bpe_tokenizer
from nemo_style_aligner.tools.serving.checkpoint import load_model

KEY = "sk-of-a-test"
QWEN = """{%- if tools %}<|im_start|>system
Tools: {% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{%- for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}
{% if m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>{% else %}{{ m.content or '' }}{% endif %}
{%- for call in m.tool_calls or [] %}{{ '\\n' if m.content or not loop.first }}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# Which tools there are, without their schemas, which each client writes in its own way; turns end as the model's do.
SERVED = QWEN.replace("<|im_end|>", "<|endoftext|>").replace("{{ tool | tojson }}", "{{ tool.function.name }}")
LLAMA = """{%- if tools %}{{ tools | tojson }}{% endif %}{%- for m in messages %}<|im_start|>{{ m.role }}

{% if m.tool_calls %}{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ "" }}
{{- m.tool_calls[0].function.arguments | tojson }}}{% else %}{{ m.content }}{% endif %}<|im_end|>
{%- endfor %}{% if add_generation_prompt %}<|im_start|>assistant

{% endif %}"""
MISTRAL = """{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{%- for m in messages %}
{%- if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}
{{- {"name": c.function.name, "arguments": c.function.arguments, "id": c.id} | tojson }}{% endfor %}]<|im_end|>
{%- else %}{{ m.content }}{% endif %}{% endfor %}"""
MISTRAL_3 = MISTRAL.replace("[TOOL_CALLS][", "").replace(
    '{{- {"name": c.function.name, "arguments": c.function.arguments, "id": c.id} | tojson }}{% endfor %}]',
    "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}",
)
OTHER = QWEN.replace('{"name": "{{ call.function.name }}"', "<function={{ call.function.name }}>").replace("}}}", "}}")


def tool(name: str) -> dict[str, Any]:
    numbers = {"type": "object", "properties": {key: {"type": "integer"} for key in "ab"}}
    return {"type": "function", "function": {"name": name, "parameters": numbers}}


TOOLS: list[Any] = [tool("add"), tool("sub")]
QUESTION = {"role": "user", "content": "2 + 3 - 1 + 7?"}
STEPS = [
    ("", "add", {"a": 2, "b": 3}, "5"),
    ("Then.", "sub", {"a": 5, "b": 1}, "4"),
    ("", "add", {"a": 4, "b": 7}, "11"),
]
ANSWER = "It is 11."


def called(text: str, name: str, arguments: dict[str, int]) -> dict[str, Any]:
    return {"role": "assistant", "content": text, "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that has learnt one conversation by heart: three calls, each after the result of the one before."""
    path = tmp_path_factory.mktemp("agent") / "agent"
    messages: list[Any] = [QUESTION]
    for text, name, arguments, result in STEPS:
        messages += [called(text, name, arguments), {"role": "tool", "content": result}]
    messages.append({"role": "assistant", "content": ANSWER})
    train_bpe_tokenizer([SERVED, json.dumps(TOOLS)], 300, path)
    (path / "chat_template.jinja").write_text(SERVED)
    ids = load_tokenizer(path).text_to_ids(
        AutoTokenizer.from_pretrained(path).apply_chat_template(messages, tools=TOOLS, tokenize=False)
    )
    torch.manual_seed(5)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=300, num_hidden_layers=2, max_position_embeddings=1024, hidden_size=64, intermediate_size=128,
            num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False, eos_token_id=0, bos_token_id=None,
        )
    )  # fmt: skip
    optimizer, text = torch.optim.AdamW(model.parameters(), lr=3e-3), torch.tensor([ids])
    for _ in range(300):
        loss = model(text, labels=text).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if loss < 0.01:
            break
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with single_process():
        engine, tokenizer = load_model(folder, precision="32", num_slots=4)
        served = ServedModel(engine, tokenizer, "agent", host="127.0.0.1", port=0, token=KEY)
        yield f"http://127.0.0.1:{served.server.port}"
        served.close(5)


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60)


OPTIONS: dict[str, Any] = {"model": "agent", "temperature": 0, "tools": TOOLS}


def answered(call: Any) -> dict[str, Any]:
    """What the tool says that is called."""
    arguments = json.loads(call.function.arguments)
    sign = {"add": 1, "sub": -1}[call.function.name]
    return {"role": "tool", "tool_call_id": call.id, "content": str(arguments["a"] + sign * arguments["b"])}


def test_a_loop_of_three_calls(client: openai.OpenAI) -> None:
    """As OpenAI's client runs it: what the model said goes back as the client has it, with the tools' answers."""
    messages: list[Any] = [QUESTION]
    for text, name, arguments, _ in STEPS:
        (choice,) = client.chat.completions.create(messages=messages, **OPTIONS).choices
        assert choice.finish_reason == "tool_calls" and choice.message.content == (text or None)
        (call,) = choice.message.tool_calls or []
        assert call.type == "function" and call.id
        assert (call.function.name, json.loads(call.function.arguments)) == (name, arguments)
        messages += [choice.message, answered(call)]
    (choice,) = client.chat.completions.create(messages=messages, **OPTIONS).choices
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", ANSWER, None)


def test_calls_are_streamed_whole_as_openais_deltas(client: openai.OpenAI) -> None:
    """OpenAI's own accumulator makes the message of them that the whole answer has."""
    messages: list[Any] = [QUESTION]
    for text, name, arguments, _ in STEPS:
        with client.chat.completions.stream(messages=messages, logprobs=True, **OPTIONS) as stream:
            chunks = [event.chunk.choices[0] for event in stream if event.type == "chunk" and event.chunk.choices]
            (choice,) = stream.get_final_completion().choices
        assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["tool_calls"]
        (call,) = choice.message.tool_calls or []
        assert (call.function.name, json.loads(call.function.arguments)) == (name, arguments)
        assert (choice.message.content or "") == text and "<tool_call" not in str([chunk.delta for chunk in chunks])
        assert choice.logprobs is not None and len(choice.logprobs.content or []) > 20
        messages += [called(text, name, arguments), answered(call)]


def test_choices_of_tools(client: openai.OpenAI, url: str) -> None:
    """None may be called, or one at most; what the request does not name is no call."""
    first: dict[str, Any] = {"messages": [QUESTION], **OPTIONS}
    (none,) = client.chat.completions.create(**first, tool_choice="none").choices
    assert none.finish_reason == "stop" and none.message.tool_calls is None
    assert json.loads((none.message.content or "").split("<tool_call>")[1].split("</tool_call>")[0])["name"] == "add"
    (one,) = client.chat.completions.create(**first, parallel_tool_calls=False, tool_choice="auto").choices
    assert len(one.message.tool_calls or []) == 1
    (cut,) = client.chat.completions.create(**first, max_tokens=12).choices
    assert cut.finish_reason == "length" and (cut.message.content or "").startswith("<tool_call>")
    for fields, param in (
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools"),
        ({"tools": TOOLS, "functions": [{}]}, "functions"),
    ):
        body = {"messages": [QUESTION], "tools": TOOLS, **fields}
        reply = requests.post(f"{url}/v1/chat/completions", json=body, headers={"api-key": KEY}, timeout=10)
        assert reply.status_code == 400 and reply.json()["error"]["param"] == param, reply.text


def test_tokenize_counts_the_tools(url: str, folder: Path) -> None:
    body = {"messages": [QUESTION], "tools": TOOLS}
    reply = requests.post(f"{url}/tokenize", json=body, headers={"api-key": KEY}, timeout=10)
    theirs = AutoTokenizer.from_pretrained(folder)
    assert reply.json()["tokens"] == theirs.apply_chat_template(
        [QUESTION], tools=TOOLS, add_generation_prompt=True, return_dict=False
    )


# ---- forms ----------------------------------------------------------------------------------------


ADD, SUB = Call("add", '{"a": 1}'), Call("sub", '{"a": "</tool_call> \\"}"}')
ONE, TWO = '{"name": "add", "arguments": {"a": 1}}', '{"name": "sub", "arguments": {"a": "</tool_call> \\"}"}}'
TEMPLATES = {"qwen": QWEN, "llama": LLAMA, "mistral": MISTRAL, "mistral 3": MISTRAL_3}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return chatml_tokenizer(tmp_path_factory.mktemp("forms") / "tokenizer")


READ: list[tuple[str, str, str, Sequence[Call]]] = [
    ("qwen", f"<tool_call>\n{ONE}\n</tool_call>", "", [ADD]),
    ("qwen", f"Let me.\n<tool_call>{ONE}</tool_call>\n<tool_call>{TWO}</tool_call>\n", "Let me.", [ADD, SUB]),
    ("qwen", f"<think>\n<tool_call>{ONE}</tool_call>?</think>\n\n<tool_call>{ONE}</tool_call>", "*", [ADD]),
    ("qwen", f"a < b, <tool_call>{ONE}</tool_call> and more.", "a < b,and more.", [ADD]),
    ("qwen", f"<tool_call>{ONE}", "=", []),
    ("qwen", f"<tool_call>{ONE[:-1]}</tool_call> <tool_call>{ONE}</tool_call>", "*", [ADD]),
    ("qwen", '<tool_call>{"name": "other", "arguments": {}}</tool_call>', "=", []),
    ("qwen", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "=", []),
    ("qwen", '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>', "=", []),
    ("qwen", "<tool_call>" + "[" * 100000 + "</tool_call>", "=", []),
    ("qwen", "the tag <tool_ca", "=", []),
    ("qwen", "no call at all \n", "=", []),
    ("llama", ONE.replace("arguments", "parameters"), "", [ADD]),
    ("llama", f"<|python_tag|>{ONE}; {TWO}", "", [ADD, SUB]),
    ("llama", f"{ONE} is what I would call.", "=", []),
    ("llama", f"It is {ONE}", "=", []),
    ("llama", '{"an": "object"}', "=", []),
    ("mistral", f"[TOOL_CALLS][{ONE}, {TWO}]", "", [ADD, SUB]),
    ("mistral", f"[TOOL_CALLS] [{ONE}, ", "=", []),
    ("mistral", "[TOOL_CALLS] []", "=", []),
    ("mistral 3", 'So:[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add[ARGS]{"a": 1}', "So:", [ADD, ADD]),
    ("mistral 3", '[TOOL_CALLS]add[ARGS]{"a": 1', "=", []),
]


@pytest.mark.parametrize("family, response, text, calls", READ)
def test_calls_are_read_and_what_is_none_is_text(
    tokenizer: Tokenizer, family: str, response: str, text: str, calls: Sequence[Call]
) -> None:
    """In one piece and in pieces of any size: the same; "=": all of it is text, "*": see the assertion."""
    tokenizer.chat_template = TEMPLATES[family]
    form = find_form(tokenizer)
    assert form is not None
    for size in (1, 3, 7, len(response)) if len(response) < 1000 else (len(response),):
        reader = CallReader(form, {"add", "sub"}, "<|im_start|>assistant\n", reads_one=False)
        said, found = "", list[Call]()
        for start in range(0, len(response), size):
            more, new = reader.add(response[start : start + size], False)
            said, found = said + more, found + new
        more, new = reader.add("", True)
        said, found = said + more, found + new
        assert found == list(calls)
        if text == "*":  # what comes before the call that counts
            assert said == response.rpartition("<tool_call>")[0].rstrip()
        else:
            assert said == (response if text == "=" else text)


def test_a_thought_that_the_prompt_has_begun_holds_no_calls(tokenizer: Tokenizer) -> None:
    tokenizer.chat_template = QWEN
    form = find_form(tokenizer)
    assert form is not None
    reader = CallReader(form, {"add"}, "<|im_start|>assistant\n<think>\n", reads_one=False)
    draft = f"Maybe <tool_call>{ONE}</tool_call>.</think>"
    assert reader.add(f"{draft}<tool_call>{ONE}</tool_call>", True) == (draft, [ADD])
    reader = CallReader(form, {"add"}, "", reads_one=True)
    assert reader.add(f"<tool_call>{ONE}</tool_call><tool_call>{ONE}</tool_call>", True) == ("", [ADD])


@pytest.mark.parametrize("template", [OTHER, "{% for m in messages %}{{ m.content }}{% endfor %}"])
def test_calls_in_a_form_that_is_not_read_are_told(tokenizer: Tokenizer, template: str) -> None:
    tokenizer.chat_template = template
    assert find_form(tokenizer) is None
