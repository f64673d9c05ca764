"""Sampling: distribution, random numbers, filters against `transformers`' logits processors, stopping."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from generation_models import engine_for, hf_model, ragged_requests
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from nemo_style_aligner.engine.contract import SamplingParams, StopCondition, text_before_end
from nemo_style_aligner.engine.sampling import (
    SamplingRows,
    apply_repetition_penalty,
    filter_min_p,
    filter_top_k_top_p,
    request_key,
    sample,
    uniform,
)


def _rows(count: int, key: int = 0, **options: torch.Tensor) -> SamplingRows:
    return SamplingRows(keys=torch.full((count,), request_key(key, 0)), positions=torch.arange(count), **options)


def _chi_square(tokens: torch.Tensor, probabilities: torch.Tensor) -> tuple[float, float]:
    """The statistic, and the value it exceeds by chance about once in 10,000 times."""
    expected = probabilities * len(tokens)
    counts = torch.bincount(tokens, minlength=len(probabilities)).double()
    assert counts[probabilities == 0].sum() == 0
    usual = expected >= 5
    merged_counts = torch.cat((counts[usual], counts[~usual].sum()[None]))
    merged = torch.cat((expected[usual], expected[~usual].sum()[None]))
    freedom = int((merged > 0).sum()) - 1
    statistic = ((merged_counts - merged) ** 2 / merged.clamp(min=1e-9))[merged > 0].sum().item()
    return statistic, freedom + 4.0 * (2 * freedom) ** 0.5


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_new_tokens=1),
        SamplingParams(max_new_tokens=1, temperature=0.6),
        SamplingParams(max_new_tokens=1, top_k=12),
        SamplingParams(max_new_tokens=1, top_p=0.7, temperature=1.4),
    ],
    ids=str,
)
@pytest.mark.parametrize("vocab", [50, 300])
def test_samples_follow_the_distribution(params: SamplingParams, vocab: int) -> None:
    draws = 20000
    torch.manual_seed(0)
    logits = 2 * torch.randn(1, vocab)
    tokens, logprobs = sample(logits.expand(draws, -1), params, _rows(draws))
    tempered = logits / params.temperature
    probabilities = filter_top_k_top_p(tempered, params.top_k, params.top_p).softmax(-1)[0].double()
    statistic, limit = _chi_square(tokens, probabilities)
    assert statistic < limit
    torch.testing.assert_close(logprobs, tempered.log_softmax(-1)[0, tokens], atol=1e-5, rtol=0)


def test_uniform_is_uniform_stateless_and_splitmix64() -> None:
    keys = torch.tensor([request_key(1, seed) for seed in range(300)])
    grid = uniform(keys[:, None], torch.arange(300)[None])
    assert grid.min() >= 0 and grid.max() < 1
    statistic, limit = _chi_square((grid.flatten() * 100).long(), torch.full((100,), 0.01, dtype=torch.double))
    assert statistic < limit
    # Neighbouring seeds and neighbouring positions are unrelated.
    assert abs(torch.corrcoef(grid)[0, 1:].mean()) < 0.02
    assert abs(torch.corrcoef(grid.T)[0, 1:].mean()) < 0.02
    torch.testing.assert_close(uniform(keys[7:8], torch.tensor([42])), grid[7, 42:43], rtol=0, atol=0)
    # The published first output of splitmix64 from state 0.
    assert uniform(torch.tensor([0]), torch.tensor([0])).item() == (0xE220A8397B1DCDAF >> 11) * 2.0**-53


def test_request_key_accepts_any_integer_seed() -> None:
    seeds = [0, 1, -1, 2**63, 2**64 - 1, 123456789012345]
    keys = {request_key(run, seed) for run in (0, 1, -5) for seed in seeds if seed != 2**64 - 1}
    assert len(keys) == 15
    assert all(-(2**63) <= key < 2**63 for key in keys)


@pytest.mark.parametrize("top_k, top_p", [(0, 0.5), (0, 0.999), (5, 1.0), (40, 0.8), (5000, 0.9), (1, 1.0)])
@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0])
def test_filters_equal_hugging_face(top_k: int, top_p: float, spread: float) -> None:
    torch.manual_seed(1)
    scores = spread * torch.randn(6, 3000)  # nearly flat rows need more than the first candidates of top-p
    expected = scores
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    ours = filter_top_k_top_p(scores, top_k, top_p)
    # The border may fall one token apart where a cumulative sum rounds.
    assert ((ours.isinf() != expected.isinf()).sum(-1) <= 1).all()
    both = ~ours.isinf() & ~expected.isinf()
    torch.testing.assert_close(ours[both], expected[both], rtol=0, atol=0)


def test_top_p_always_keeps_the_best_token_and_its_ties() -> None:
    scores = torch.tensor([[0.0, 3.0, 1.0, 3.0]])
    assert (~filter_top_k_top_p(scores, 0, 1e-6).isinf()).tolist() == [[False, True, False, True]]


def test_top_p_keeps_no_more_than_it_takes() -> None:
    """The best token alone has the probability asked for."""
    scores = torch.tensor([[0.0, -math.log(2), -math.log(2)]])
    assert filter_top_k_top_p(scores, 0, 0.5).tolist() == [[0.0, -math.inf, -math.inf]]


def test_repetition_penalty_and_temperature_equal_hugging_face() -> None:
    torch.manual_seed(2)
    logits, ids = torch.randn(4, 30), torch.randint(0, 30, (4, 12))
    seen = torch.zeros(4, 30, dtype=torch.bool).scatter_(1, ids, True)
    expected = RepetitionPenaltyLogitsProcessor(1.4)(ids, logits)
    torch.testing.assert_close(apply_repetition_penalty(logits, seen, 1.4), expected, rtol=0, atol=0)
    # The whole chain: draws land where HF's processed distribution has its inverse CDF.
    params = SamplingParams(max_new_tokens=1, repetition_penalty=1.4, temperature=0.7, top_k=9, top_p=0.9)
    for warper in (TemperatureLogitsWarper(0.7), TopKLogitsWarper(9), TopPLogitsWarper(0.9)):
        expected = warper(ids, expected)
    cumulative = expected.double().softmax(-1).cumsum(-1)
    for key in range(50):
        rows = _rows(4, key, seen=seen)
        tokens, _ = sample(logits, params, rows)
        wanted = torch.searchsorted(cumulative, uniform(rows.keys, rows.positions)[:, None], right=True)[:, 0]
        assert tokens.tolist() == wanted.tolist()


def test_repetition_penalty_without_seen_ids_is_refused() -> None:
    with pytest.raises(ValueError, match="seen"):
        sample(torch.zeros(1, 4), SamplingParams(max_new_tokens=1, repetition_penalty=1.1), _rows(1))


@pytest.mark.parametrize("min_p", [0.001, 0.2, 1.0])
@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0])
def test_min_p_equals_hugging_face(min_p: float, spread: float) -> None:
    scores = spread * torch.randn(6, 3000, generator=torch.Generator().manual_seed(1))
    expected = MinPLogitsWarper(min_p)(None, scores)
    ours = filter_min_p(scores, min_p)
    assert ((ours.isinf() != expected.isinf()).sum(-1) <= 1).all() and not ours.isinf().all(-1).any()


def test_bias_and_penalties_equal_transformers_and_vllm() -> None:
    """Draws land where the inverse CDF of the others' distribution is; log-probs are the model's."""
    torch.manual_seed(3)
    logits, ids = torch.randn(4, 30), torch.randint(0, 30, (4, 12))
    seen = torch.zeros(4, 30, dtype=torch.bool).scatter_(1, ids, True)
    bias, made = ((3, 2.5), (7, -100.0)), ids[:, 5:]  # the rest is a prompt, which only repetition counts
    expected = SequenceBiasLogitsProcessor({(i,): value for i, value in bias})(ids, logits)
    expected = RepetitionPenaltyLogitsProcessor(1.2)(ids, expected)
    counts = torch.stack([torch.bincount(row, minlength=30) for row in made])
    expected = expected - 0.7 * counts - 0.4 * (counts > 0)  # vLLM's and OpenAI's formula
    for warper in (TemperatureLogitsWarper(0.7), TopKLogitsWarper(20), TopPLogitsWarper(0.95), MinPLogitsWarper(0.1)):
        expected = warper(ids, expected)
    cumulative = expected.double().softmax(-1).cumsum(-1)
    params = SamplingParams(
        max_new_tokens=1, temperature=0.7, top_k=20, top_p=0.95, min_p=0.1, logit_bias=bias, repetition_penalty=1.2,
        presence_penalty=0.4, frequency_penalty=0.7,
    )  # fmt: skip
    for key in range(50):
        rows = _rows(4, key, seen=seen, counts=counts.float())
        tokens, logprobs = sample(logits, params, rows)
        wanted = torch.searchsorted(cumulative, uniform(rows.keys, rows.positions)[:, None], right=True)[:, 0]
        assert tokens.tolist() == wanted.tolist()
        torch.testing.assert_close(logprobs, (logits / 0.7).log_softmax(-1).gather(1, tokens[:, None])[:, 0])


@pytest.mark.parametrize("step", ["native", "torch"])
def test_the_engine_counts_the_tokens_of_each_response_alone(step: Any) -> None:
    """Neighbours in other ways, slots that are used again: each greedy response is what a plain loop makes."""
    reference = hf_model()
    ways = [{}, {"frequency_penalty": 1.5}, {"presence_penalty": 2.0}, {"logit_bias": ((5, 3.0), (9, -100.0))}]
    engine = engine_for(model=reference, num_slots=3, step=step)
    tasks = [
        engine.task(request, SamplingParams(max_new_tokens=10, use_greedy=True, ignore_eos=True, **way))
        for number, request in enumerate(ragged_requests(8))
        for way in [ways[number % 4]]
    ]
    waiting = iter(tasks)
    made = {s.request.request_id: s for passed in engine.serve(lambda: next(waiting, None)) for s in passed}
    for task in tasks:
        ids = list(task.request.prompt_token_ids)
        for _ in range(10):
            scores = reference(torch.tensor([ids])).logits[0, -1]
            counts = torch.bincount(
                torch.tensor(ids[len(task.request.prompt_token_ids) :]).long(), minlength=len(scores)
            )
            for token, bias in task.sampling.logit_bias:
                scores[token] += bias
            scores = scores - task.sampling.frequency_penalty * counts - task.sampling.presence_penalty * (counts > 0)
            ids.append(int(scores.argmax()))
        assert made[task.request.request_id].token_ids == ids[len(task.request.prompt_token_ids) :], task.sampling


def test_tokens_asked_for_end_a_response_even_where_eos_does_not() -> None:
    params = SamplingParams(max_new_tokens=9, ignore_eos=True, stop_token_ids=(4, 99))
    stop = StopCondition(params, eos_id=2, vocab_limit=50)
    assert stop.stop_ids == (4,) and stop.check([2], 9) is None and stop.check([2, 4], 9) == "stop"


def test_suppressed_stop_ids_and_vocab_limit() -> None:
    logits = torch.zeros(4000, 8)
    logits[:, 3] = 4.0
    suppress = torch.arange(4000) % 2 == 0
    rows = _rows(4000, suppress_stop=suppress)
    tokens, _ = sample(logits, SamplingParams(max_new_tokens=1), rows, torch.tensor([3]), vocab_limit=6)
    assert tokens.max() == 5
    assert (tokens[suppress] != 3).all()
    assert (tokens[~suppress] == 3).any()


def test_greedy_takes_the_best() -> None:
    logits = torch.randn(9, 50, generator=torch.Generator().manual_seed(1))
    logits[0, 49] = 9.0
    tokens, logprobs = sample(
        logits, SamplingParams(max_new_tokens=1, use_greedy=True, temperature=2.0), _rows(9), vocab_limit=49
    )
    assert torch.equal(tokens, logits[:, :49].argmax(-1))
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0])


def test_logits_of_very_different_sizes_take_no_weight_from_each_other() -> None:
    logits = torch.randint(0, 5, (2, 50), generator=torch.Generator().manual_seed(1)).float()
    shifted = logits + torch.tensor([[0.0], [-1e4]])
    for params in (SamplingParams(max_new_tokens=1), SamplingParams(max_new_tokens=1, top_k=9)):
        for key in range(9):
            tokens, logprobs = sample(shifted, params, _rows(2, key))
            expected, expected_logprobs = sample(logits, params, _rows(2, key))
            assert torch.equal(tokens, expected)
            torch.testing.assert_close(logprobs, expected_logprobs, atol=2e-3, rtol=0)


def test_an_unknown_id_far_above_the_others_takes_no_weight_from_them() -> None:
    logits = torch.zeros(4000, 8)
    logits[:, 2], logits[:, 7] = -torch.inf, 200.0
    tokens, logprobs = sample(logits, SamplingParams(max_new_tokens=1), _rows(4000), vocab_limit=6)
    assert (tokens.bincount(minlength=8) / 4000 - torch.tensor([0.2, 0.2, 0, 0.2, 0.2, 0.2, 0, 0])).abs().max() < 0.03
    assert torch.equal(logprobs, torch.full((4000,), -200.0))


def test_bfloat16_logits_are_normalised_in_float32() -> None:
    torch.manual_seed(3)
    logits = (5 * torch.randn(16, 1000)).bfloat16()
    tokens, logprobs = sample(logits, SamplingParams(max_new_tokens=1), _rows(16))
    expected = logits.float().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)


def test_bits_do_not_depend_on_the_other_rows() -> None:
    torch.manual_seed(4)
    logits = 3 * torch.randn(12, 100_000)
    params, rows = SamplingParams(max_new_tokens=1, top_k=50), _rows(12)
    threads = torch.get_num_threads()
    torch.set_num_threads(8)  # among which torch divides a long sum
    try:
        tokens, logprobs = sample(logits, params, rows)
        for i in range(12):
            alone = SamplingRows(rows.keys[i : i + 1], rows.positions[i : i + 1])
            token, logprob = sample(logits[i : i + 1], params, alone)
            assert token == tokens[i] and logprob == logprobs[i]
    finally:
        torch.set_num_threads(threads)


# ---- stopping -----------------------------------------------------------------------------------


def _text(ids: Sequence[int]) -> str:
    """A tokenizer of two-letter tokens; ids from 90 on are special and leave no text."""
    return "".join(chr(97 + i // 10) + chr(97 + i % 10) for i in ids if i < 90)


_SPECIAL = {"<|im_end|>": 91, "<extra_id_1>": 92}


def _first_end(tokens: list[int], condition: StopCondition, limit: int = 6) -> tuple[int, str | None]:
    for length in range(1, len(tokens) + 1):
        if reason := condition.check(tokens[:length], limit):
            return length, reason
    return len(tokens), None


@pytest.mark.parametrize(
    "tokens, minimum, expected",
    [
        ([5, 6, 91, 7], 0, (3, "stop")),  # a special token, by id
        ([5, 1, 6], 0, (2, "stop")),  # end of sequence
        ([5, 12, 23, 6], 0, (3, "stop")),  # "bccd" spans two tokens
        ([5, 12, 23, 6, 7, 8], 4, (6, "length")),  # it passed before the minimum length
        ([5, 12, 23, 6, 12, 23, 9], 4, (6, "stop")),  # its second occurrence counts
        ([5, 12, 23, 3, 7, 8], 3, (6, "length")),  # no second one, though "ad" may be the end of one
        ([5, 6, 7, 8, 9, 5], 0, (6, "length")),
        ([5, 6, 7, 8, 9, 91], 0, (6, "stop")),  # stop at the very last token is a stop
    ],
)
def test_stop_condition(tokens: list[int], minimum: int, expected: tuple[int, str]) -> None:
    params = SamplingParams(
        max_new_tokens=6, min_new_tokens=minimum, stop_strings=("<|im_end|>", "<extra_id_1>", "bccd")
    )
    condition = StopCondition(params, eos_id=1, detokenize=_text, token_to_id=_SPECIAL.get)
    assert condition.stop_ids == (1, 91, 92)
    assert _first_end(tokens, condition) == expected


def test_long_responses_decode_a_bounded_tail_only() -> None:
    decoded = []

    def detokenize(ids: Sequence[int]) -> str:
        decoded.append(len(ids))
        return _text(ids)

    params = SamplingParams(max_new_tokens=500, stop_strings=("bccd",))
    condition = StopCondition(params, eos_id=1, detokenize=detokenize)
    assert _first_end([5] * 400 + [12, 23], condition, limit=500) == (402, "stop")
    assert max(decoded) < 20 and len(decoded) < 10  # once for each token that cannot be the last of a stop string


@pytest.mark.parametrize(
    "pieces, string, expected",
    [
        (["▁Hi", "▁User", ":"], "User:", 3),
        (["▁Hi", ":", "▁x"], ": ", 3),  # alone, the last token has no space
        (["▁Hi", "\n", "▁"], "\n ", 3),
        (["▁Caf", "<C3>", "<A9>"], "é", 3),  # alone, the last token is no character
        (["▁Hi", "a", "▁", "b"], " b", 4),  # a token for each byte: a text that began with them would lack the space
        (["▁Hi", "▁User", "▁:"], "User:", None),
    ],
)
def test_stop_strings_whose_last_token_reads_otherwise_alone(
    pieces: list[str], string: str, expected: int | None
) -> None:
    """As sentencepiece decodes: a text does not begin with its first token's space; bytes make up characters."""

    def detokenize(ids: Sequence[int]) -> str:
        text = "".join(pieces[i] for i in ids).replace("▁", " ").removeprefix(" ")
        whole = text.replace("<C3><A9>", "é")
        return whole.replace("<C3>", "\ufffd").replace("<A9>", "\ufffd")

    condition = StopCondition(SamplingParams(max_new_tokens=9, stop_strings=(string,)), 99, detokenize=detokenize)
    tokens = list(range(len(pieces)))
    assert _first_end(tokens, condition) == ((len(pieces), None) if expected is None else (expected, "stop"))


@pytest.mark.parametrize("characters", ["", "é", "⛄", "😀", "⛄⛄", "⛄⛄é", "😀🎉", "😀⛄🎉", "😀é🎉", "😀éé⛄🎉"])
def test_a_stop_string_is_found_behind_characters_of_several_tokens(characters: str) -> None:
    """Llama 2's and Mistral's vocabularies spell emoji and line breaks by bytes, which are decoded all or none."""
    pieces = ["Great", " ", *(bytes([byte]) for byte in f"{characters}\n".encode()), "User", ":"]

    def detokenize(ids: Sequence[int]) -> str:
        text = ""
        for is_bytes, run in itertools.groupby((pieces[i] for i in ids), lambda piece: isinstance(piece, bytes)):
            parts: Any = list(run)
            try:
                text += b"".join(parts).decode() if is_bytes else "".join(parts)
            except UnicodeDecodeError:
                text += "\ufffd" * len(parts)
        return text

    condition = StopCondition(SamplingParams(max_new_tokens=99, stop_strings=("\nUser:",)), 99, detokenize)
    assert _first_end([*range(len(pieces))], condition, limit=99) == (len(pieces), "stop")


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        (["Six", ".", "\nUser:"], "Six."),
        (["Six", ".", "\nUser", ": x"], "Six."),  # what the last token adds behind it
        (["\n", "Six", "\n"], "\nSix"),  # the first was below the minimum length
        (["\n", "Six", "</s>"], "\nSix"),  # ended by a token without text
        (["\n", "Six"], "\nSix"),  # by its length
        (["Six"], "Six"),
        ([], ""),
    ],
)
def test_the_end_string_that_ended_a_response_is_no_part_of_its_text(pieces: list[str], text: str) -> None:
    def detokenize(ids: Sequence[int]) -> str:
        return "".join(pieces[i] for i in ids).replace("</s>", "")

    assert text_before_end(range(len(pieces)), detokenize, ["\nUser:", "\n"], min_new_tokens=1) == text


def test_a_stop_string_that_overlaps_one_below_the_minimum_length_counts() -> None:
    params = SamplingParams(max_new_tokens=9, min_new_tokens=3, stop_strings=("\n\n",))
    condition = StopCondition(params, eos_id=1, detokenize=lambda ids: "a" + "\n" * (len(ids) - 1))
    assert _first_end([5, 6, 6, 6, 6], condition) == (4, "stop")


def test_textual_stop_string_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(ValueError, match="detokenize"):
        StopCondition(SamplingParams(max_new_tokens=2, stop_strings=("User:",)), eos_id=1)


def test_stop_tokens_that_the_model_lacks_are_looked_for_as_text_alone() -> None:
    """Added to the tokenizer after the model was made, say."""
    params = SamplingParams(max_new_tokens=6, stop_strings=("<|im_end|>", "<extra_id_1>", "bccd"))
    condition = StopCondition(params, 1, detokenize=_text, token_to_id=_SPECIAL.get, vocab_limit=92)
    assert condition.stop_ids == (1, 91)
    assert _first_end([5, 12, 23, 6], condition) == (3, "stop")


def test_more_tokens_than_one_may_end_a_sequence() -> None:
    """As a generation config lists them; those that the model lacks are left out."""
    for ignored, expected in ((False, (1, 4, 91)), (True, (91,))):
        params = SamplingParams(max_new_tokens=6, stop_strings=("<|im_end|>",), ignore_eos=ignored)
        condition = StopCondition(params, 1, _text, _SPECIAL.get, vocab_limit=92, more_eos_ids=(4, 92, -1))
        assert condition.stop_ids == expected
        assert _first_end([5, 4, 6, 91], condition) == ((4, "stop") if ignored else (2, "stop"))


def test_engine_ends_responses_at_stop_strings() -> None:
    model = hf_model()
    engine = engine_for(model=model, detokenize=_text, token_to_id=_SPECIAL.get)
    requests = ragged_requests(10)
    free = {
        r.request_id: r.token_ids for r in engine.generate(requests, SamplingParams(max_new_tokens=40, use_greedy=True))
    }
    wanted = next(tokens for tokens in free.values() if len(tokens) > 10 and max(tokens[5:7]) < 90)
    stop = _text(wanted[5:7])[1:]  # begins inside a token
    params = SamplingParams(max_new_tokens=40, use_greedy=True, stop_strings=(stop, "<|im_end|>"))
    stopped = 0
    for result in engine.generate(requests, params):
        tokens = free[result.request_id]
        end = next((n for n in range(1, len(tokens) + 1) if stop in _text(tokens[:n]) or tokens[n - 1] == 91), None)
        assert result.token_ids == tokens[: end or len(tokens)]
        assert len(result.logprobs) == len(result.token_ids)
        assert result.finish_reason == ("stop" if end or tokens[-1] == 1 else "length")
        stopped += end is not None
    assert stopped > 0
