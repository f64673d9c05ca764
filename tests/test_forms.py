"""Answers whose form a request says: JSON schemas, choices, forced calls; by masks that leave log-probs as they are."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import openai
import pydantic
import pytest
import requests
import torch
from generation_models import have_graphs
from small_models import chatml_tokenizer
from test_tools import LLAMA, MISTRAL, MISTRAL_3, QWEN, tool
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from nemo_style_aligner.engine.contract import GenerationRequest, GenerationResult, GrammarError, SamplingParams
from nemo_style_aligner.engine.grammar import Grammars, json_grammar, lark_grammar
from nemo_style_aligner.engine.parallel.groups import single_process
from nemo_style_aligner.engine.sampling import SamplingRows, sample
from nemo_style_aligner.engine.serving.app import ServedModel
from nemo_style_aligner.engine.serving.forms import failing_place
from nemo_style_aligner.engine.serving.tool_calls import CallReader, find_form, quoted
from nemo_style_aligner.engine.text.tokenizer import Tokenizer, load_tokenizer
from nemo_style_aligner.engine.text.tokenizer_training import train_bpe_tokenizer
from nemo_style_aligner.tools.serving.checkpoint import load_model

KEY = "sk-of-a-test"
TEMPLATE = QWEN.replace("{% if add_generation_prompt %}", "{% if not add_generation_prompt %}{% else %}") + (
    "{% if add_generation_prompt and thinking is defined and thinking %}<think>\n{% endif %}"
)
QUESTION: Any = [{"role": "user", "content": "Who is it?"}]


class Address(pydantic.BaseModel, extra="forbid"):
    street: str = pydantic.Field(max_length=6)
    number: int | None


class Person(pydantic.BaseModel, extra="forbid"):
    name: str = pydantic.Field(max_length=8)
    kind: Literal["friend", "stranger"]
    share: float = pydantic.Field(ge=0, le=1)
    tags: list[Literal["tall", "küçük", 'a "quote"']] = pydantic.Field(max_length=3)
    address: Address
    others: list[Address] = pydantic.Field(max_length=1, default_factory=list)  # optional
    is_known: bool


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows nothing, with a byte-level vocabulary."""
    path = tmp_path_factory.mktemp("forms") / "tiny"
    tokenizer = train_bpe_tokenizer(['{"name": "Größe", "kind": "friend", "tags": []}', TEMPLATE], 290, path)
    torch.manual_seed(3)
    config = LlamaConfig(  # of test_tools.py's shape, whose step is compiled but once; with ids that no token has
        vocab_size=300, num_hidden_layers=2, max_position_embeddings=1024, hidden_size=64, intermediate_size=128,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2, tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_id, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with single_process():
        engine, tokenizer = load_model(folder, precision="32", num_slots=8)
        served = ServedModel(engine, tokenizer, "tiny", host="127.0.0.1", port=0, token=KEY)
        yield f"http://127.0.0.1:{served.server.port}"
        served.close(5)


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60)


def post(url: str, path: str = "chat/completions", **fields: Any) -> requests.Response:
    body = {"max_tokens": 700, **({"messages": QUESTION} if path.startswith("chat") else {}), **fields}
    return requests.post(f"{url}/v1/{path}", json=body, headers={"api-key": KEY}, timeout=60)


def test_answers_conform_to_a_schema_sampled_or_not(client: openai.OpenAI) -> None:
    """As OpenAI's client asks for a pydantic model, which reads the answer strictly; several choices, and a stream."""
    options: dict[str, Any] = {"model": "tiny", "messages": QUESTION, "response_format": Person, "max_tokens": 900}
    ways: list[dict[str, Any]] = [{"temperature": 0}, {"seed": 1, "n": 3}, {"seed": 2, "top_p": 0.7, "temperature": 2}]
    ways += [{"seed": 3, "extra_body": {"min_p": 0.1, "repetition_penalty": 1.2}}, {"frequency_penalty": 1}]
    seen = set()
    for way in ways:
        answer = client.chat.completions.parse(**options, **way)
        for choice in answer.choices:
            assert choice.finish_reason == "stop" and choice.message.parsed is not None
            Person.model_validate_json(choice.message.content or "", strict=True)
            seen.add(choice.message.content)
    assert len(seen) == 7
    with client.chat.completions.stream(**options, seed=1) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
    one = client.chat.completions.parse(**options, seed=1).choices[0].message
    assert Person.model_validate_json(text) == one.parsed and text == one.content


def test_answers_of_other_forms(url: str) -> None:
    """Any object, vLLM's fields, and an answer that is cut off, which is unfinished, as OpenAI's is."""
    answer = post(url, response_format={"type": "json_object"}, seed=1, logit_bias={"0": 3}).json()["choices"][0]
    assert isinstance(json.loads(answer["message"]["content"]), dict) and answer["finish_reason"] == "stop"
    forms: list[tuple[dict[str, Any], set[str]]] = [
        ({"structured_outputs": {"choice": ["yes", "no", "not at all"]}}, {"yes", "no", "not at all"}),
        ({"guided_choice": ["ü\n"]}, {"ü\n"}),
        ({"structured_outputs": {"regex": "a{3}b?"}}, {"aaa", "aaab"}),
        ({"structured_outputs": {"grammar": 'root ::= "x" [12]'}}, {"x1", "x2"}),
        ({"guided_grammar": 'start: "q" | /z+/'}, {"q", *("z" * n for n in range(1, 700))}),
        ({"guided_json": {"enum": [1, "two"]}}, {"1", '"two"'}),
        ({"structured_outputs": {"json": '{"const": null}'}}, {"null"}),
    ]
    for fields, expected in forms:
        choices = post(url, "completions", prompt="It is", n=3, **fields).json()["choices"]
        assert {choice["text"] for choice in choices} <= expected and choices[0]["finish_reason"] == "stop"
    cut = post(url, response_format={"type": "json_object"}, seed=1, max_tokens=1).json()["choices"][0]
    assert cut["finish_reason"] == "length" and cut["message"]["content"].startswith("{")
    ids = requests.post(
        f"{url}/inference/v1/generate",
        json={"token_ids": [5, 6], "sampling_params": {"structured_outputs": {"choice": ["no"]}, "max_tokens": 9}},
        headers={"api-key": KEY},
        timeout=60,
    ).json()["choices"][0]
    assert ids["finish_reason"] == "stop" and len(ids["token_ids"]) in (2, 3)


def test_log_probs_are_those_of_the_model_that_is_held_to_nothing(folder: Path, url: str) -> None:
    """transformers' of the same tokens, at the sampling temperature where that is asked for."""
    form = {"type": "json_schema", "json_schema": {"name": "p", "schema": Person.model_json_schema(), "strict": True}}
    fields = {"logprobs": True, "top_logprobs": 2, "return_token_ids": True, "seed": 4, "temperature": 0.7}
    answer = post(url, response_format=form, **fields).json()
    (choice,) = answer["choices"]
    prompt, made = answer["prompt_token_ids"], choice["token_ids"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logits = model(torch.tensor([prompt + made])).logits[0, len(prompt) - 1 : -1]
    for given, temperature in (([t["logprob"] for t in choice["logprobs"]["content"]], 1.0), (None, 0.7)):
        expected = (logits / temperature).log_softmax(-1).gather(1, torch.tensor(made)[:, None])[:, 0]
        found = torch.tensor(choice["sampling_logprobs"] if given is None else given)
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
        assert found.min() < -6, "nothing was held back"
    best = torch.tensor([[top["logprob"] for top in t["top_logprobs"]] for t in choice["logprobs"]["content"]])
    known = logits.log_softmax(-1)[:, : load_tokenizer(folder).vocab_size]
    torch.testing.assert_close(best, known.topk(2).values, atol=2e-4, rtol=1e-4)


def test_who_asks_for_no_form_gets_what_they_would_beside_those_who_do(url: str) -> None:
    free = {"prompt": "It is", "max_tokens": 40, "seed": 5, "ignore_eos": True}
    alone = post(url, "completions", **free).json()["choices"][0]["text"]
    held = {"prompt": "It is", "n": 4, "stream": True, "guided_json": Person.model_json_schema()}
    with requests.post(
        f"{url}/v1/completions", json=held | {"max_tokens": 700}, headers={"api-key": KEY}, stream=True, timeout=60
    ) as stream:
        next(stream.iter_lines())
        assert post(url, "completions", **free).json()["choices"][0]["text"] == alone


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "xml"}}, "response_format", "not \"xml\""),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema/schema' should be an object"),
    ({"response_format": {"type": "json_object", "more": 1}}, "response_format", "['more']"),
    ({"response_format": {"type": "json_object"}, "min_tokens": 3}, "min_tokens", "where it ends"),
    ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos", "where it ends"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "response_format", "leave one out"),
    ({"guided_json": {"x-guidance": {"lenient": True}, "not": {}}}, "guided_json", "x-guidance"),
    ({"guided_json": "{"}, "guided_json", "not JSON"),
    ({"guided_json": {"enum": ["a" * 70000]}}, "guided_json", "more than 65,536"),
    ({"guided_regex": "a(?=b)"}, "guided_regex", "look-around"),
    ({"guided_regex": ""}, "guided_regex", "not empty"),
    ({"guided_grammar": "start: missing"}, "guided_grammar", "missing"),
    ({"guided_choice": []}, "guided_choice", "a list of texts"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs", "structural_tag"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "unknown"),
]  # fmt: skip


@pytest.mark.parametrize("fields, param, message", REFUSED, ids=[f"{p}: {m}" for _, p, m in REFUSED])
def test_forms_that_are_not_had_are_refused_by_name(url: str, fields: dict[str, Any], param: str, message: str) -> None:
    reply = post(url, **fields)
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["param"] == param and message in error["message"], reply.text


def test_a_schema_that_cannot_be_compiled_is_an_error_that_says_where(url: str) -> None:
    many = {f"k{i}": {"type": "integer"} for i in range(300)}
    deep = {"type": "array", "items": {"anyOf": [{"type": "null"}, {"type": "string", "format": "never"}]}}
    for schema, pointer, message in (
        ({"properties": {**many, "a/b": deep, "z": {"type": "number"}}}, "/properties/a~1b/items/anyOf/1", "never"),
        ({"properties": {"a": {"$ref": "#/$defs/q"}}, "$defs": {"p": {}, "q": {"not": {}}}}, "/$defs/q", "not"),
        ({"type": "object", "if": {"type": "string"}}, "", "if"),
        ({"items": {"type": "x"}, "properties": {"b": {"type": "y"}}}, "/items", "x"),
    ):
        form = {"type": "json_schema", "json_schema": {"name": "p", "schema": schema}}
        error = post(url, response_format=form).json()["error"]
        assert f"'response_format/json_schema/schema{pointer}' cannot be used" in error["message"], error
        assert message in error["message"].split("cannot be used")[1] and error["param"] == "response_format"
    broken = tool("add") | {"function": {"name": "add", "parameters": {"properties": {"a": {"uniqueItems": True}}}}}
    error = post(url, tools=[tool("sub"), broken], tool_choice="required").json()["error"]
    assert "'tools/1/function/parameters/properties/a' cannot be used" in error["message"]


def test_a_failing_place_takes_few_tries() -> None:
    tries = []

    def error_of(schema: Mapping[str, Any]) -> str | None:
        tries.append(schema)
        return "it" if "bad" in json.dumps(schema) else None

    schema = {"properties": {f"k{i}": {"items": {"type": "bad" if i == 777 else "ok"}} for i in range(1000)}}
    assert failing_place(schema, error_of) == ("/properties/k777/items", "it") and len(tries) < 30
    assert len(schema["properties"]) == 1000


# ---- forced calls --------------------------------------------------------------------------------


def test_calls_can_be_forced(client: openai.OpenAI, url: str) -> None:
    """One at least, or of one function; a model that knows nothing of calls makes them, with arguments that conform."""
    tools: Any = [tool("add"), tool("sub")]
    for number, tool_ in enumerate(tools):
        tool_["function"]["parameters"] = {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": [number]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        }
    options: dict[str, Any] = {"model": "tiny", "messages": QUESTION, "tools": tools, "max_tokens": 500}
    options["logit_bias"] = {"0": 9}  # an end, where there may be one
    called = set()
    for seed in range(6):
        (choice,) = client.chat.completions.create(**options, tool_choice="required", seed=seed).choices
        assert choice.finish_reason == "tool_calls" and not choice.message.content
        for call in choice.message.tool_calls or []:
            arguments = json.loads(call.function.arguments)
            assert arguments.keys() == {"a", "b"} and arguments["b"] == ["add", "sub"].index(call.function.name)
            called.add(call.function.name)
    assert called == {"add", "sub"}
    named: Any = {"type": "function", "function": {"name": "sub"}}
    one = client.chat.completions.create(**options, tool_choice=named, parallel_tool_calls=False, seed=3).choices[0]
    assert [call.function.name for call in one.message.tool_calls or []] == ["sub"]
    for choice, message in (("never", "'tool_choice' should be"), (named | {"function": {"name": "mul"}}, "mul")):
        error = post(url, tools=tools, tool_choice=choice).json()["error"]
        assert error["param"] == "tool_choice" and message in error["message"]
    form = {"response_format": {"type": "json_object"}}
    both = post(url, tools=tools, tool_choice="required", max_tokens=9, **form).json()["error"]
    assert both["param"] == "response_format"


def test_an_answer_of_a_form_or_calls(url: str) -> None:
    """Where there are tools, too, a response is either; the model chooses."""
    seen = set()
    for seed in range(8):
        fields = {"tools": [tool("add")], "guided_choice": ["<tool", "none"], "seed": seed, "temperature": 3}
        (choice,) = post(url, **fields, parallel_tool_calls=False).json()["choices"]
        seen.add((choice["message"]["content"], choice["finish_reason"]))
    assert seen == {("<tool", "stop"), ("none", "stop"), (None, "tool_calls")}


def test_thoughts_that_the_prompt_begins(url: str) -> None:
    """Forced calls come behind them; an answer of a form would stand in one, and is refused."""
    thinking = {"chat_template_kwargs": {"thinking": True}, "seed": 2, "temperature": 2}
    forced = post(url, tools=[tool("add")], tool_choice="required", logit_bias={}, **thinking).json()["choices"][0]
    if forced["finish_reason"] == "tool_calls":
        assert forced["message"]["content"].endswith("</think>")
    error = post(url, response_format={"type": "json_object"}, **thinking).json()["error"]
    assert error["param"] == "response_format" and "begins a thought" in error["message"]
    begun = [*QUESTION, {"role": "assistant", "content": "{"}]
    error = post(url, response_format={"type": "json_object"}, messages=begun).json()["error"]
    assert error["param"] == "response_format" and "begun" in error["message"]


# ---- masks ---------------------------------------------------------------------------------------


def walked(tokenizer: Tokenizer, grammar: str, seed: int, begun: str = "") -> list[int]:
    """Ids, after those of a text, that are chosen at random among those that a grammar allows, to its end."""
    ids, choose = tokenizer.text_to_ids(begun) if begun else [], random.Random(seed)
    matcher = Grammars(tokenizer, tokenizer.vocab_size).matcher(grammar, ids)
    mask = np.empty(matcher.num_bytes, dtype=np.uint8)
    while not ids or ids[-1] not in tokenizer.stop_ids:
        matcher.fill(mask)
        assert matcher.failure is None and len(ids) < 2000
        ids.append(choose.choice(np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()))
        matcher.take(ids[-1:])
    return ids[:-1]


@pytest.mark.parametrize("family", ["qwen", "llama", "mistral", "mistral 3", "a thought", "a special token"])
def test_forced_calls_are_written_as_the_model_has_learnt(family: str, tmp_path: Path) -> None:
    """Whatever the mask allows is read as calls, in the form that the template shows."""
    templates = {"qwen": QWEN, "llama": LLAMA, "mistral": MISTRAL, "mistral 3": MISTRAL_3}
    tokenizer = chatml_tokenizer(tmp_path)
    tokenizer.chat_template = templates.get(family, QWEN)
    form, thinks = find_form(tokenizer), family == "a thought"
    assert form is not None
    special = tokenizer.token_to_id("<|im_start|>")
    marker = lambda text: f"<[{special}]>" if "special" in family and text == form.start else quoted(text)  # noqa: E731
    schema = {"properties": {"a": {"enum": [1, "x}</tool_call>"]}}, "required": ["a"], "additionalProperties": False}
    lark = form.lark(
        {"add": schema, 'a "b"': {"properties": {}, "additionalProperties": False}}, marker, several=True, thinks=thinks
    )
    numbers = set()
    for seed in range(8):
        ids = walked(tokenizer, lark_grammar(f"start: calls\n{lark}"), seed, "So <tool_call> it is.</think>" * thinks)
        text = tokenizer.ids_to_text(ids, keep_special=True)
        text = text.replace("<|im_start|>", form.start) if "special" in family else text
        reader = CallReader(form, {"add", 'a "b"'}, "<think>\n" if thinks else "", reads_one=False)
        said, calls = reader.add(text, True)
        assert said.endswith("</think>") if thinks else said == ""
        assert calls and all(
            json.loads(c.arguments) in ([{"a": 1}, {"a": "x}</tool_call>"}] if c.name == "add" else [{}]) for c in calls
        )
        assert (form.key in text or form.behind_name) and (not form.is_list or "[TOOL_CALLS]" in text)
        numbers.add(len(calls))
    assert len(numbers) > 1


def test_masks_know_nothing_of_steps_slots_and_memory(folder: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Native, and torch in padded buckets; with memory that preempts and without, alone or not: the same tokens."""
    grammar = json_grammar(Person.model_json_schema())
    tokenizer = load_tokenizer(folder)
    prompts = [tokenizer.text_to_ids(f"Who is it? {'It is. ' * (i % 4)}") for i in range(5)]
    asked = [GenerationRequest(i, ids, seed=i) for i, ids in enumerate(prompts)]
    params = SamplingParams(max_new_tokens=300, temperature=0.9, grammar=grammar)
    found: list[dict[int, GenerationResult]] = []
    for slots, tokens in ((5, None), (5, 560), (1, None), (4, None)):
        if slots == 4:
            have_graphs(monkeypatch, True)
        engine, _ = load_model(folder, precision="32", num_slots=slots, max_length=512, kv_cache_tokens=tokens)
        found.append({result.request_id: result for result in engine.generate(asked, params)})
        assert (engine.statistics.preemptions > 0) == (tokens is not None)
    for index in range(5):
        ids = [results[index].token_ids for results in found]
        assert ids[0] == ids[1] == ids[2] == ids[3]
        if found[0][index].finish_reason == "stop":
            Person.model_validate_json(tokenizer.ids_to_text(ids[0][:-1]), strict=True)


def test_what_a_mask_excludes_is_never_chosen_and_log_probs_do_not_see_it() -> None:
    """Against the same distribution written out, with ids that are far likelier held back; the mask may be shorter."""
    torch.manual_seed(0)
    logits = torch.randn(4000, 50) * 0.1 + torch.linspace(0, 60, 50)
    possible = np.zeros((4000, 48), dtype=bool)
    possible[:, [1, 3, 8, 9]] = True
    rows = SamplingRows(
        keys=torch.arange(4000), positions=torch.zeros(4000, dtype=torch.int64),
        allowed=torch.from_numpy(np.packbits(possible, axis=1, bitorder="little")),
    )  # fmt: skip
    params = SamplingParams(max_new_tokens=1, temperature=2.0, grammar="g")
    tokens, logprobs = sample(logits, params, rows)
    expected = (logits / 2)[:, [1, 3, 8, 9]].softmax(-1).mean(0)
    shares = torch.bincount(tokens, minlength=50)[[1, 3, 8, 9]] / 4000
    assert shares.sum() == 1 and (shares - expected).abs().max() < 0.03
    torch.testing.assert_close(logprobs, (logits / 2).log_softmax(-1).gather(1, tokens[:, None])[:, 0])
    for other in (
        SamplingParams(max_new_tokens=1, use_greedy=True, grammar="g"),
        SamplingParams(max_new_tokens=1, top_k=1, min_p=0.5, grammar="g"),
    ):
        assert torch.equal(
            sample(logits, other, rows)[0], torch.tensor([1, 3, 8, 9])[logits[:, [1, 3, 8, 9]].argmax(-1)]
        )


def test_a_grammar_that_cannot_be_followed_any_further_fails_its_request_alone(
    client: openai.OpenAI, folder: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lexer would need more states than it may have."""
    monkeypatch.setattr("nemo_style_aligner.engine.grammar._LEXER_STATES", 300)
    unlikely = {str(load_tokenizer(folder).text_to_ids("c")[0]): -100}
    options: dict[str, Any] = {"model": "tiny", "prompt": "a", "max_tokens": 900, "logit_bias": unlikely}
    many = {"guided_regex": "(a|b)*a(a|b){18}c"}
    with pytest.raises(openai.BadRequestError, match="cannot be held to its grammar: lexer error: too many states"):
        client.completions.create(**options, extra_body=many)
    with pytest.raises(openai.APIError, match="too many states"):
        list(client.completions.create(**options, extra_body=many, stream=True))
    assert post(url, "completions", prompt="a", guided_choice=["b"]).json()["choices"][0]["text"] == "b"
    with pytest.raises(GrammarError):
        Grammars(load_tokenizer(folder), 290).matcher(lark_grammar("start: ("))
