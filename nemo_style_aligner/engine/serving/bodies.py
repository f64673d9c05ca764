"""What clients ask of the OpenAI-compatible API: bodies of requests, read and checked field by field."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from nemo_style_aligner.engine.contract import SamplingParams
from nemo_style_aligner.engine.grammar import Grammars
from nemo_style_aligner.engine.serving.fields import Fields, RequestError, is_text
from nemo_style_aligner.engine.serving.forms import FormReader
from nemo_style_aligner.engine.serving.tool_calls import CallForm, CallReader, find_form, quoted, thinks
from nemo_style_aligner.engine.text.chat_rendering import ChatRenderer
from nemo_style_aligner.engine.text.chats import REASONING_KEYS, Conversation, Turn, read_turn
from nemo_style_aligner.engine.text.jsonl import DataError, Record
from nemo_style_aligner.engine.text.tokenizer import Tokenizer, TokenizerError
from nemo_style_aligner.guard.wanted import wanted

MOST_ALTERNATIVES = 20  # that log-probs may be asked of, in the place of each token
MOST_BIASES = 1024
_SLICE = 4  # characters of a text, times the model's tokens, that are tokenized at once, while it may be too long
_LEAST_PER_TOKEN = 32  # characters for which a token may stand, even if none is as long: spaces, and unknown ones
_COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens
LARGEST_SEED = 2**63 - 1
_MOST_TOKENS = 2**31 - 1  # what the model has room for is another matter, with an error of its own
# Those of /inference/v1/generate besides, whose answers have no text.
_WITHOUT_EFFECT_ON_IDS = (
    *("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output", "detokenize"),
    *("routed_experts_prompt_start", "output_kind"),
)
# What a request's other fields say to a chat template.
_NO_VARIABLES = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
_NO_VARIABLES |= {"conversations", "chat_template", "return_assistant_tokens_mask"}
_SEEN = {"tool_calls", "tool_call_id", *REASONING_KEYS}  # of messages: these are proved, or told by their order


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """Token ids, and their text.

    Of a conversation that waits for an answer also this; ``begun``: what of the answer stands in its prompt already.
    """

    token_ids: list[int]
    text: str
    conversation: Conversation | None = None
    begun: Literal["", "response", "thought"] = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """What a request asks for, of either endpoint.

    Attributes:
        num_choices: responses to each prompt.
        seed: of the first response to each prompt; None: any.
        num_top: log-probs are wanted, with this many alternatives; None: they are not.
        returns_ids: token ids and the log-probs that they were sampled with are wanted; where ids are all of an
            answer, these log-probs.
        spells_ids: log-probs show a token as ``token_id:N``.
        keeps_special: the text of special tokens is wanted.
        reads_calls: reads the calls of tools from a response; None: it is text alone.
    """

    prompts: list[Prompt]
    sampling: SamplingParams
    num_choices: int
    seed: int | None
    num_top: int | None
    echo: bool = False
    echoes_alone: bool = False  # without a response
    streams: bool = False
    includes_usage: bool = False
    returns_ids: bool = False
    spells_ids: bool = False
    keeps_special: bool = False
    reads_calls: Callable[[], CallReader] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Calls:
    """The calls that responses may have.

    Attributes:
        reader: makes what reads them from one response.
        lark: how they are written; see `FormReader.with_calls`, also for ``schemas``.
        are_forced: a response is nothing else.
        are_special: they begin with a special token, which the text of a response has only if it is asked for.
    """

    reader: Callable[[], CallReader]
    lark: str
    schemas: Mapping[int, dict[str, Any]]
    are_forced: bool
    are_special: bool


def _are_flags(options: Mapping[str, Any]) -> bool:
    return all(value is None or isinstance(value, bool) for value in options.values())


class BodyReader:
    """Reads requests to a model.

    Args:
        name: of the model, which a request may have or leave out.
        max_length: the most tokens of a prompt and a response.
        vocab_size: of the model.
        max_choices: the most responses to one request.
        grammars: of the engine that answers.
        defaults: of sampling parameters; None: those of OpenAI's API.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        name: str,
        max_length: int,
        vocab_size: int,
        max_choices: int,
        grammars: Grammars,
        defaults: SamplingParams | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._forms = FormReader(grammars)
        self._name = name
        self._defaults = defaults or SamplingParams(max_new_tokens=1)
        self._max_length, self._vocab_size, self._max_choices = max_length, vocab_size, max_choices
        self._per_token = max(_LEAST_PER_TOKEN, tokenizer.longest_token)
        self._learnt_ends = tokenizer.end_strings(())

    def completion(self, body: bytes) -> Asked:
        """A request to /v1/completions."""
        fields = self._fields(body)
        prompts = self._prompts(fields)
        max_tokens = fields.whole("max_tokens", _COMPLETION_TOKENS, 0, _MOST_TOKENS)
        fields.drop("logprobs", False)
        num_top = fields.whole("logprobs", None, 0, MOST_ALTERNATIVES)
        return self._asked(fields, prompts, max_tokens, num_top, fields.flag("echo"))

    def generate(self, body: bytes) -> Asked:
        """A request to /inference/v1/generate, vLLM's: token ids in, token ids out."""
        fields = self._fields(body)
        ids = fields.take("token_ids", None, f"a list of token ids below {self._vocab_size}", self._are_ids)
        if ids is None:
            raise RequestError(400, "'token_ids' is missing", "token_ids")
        self._check_size(len(ids), "token ids", "token_ids")
        fields.text("request_id")
        fields.drop("features", {})
        sampling = fields.fields("sampling_params", _WITHOUT_EFFECT_ON_IDS)
        max_tokens = sampling.whole("max_tokens", _COMPLETION_TOKENS, 1, _MOST_TOKENS)
        num_top = sampling.whole("logprobs", None, 0, 1)  # each token's own; alternatives are no part of the answer
        asked = self._asked(sampling, [Prompt(token_ids=ids, text="")], max_tokens, None, False, around=fields)
        return dataclasses.replace(asked, returns_ids=num_top is not None)

    def chat(self, body: bytes) -> Asked:
        """A request to /v1/chat/completions."""
        fields = self._fields(body)
        tools = self._tools(fields)
        prompt = self._conversation(fields, tools)
        calls = self._calls(fields, tools, prompt)
        old = fields.whole("max_tokens", None, 1, _MOST_TOKENS)  # OpenAI's former name
        max_tokens = fields.whole("max_completion_tokens", old, 1, _MOST_TOKENS)
        if old not in (None, max_tokens):
            raise RequestError(400, "'max_tokens' and 'max_completion_tokens' differ: leave one out", "max_tokens")
        has_logprobs = fields.flag("logprobs")
        num_top = fields.whole("top_logprobs", 0, 0, MOST_ALTERNATIVES)
        if num_top and not has_logprobs:
            raise RequestError(400, "'top_logprobs' needs 'logprobs': true", "top_logprobs")
        room = max(1, self._max_length - len(prompt.token_ids))
        top = num_top if has_logprobs else None
        asked = self._asked(fields, [prompt], max_tokens or room, top, False, calls=calls)
        if calls is None:
            return asked
        keeps_special = asked.keeps_special or calls.are_special
        return dataclasses.replace(asked, reads_calls=calls.reader, keeps_special=keeps_special)

    def to_tokenize(self, body: bytes) -> list[int]:
        """The token ids that a request to /tokenize wants."""
        fields = self._fields(body)
        text, adds_bos = fields.text("prompt"), fields.flag("add_special_tokens", True)
        ids = (
            self._conversation(fields, self._tools(fields)).token_ids
            if text is None
            else self._text_to_ids(text, adds_bos)
        )
        fields.finish()
        return ids

    def to_detokenize(self, body: bytes) -> list[int]:
        """A request to /detokenize."""
        fields = self._fields(body)
        ids: list[int] = fields.take("tokens", None, "a list of token ids", self._are_ids)
        fields.finish()
        if ids is None:
            raise RequestError(400, "'tokens' is missing", "tokens")
        self._check_size(len(ids), "token ids", "tokens")
        return ids

    def _fields(self, body: bytes) -> Fields:
        fields = Fields.of(body)
        name = fields.text("model")
        if name not in (None, self._name):
            message = f"the model '{name[:100]}' is not served here: it is '{self._name}'"
            raise RequestError(404, message, "model", "model_not_found")
        return fields

    def _asked(
        self,
        fields: Fields,
        prompts: list[Prompt],
        max_tokens: int,
        num_top: int | None,
        echo: bool,
        around: Fields | None = None,
        calls: _Calls | None = None,
    ) -> Asked:
        """What is common to all endpoints. ``around``: where fields stand that are not about sampling, if elsewhere."""
        around = around or fields
        num_choices = fields.whole("n", 1, 1, self._max_choices)
        self._check_number(len(prompts), num_choices)
        if fields.whole("best_of", num_choices, 1, self._max_choices) != num_choices:
            raise RequestError(400, "'best_of' is supported as 'n' alone: leave it out", "best_of")
        if max_tokens == 0 and not echo:
            raise RequestError(400, "'max_tokens' may be 0 only with 'echo'", "max_tokens")
        for prompt in prompts:
            self._check_length(len(prompt.token_ids), max_tokens)
        streams, includes_usage = self._stream(around)
        asked = Asked(
            prompts=prompts,
            sampling=self._sampling(fields, max_tokens, self._grammar(fields, prompts[0], calls)),
            num_choices=num_choices,
            seed=fields.whole("seed", None, -(2**63), LARGEST_SEED),
            num_top=num_top,
            echo=echo,
            echoes_alone=max_tokens == 0,
            streams=streams,
            includes_usage=includes_usage,
            returns_ids=around.flag("return_token_ids"),
            spells_ids=around.flag("return_tokens_as_token_ids"),
            keeps_special=not fields.flag("skip_special_tokens", True),
        )
        fields.finish()
        around.finish()
        return asked

    def _stream(self, fields: Fields) -> tuple[bool, bool]:
        """Whether the answer is a stream, and whether that ends with its usage."""
        streams = fields.flag("stream")
        flags = "an object of true and false"
        options = fields.take("stream_options", {}, flags, lambda value: isinstance(value, dict) and _are_flags(value))
        options = {name: value for name, value in options.items() if value}
        if options and (not streams or options.keys() - {"include_usage", "include_obfuscation"}):
            raise RequestError(400, "'stream_options' needs 'stream', and has 'include_usage' alone", "stream_options")
        return streams, bool(options.get("include_usage"))

    def _grammar(self, fields: Fields, prompt: Prompt, calls: _Calls | None) -> str | None:
        """The grammar of responses, if something is asked of their form."""
        (name, answer), is_forced = self._forms.grammar(fields), calls is not None and calls.are_forced
        if answer is None and not is_forced:
            return None
        if answer is not None and is_forced:
            raise RequestError(400, f"'{name}' has no part in forced calls: leave it or 'tool_choice' out", name)
        name = name or "tool_choice"
        if prompt.begun == "thought" and answer is not None:
            message = "the chat template begins a thought, in which the answer would stand: switch thoughts off in"
            raise RequestError(400, f"'{name}': {message} 'chat_template_kwargs', if it can do that", name)
        if prompt.begun == "response":
            raise RequestError(400, f"'{name}' is not supported for a response that is begun", name)
        return answer if calls is None else self._forms.with_calls(calls.lark, answer, calls.schemas)

    def _sampling(self, fields: Fields, max_tokens: int, grammar: str | None) -> SamplingParams:
        usual = self._defaults
        temperature = fields.number("temperature", 0.0 if usual.use_greedy else usual.temperature)
        top_p, ignores_eos = fields.number("top_p", usual.top_p), fields.flag("ignore_eos", usual.ignore_eos)
        min_tokens = fields.whole("min_tokens", min(usual.min_new_tokens, max_tokens), 0, max_tokens)
        if grammar is not None and (ignores_eos or min_tokens):
            name = "ignore_eos" if ignores_eos else "min_tokens"
            raise RequestError(400, f"'{name}' is not supported for an answer whose form says where it ends", name)
        ends = fields.strings("stop")
        try:
            self._tokenizer.check_end_strings(ends)
            return SamplingParams(
                max_new_tokens=max(1, max_tokens),
                min_new_tokens=min_tokens,
                use_greedy=0 in (temperature, top_p),
                temperature=temperature or 1.0,
                top_k=max(0, fields.whole("top_k", usual.top_k, -1, self._vocab_size)),
                top_p=top_p or 1.0,
                min_p=fields.number("min_p", usual.min_p),
                repetition_penalty=fields.number("repetition_penalty", usual.repetition_penalty),
                presence_penalty=fields.number("presence_penalty", usual.presence_penalty),
                frequency_penalty=fields.number("frequency_penalty", usual.frequency_penalty),
                logit_bias=self._logit_bias(fields),
                stop_token_ids=self._stop_token_ids(fields),
                stop_strings=tuple(dict.fromkeys([*ends, *(() if ignores_eos else self._learnt_ends)])),
                ignore_eos=ignores_eos,
                grammar=grammar,
            )
        except TokenizerError as error:
            raise RequestError(400, str(error), "stop") from error
        except ValueError as error:
            raise RequestError(400, str(error), str(error).split()[0]) from error

    def _logit_bias(self, fields: Fields) -> tuple[tuple[int, float], ...]:
        def is_right(value: Any) -> bool:
            if not isinstance(value, dict) or len(value) > MOST_BIASES:  # they are added at each token
                return False
            ids = [int(key) if key.isdecimal() and len(key) < 10 else -1 for key in value]
            are_numbers = all(type(bias) in (int, float) for bias in value.values())
            return are_numbers and all(0 <= i < self._vocab_size for i in ids)

        meaning = f"an object of at most {MOST_BIASES} numbers by token ids below {self._vocab_size}"
        biases: dict[str, float] = fields.take("logit_bias", {}, meaning, is_right)
        return tuple(sorted({int(key): float(bias) for key, bias in biases.items() if bias}.items()))

    def _stop_token_ids(self, fields: Fields) -> tuple[int, ...]:
        meaning = f"a list of token ids below {self._vocab_size}"
        ids = fields.take("stop_token_ids", [], meaning, lambda value: value == [] or self._are_ids(value))
        return tuple(dict.fromkeys(ids))

    def _check_length(self, num_prompt: int, max_tokens: int) -> None:
        if num_prompt + max_tokens > self._max_length:
            raise RequestError(
                400,  # in words that OpenAI's clients look for, as LiteLLM does
                f"this model's maximum context length is {self._max_length} tokens, fewer than a prompt of "
                f"{num_prompt} and a response of {max_tokens}: shorten the prompt or lower 'max_tokens'",
                "max_tokens" if num_prompt < self._max_length else "prompt",
                "context_length_exceeded",
            )

    # ---- prompts --------------------------------------------------------------------------------

    def _prompts(self, fields: Fields) -> list[Prompt]:
        def items_of(value: Any) -> list[Any]:
            return value if isinstance(value, list) and value and type(value[0]) is not int else [value]

        def is_right(value: Any) -> bool:
            return all((isinstance(i, str) and is_text(i)) or self._are_ids(i) for i in items_of(value))

        meaning = f"a text or a list of token ids below {self._vocab_size}, or a list of these"
        given = fields.take("prompt", None, meaning, is_right)
        if given is None:
            raise RequestError(400, "'prompt' is missing", "prompt")
        adds_bos = fields.flag("add_special_tokens", True)
        items = items_of(given)
        self._check_number(len(items), 1)
        return [self._prompt(item, adds_bos) for item in items]

    def _prompt(self, item: Any, adds_bos: bool) -> Prompt:
        """A text, or token ids."""
        if isinstance(item, str):
            return Prompt(token_ids=self._text_to_ids(item, adds_bos), text=item)
        self._check_size(len(item), "token ids", "prompt")
        return Prompt(token_ids=item, text=self._tokenizer.ids_to_text(item, keep_special=True))

    def _check_number(self, num_prompts: int, num_choices: int) -> None:
        if num_prompts * num_choices > self._max_choices:
            raise RequestError(
                400, f"{num_prompts} prompts with n={num_choices} are more than {self._max_choices} responses", "n"
            )

    def _check_size(self, number: int, what: str, param: str, per_token: int = 1) -> None:
        """Refuse what surely has too many tokens, before anything is made of it."""
        if number > self._max_length * per_token:
            most = f"this model's maximum context length is {self._max_length} tokens"
            message = f"{most}, fewer than {number:,} {what} are: shorten the prompt"
            raise RequestError(400, message, param, "context_length_exceeded")

    def _are_ids(self, value: Any) -> bool:
        """Whether it is a list of token ids, at least one."""
        is_filled = isinstance(value, list) and bool(value)
        return is_filled and all(type(i) is int and 0 <= i < self._vocab_size for i in value)

    def _text_to_ids(self, text: str, adds_bos: bool) -> list[int]:
        """As a job encodes a prompt; without BOS, the text alone."""
        tokenizer, ids = self._tokenizer, self._ids(text, "prompt")
        ids = tokenizer.with_bos(ids, tokenizer.begins_with_bos(None, "add_bos")) if adds_bos else ids
        if not ids:
            raise RequestError(400, "the prompt is empty, and no token of its own begins the model's texts", "prompt")
        return ids

    def _ids(self, text: str, param: str) -> list[int]:
        """Ids of a text. One that is long is measured by slices, so that what is too long costs little."""
        self._check_size(len(text), "characters", param, self._per_token)
        number, step = 0, _SLICE * self._max_length
        try:
            for start in range(0, len(text), step) if len(text) > step else ():
                wanted.get()()
                number += len(self._tokenizer.text_to_ids(text[start : start + step]))
                self._check_size(number, "tokens", param, 2)  # the whole may have fewer: where it was cut, tokens were
            wanted.get()()
            return self._tokenizer.text_to_ids(text)
        except TokenizerError as error:
            raise RequestError(400, str(error), param) from error

    def _conversation(self, fields: Fields, tools: Sequence[Mapping[str, Any]]) -> Prompt:
        """``messages``, as a job renders a prompt; a `RequestError` if the chat template would leave out a part."""
        given = fields.take(
            "messages", None, "a list of messages", lambda value: isinstance(value, list) and value != []
        )
        if given is None:
            raise RequestError(400, "'messages' is missing", "messages")
        self._check_size(len(given), "messages", "messages")
        renderer, variables = ChatRenderer(self._tokenizer), self._template_variables(fields)
        try:
            turns = [read_turn(_message(number, message)) for number, message in enumerate(given)]
            size = len(json.dumps(variables)) + len(json.dumps(tools, ensure_ascii=False)) + sum(map(_size, turns))
            self._check_size(size, "characters", "messages", self._per_token)
            record = Record(Path("messages"), len(given) - 1, {})
            turns[-1], continues = _continued(fields, turns[-1])
            render = renderer.continued if continues else renderer.prompt
            conversation = Conversation(turns, tools, variables)
            text = render(record, conversation)
            for key in sorted({key for turn in turns for key, value in turn.extras.items() if value} - _SEEN):
                others = [{name: value for name, value in turn.extras.items() if name != key} for turn in turns]
                less = [dataclasses.replace(turn, extras=extras) for turn, extras in zip(turns, others, strict=True)]
                if render(record, Conversation(less, tools, variables)) == text:
                    record.fail(f"{key!r} of a message is nothing that the model's chat template shows: leave it out")
        except DataError as error:
            raise RequestError(400, str(error), "tools" if "'tools'" in str(error) else "messages") from error
        ids = self._tokenizer.with_bos(self._ids(text, "messages"), renderer.begins_with_bos(None))
        begun: Literal["", "response", "thought"] = "response" if continues else "thought" if thinks(text) else ""
        return Prompt(token_ids=ids, text=text, conversation=None if continues else conversation, begun=begun)

    # ---- tools ----------------------------------------------------------------------------------

    def _tools(self, fields: Fields) -> list[Mapping[str, Any]]:
        """``tools``, as OpenAI has them."""
        given = fields.take("tools", [], "a list of tools", lambda value: isinstance(value, list))
        for number, tool in enumerate(given):
            function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
                raise RequestError(
                    400, f"tools:{number} should be a function with a name: others are not built", "tools"
                )
            if not isinstance(function.get("parameters", {}), dict):
                raise RequestError(400, f"tools:{number}: 'parameters' should be a JSON schema", "tools")
        if not is_text(json.dumps(given, ensure_ascii=False)):
            raise RequestError(400, "'tools' holds an unpaired surrogate, which is not a valid character", "tools")
        return given

    def _calls(self, fields: Fields, tools: Sequence[Mapping[str, Any]], prompt: Prompt) -> _Calls | None:
        """The calls that responses may have, if there may be some."""
        if not tools:
            return None  # what the other fields ask for is nothing, or refused
        meaning = "'auto', 'none', 'required' or a function"
        choice = fields.take("tool_choice", "auto", meaning, lambda value: isinstance(value, str | dict))
        reads_one, form = not fields.flag("parallel_tool_calls", True), self._call_form
        if choice == "none":
            return None
        if form is None:
            raise RequestError(
                400, "the model's chat template shows no calls, or none in a form that is read here", "tools"
            )
        numbers = self._chosen(choice, tools)
        schemas = {number: tools[number]["function"].get("parameters", {}) for number in numbers}
        names = [tools[number]["function"]["name"] for number in numbers]
        reader = functools.partial(CallReader, form, set(names), prompt.text, reads_one=reads_one)
        by_name = dict(zip(names, schemas.values(), strict=True))
        return _Calls(
            reader=reader,
            lark=form.lark(by_name, self._in_lark, several=not reads_one, thinks=prompt.begun == "thought"),
            schemas=schemas,
            are_forced=choice != "auto",
            are_special=self._is_special(form.start),
        )

    def _chosen(self, choice: Any, tools: Sequence[Mapping[str, Any]]) -> Sequence[int]:
        """The numbers of the tools that ``tool_choice`` lets a response call."""
        if choice in ("auto", "required"):
            return range(len(tools))
        function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
        name = function.get("name") if isinstance(function, dict) else None
        found = [number for number, tool in enumerate(tools) if tool["function"]["name"] == name]
        if not found:
            message = "'tool_choice' should be 'auto', 'none', 'required' or one of the functions of 'tools'"
            raise RequestError(400, f"{message}, not {json.dumps(choice)[:100]}", "tool_choice")
        return found[:1]

    @functools.cached_property
    def _call_form(self) -> CallForm | None:
        return find_form(self._tokenizer)

    def _is_special(self, text: str) -> bool:
        return self._tokenizer.token_to_id(text) in self._tokenizer.special_ids

    def _in_lark(self, text: str) -> str:
        """A text of a response: as the special token that it is, or by its characters."""
        return f"<[{self._tokenizer.token_to_id(text)}]>" if self._is_special(text) else quoted(text)

    def _template_variables(self, fields: Fields) -> dict[str, Any]:
        """``chat_template_kwargs``; a `RequestError` for what would have no effect, or is another field's."""
        name, template = "chat_template_kwargs", self._tokenizer.chat_template or ""
        variables: dict[str, Any] = fields.take(name, {}, "an object", lambda value: isinstance(value, dict))
        if not is_text(json.dumps(variables, ensure_ascii=False)):
            raise RequestError(400, f"'{name}' holds an unpaired surrogate, which is not a valid character", name)
        for key, value in variables.items():
            if key in _NO_VARIABLES or key in self._tokenizer.named_tokens:
                raise RequestError(
                    400, f"'{key}' is no variable that a request may set: leave it out of '{name}'", name
                )
            if value and not re.search(rf"\b{re.escape(key)}\b", template):
                raise RequestError(400, f"'{key}' is nothing that the model's chat template reads: leave it out", name)
        return variables


def _size(turn: Turn) -> int:
    """The characters of all that a template may show of it."""
    return len(turn.role) + len(turn.content or "") + len(json.dumps(turn.extras, ensure_ascii=False))


def _continued(fields: Fields, last: Turn) -> tuple[Turn, bool]:
    """The last turn, and whether it is the beginning of the response: vLLM's fields and others' ``prefix`` say so."""
    extras = dict(last.extras)
    asked = fields.flag("continue_final_message") or extras.pop("prefix", None) is True
    prompts = fields.flag("add_generation_prompt", True)
    if asked and last.kind != "assistant":
        raise RequestError(400, "the last message is not the assistant's, which alone is continued", "messages")
    if not prompts and not asked:
        message = "'add_generation_prompt' may be false only with 'continue_final_message'"
        raise RequestError(400, message, "add_generation_prompt")
    return dataclasses.replace(last, extras=extras), last.kind == "assistant"


def _message(number: int, message: Any) -> Record:
    if not isinstance(message, dict):
        raise RequestError(400, f"messages:{number} should be an object", "messages")
    is_answer = message.get("role") == "assistant" and not message.get("tool_calls")
    if is_answer and message.get("content") is None:
        message = message | {"content": ""}  # clients return an empty answer so
    return Record(Path("messages"), number, message)
