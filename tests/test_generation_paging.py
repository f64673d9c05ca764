"""Pages, shared prefixes, preemption, admission: who computes what when must not show in any response."""

from __future__ import annotations

import dataclasses
import random
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from generation_models import EOS, architecture, engine_for, hf_model, ragged_requests, weights_of

from nemo_style_aligner.engine.contract import GenerationRequest, GenerationResult, SamplingParams, StopCondition
from nemo_style_aligner.engine.embedded import engine as engine_module
from nemo_style_aligner.engine.embedded.block_table import BlockTable
from nemo_style_aligner.engine.embedded.engine import EmbeddedEngine
from nemo_style_aligner.engine.embedded.scheduler import Scheduler, StepPlan, Task
from nemo_style_aligner.engine.embedded.step import PAGE_TOKENS, EngineShape, ModelStep, StepInput
from nemo_style_aligner.engine.embedded.trainer_weights import TrainerWeights
from nemo_style_aligner.engine.sampling import SamplingRows, request_key, sample
from nemo_style_aligner.trainer.config.loading import ConfigError
from nemo_style_aligner.trainer.config.schema import Generation
from nemo_style_aligner.trainer.rl.rollouts.setup import require_kv_cache

# ---- block table --------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_block_table_under_random_use(seed: int) -> None:
    """Every slot reads its own tokens through the table, nobody writes to a shared page, no page is lost."""
    generator = random.Random(seed)
    num_slots, num_pages = 5, generator.choice((6, 12, 40))
    blocks = BlockTable(num_slots, 6, num_pages)
    memory = np.full((num_pages, PAGE_TOKENS), -1)
    held: dict[int, list[int]] = {}  # slot -> its tokens

    def owners(page: int) -> int:
        return sum(page in blocks.table[slot, : blocks.held(slot)] for slot in held)

    def write(slot: int, position: int, token: int) -> None:
        page = blocks.table[slot, position // PAGE_TOKENS]
        assert owners(page) == 1
        memory[page, position % PAGE_TOKENS] = token

    shared_tokens = refused = taken_back = 0
    given_back: dict[int, int] = {}  # slot -> pages
    for _ in range(600):
        slot = generator.randrange(num_slots)
        if slot not in held:
            # Few different pages, so that prefixes meet often.
            tokens = [t for _ in range(4) for t in [generator.randrange(2)] * PAGE_TOKENS][: generator.randint(1, 64)]
            watermark, before = generator.randrange(3), blocks.available
            shared = blocks.enter(slot, tokens, watermark)
            if shared is None:
                refused += 1
                assert blocks.available == before and blocks.held(slot) == 0
                continue
            assert blocks.available >= watermark
            assert shared % PAGE_TOKENS == 0 and shared < len(tokens)
            shared_tokens += shared
            held[slot], given_back[slot] = tokens, 0
            for position in range(shared, len(tokens)):
                write(slot, position, tokens[position])
        elif generator.random() < 0.7 and len(held[slot]) < 6 * PAGE_TOKENS:
            position = len(held[slot])
            if position % PAGE_TOKENS or blocks.grow(slot):
                held[slot].append(2)
                write(slot, position, 2)
            else:
                assert blocks.available == 0
        elif generator.random() < 0.3:
            position = generator.randint(-5, len(held[slot]) - 1)
            blocks.give_back(slot, position)
            given_back[slot] = max(given_back[slot], position // PAGE_TOKENS)
            taken_back += given_back[slot] > 0
        else:
            blocks.release(slot, held.pop(slot))
        in_use = {int(page) for slot in held for page in blocks.table[slot, : blocks.held(slot)]}
        assert blocks.in_use == len(in_use) == num_pages - blocks.available
        assert all(blocks._owners[page] == owners(page) for page in range(num_pages))
        assert sorted([*in_use, *blocks._free, *blocks._idle]) == list(range(num_pages))
        for slot, tokens in held.items():
            first = given_back[slot]
            seen = memory[blocks.table[slot, first:]].reshape(-1)[: len(tokens) - first * PAGE_TOKENS]
            assert seen.tolist() == tokens[first * PAGE_TOKENS :]
            unused = [*blocks.table[slot, :first], *blocks.table[slot, blocks.held(slot) :]]
            assert set(unused) <= {blocks.table[slot, first]}
    assert shared_tokens > 0 and taken_back > 0 and (refused > 0) == (num_pages < 40)
    for slot in held:
        blocks.release(slot, held[slot])
    assert blocks.in_use == 0
    blocks.reset()
    assert blocks.enter(0, [0] * 64, 0) == 0  # nothing is remembered


def test_low_pages_first_and_prefixes_kept_until_memory_is_needed() -> None:
    blocks = BlockTable(3, 4, 6)
    assert blocks.enter(0, [1] * 40, 0) == 0 and blocks.table[0].tolist() == [0, 1, 2, 0]
    blocks.release(0, [1] * 40)  # two full pages stay known, the third is free
    assert blocks.enter(0, [7] * 17, 0) == 0 and blocks.table[0, :2].tolist() == [2, 3]
    assert blocks.enter(1, [1] * 40, 0) == 32 and blocks.table[1, :3].tolist() == [0, 1, 4]
    blocks.release(1, [1] * 40)
    assert blocks.enter(1, [1] * 16, 0) == 0  # its last token must be computed
    blocks.release(1, [1] * 16)
    # The prefix's last page goes first: its beginning is of use without it, not the other way round.
    assert blocks.enter(1, [9] * 40, 0) == 0 and blocks.table[1, :3].tolist() == [4, 5, 1]
    assert blocks.enter(2, [1] * 17, 0) is None
    blocks.release(0, [7] * 17)
    assert blocks.enter(2, [1] * 17, 0) == 16


def test_pages_that_were_never_computed_are_not_shared() -> None:
    blocks = BlockTable(2, 4, 8)
    blocks.enter(0, [1] * 64, 0)
    blocks.release(0, [1] * 40)  # preempted in the middle of its prompt
    assert blocks.enter(1, [1] * 64, 0) == 32


# ---- scheduler ----------------------------------------------------------------------------------


def scheduler(prompts: list[list[int]], blocks: BlockTable, max_new_tokens: int = 1, chunk: int = 4) -> Scheduler:
    sampling = SamplingParams(max_new_tokens=max_new_tokens)
    stop = StopCondition(sampling, 0)
    requests = (GenerationRequest(*pair) for pair in enumerate(prompts))
    tasks = iter([Task(request=request, sampling=sampling, stop=stop) for request in requests])
    return Scheduler(lambda: next(tasks, None), blocks, prefill_chunk_tokens=chunk, max_step_tokens=2 * chunk)


def planned(plan: StepPlan) -> tuple[list[int], list[tuple[int, int, int]]]:
    """The requests that decode; the chunks as request, start and length."""
    chunks = [(chunk.sequence.request.request_id, chunk.start, chunk.length) for chunk in plan.prefill]
    return [sequence.request.request_id for sequence in plan.decode], chunks


def advance(of: Scheduler) -> StepPlan:
    plan = of.plan()
    sequences, _ = plan.sampled()
    of.record(plan, [70 + sequence.number for sequence in sequences], [-0.5] * len(sequences))
    return plan


def test_passes_decode_and_prefill() -> None:
    of = scheduler([[1] * 10, [2] * 6, [3] * 12], BlockTable(2, 2, 4), max_new_tokens=20)
    first, second = of.refill()
    assert (first.slot, second.slot) == (0, 1) and of.num_active == 2
    assert planned(advance(of)) == ([], [(0, 0, 8)])
    assert planned(advance(of)) == ([], [(0, 8, 2), (1, 0, 6)])
    assert of.newest.tolist() == [70, 71] and of.positions.tolist() == [10, 6]
    for _ in range(6):
        assert planned(advance(of)) == ([0, 1], [])
    assert first.token_ids == [70] * 7 and first.logprobs == [-0.5] * 7 and of.positions.tolist() == [16, 12]
    of.leave(first)
    (third,) = of.refill()
    assert (third.slot, third.number) == (0, 2)
    chunks = [planned(advance(of)) for _ in range(3)]
    assert chunks == [([1], [(2, 0, 4)]), ([1], [(2, 4, 4)]), ([1], [(2, 8, 4)])]
    plan = advance(of)
    assert planned(plan) == ([2, 1], []) and plan.decode_slots.tolist() == [0, 1]


def test_sequences_enter_while_each_can_have_another_page() -> None:
    prompts = [[number] * PAGE_TOKENS for number in range(2)]
    assert len(scheduler(prompts, BlockTable(2, 2, 2)).refill()) == 2  # of one token each, which is never fed
    for num_pages, entering in ((3, 1), (4, 2)):
        of = scheduler(prompts, BlockTable(2, 2, num_pages), max_new_tokens=2)
        assert len(of.refill()) == entering
    of = scheduler([[1] * 40, [1] * 40], BlockTable(2, 3, 6), chunk=50)
    of.refill()
    assert of.num_shared_tokens == 2 * PAGE_TOKENS
    assert planned(of.plan()) == ([], [(0, 0, 40), (1, 32, 8)])


def test_the_youngest_makes_room_and_goes_on_where_it_was() -> None:
    of = scheduler([[1] * 15, [2] * 15], BlockTable(2, 3, 4), max_new_tokens=30, chunk=50)
    older, younger = of.refill()
    while not of.num_preemptions:
        advance(of)
    assert of.num_preemptions == 1 and (older.slot, younger.slot, of.num_active) == (0, -1, 1)
    assert len(older.token_ids) == len(younger.token_ids) + 1 == 19  # a page begins with the 18th, which is token 33
    assert of.refill() == []  # no memory
    of.leave(older)
    assert of.refill() == [younger] and younger.prefill_ids == [2] * 15 + [71] * 18
    assert planned(advance(of)) == ([], [(1, 16, 17)]) and len(younger.token_ids) == 19  # its first page is still known


# ---- a step that remembers tokens instead of keys ---------------------------------------------------


class RememberingStep(ModelStep):
    """Stores tokens in pages; its logits are a hash of all tokens that it finds through the block table."""

    def __init__(self, shape: EngineShape) -> None:
        self.shape = shape
        self.passes: list[tuple[int, int]] = []  # decode tokens, prompt tokens

    def build(self) -> None:
        self.pages = np.full((self.shape.num_pages, PAGE_TOKENS), -1)

    def forward(self, step: StepInput) -> torch.Tensor:
        assert len(step.token_ids) <= self.shape.max_step_tokens
        assert len(step.output_rows) <= self.shape.num_slots
        for array in (step.token_ids, step.positions, step.slots, step.segments, step.output_rows, step.block_table):
            assert array.dtype == np.int32 and array.flags.c_contiguous
        assert (step.segments[:, 0] == np.cumsum([0, *step.segments[:-1, 1]])).all()
        assert (step.segments[: step.num_decode, 1] == 1).all() and step.segments[:, 1].sum() == len(step.token_ids)
        places = step.block_table[step.slots, step.positions // PAGE_TOKENS], step.positions % PAGE_TOKENS
        assert len(set(zip(*map(np.ndarray.tolist, places), strict=True))) == len(step.token_ids)
        self.pages[places] = step.token_ids
        self.passes.append((step.num_decode, len(step.token_ids) - step.num_decode))
        logits = []
        for row in step.output_rows:
            seen = self.pages[step.block_table[step.slots[row]]].reshape(-1)[: step.positions[row] + 1]
            logits.append(hashed_logits(seen.tolist(), self.shape.architecture.reach))
        return torch.stack(logits) if logits else torch.empty(0, VOCAB)

    def clear_pages(self) -> None:
        self.pages.fill(-1)

    def release(self) -> None:
        self.clear_pages()

    def acquire(self) -> None:
        pass

    num_compilations = 1
    description = "remembering"


VOCAB = architecture().vocab_size


def hashed_logits(tokens: list[int], reach: int | None = None) -> torch.Tensor:
    seen = tokens if reach is None else tokens[-reach:]
    draws = np.random.default_rng(zlib.crc32(np.array(seen).tobytes())).standard_normal(VOCAB)
    return torch.from_numpy(draws).float() * 2


def expected_tokens(request: GenerationRequest, params: SamplingParams, reach: int | None) -> list[int]:
    tokens: list[int] = []
    key = torch.tensor([request_key(params.seed, request.seed)])
    while len(tokens) < params.max_new_tokens and tokens[-1:] != [EOS]:
        rows = SamplingRows(key, torch.tensor([len(tokens)]))
        token, _ = sample(hashed_logits(request.prompt_token_ids + tokens, reach)[None], params, rows)
        tokens.append(int(token))
    return tokens


@pytest.fixture
def remembering(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Builds engines around a `RememberingStep`, which needs no weights."""

    def make(**options: Any) -> tuple[EmbeddedEngine, RememberingStep]:
        steps: list[RememberingStep] = []

        def choose(choice: str, shape: EngineShape, device: torch.device, trainer: TrainerWeights) -> ModelStep:
            steps.append(RememberingStep(shape))
            steps[0].build()
            steps[0].build()
            return steps[0]

        monkeypatch.setattr(engine_module, "choose_step", choose)
        engine = engine_for(**options)
        engine._weight_version = 0
        return engine, steps[0]

    return make


def related_requests(count: int, seed: int) -> list[GenerationRequest]:
    """Prompts that share beginnings of all lengths."""
    generator = random.Random(seed)
    stems = [[generator.randrange(2, VOCAB) for _ in range(100)] for _ in range(2)]
    return [
        GenerationRequest(
            i, generator.choice(stems)[: generator.randint(1, 100)] + [i % 5] * generator.randint(0, 9), i
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("seed", range(8))
def test_no_schedule_shows_in_the_responses(remembering: Any, seed: int) -> None:
    """Random limits, most with far too little memory: each token follows from its own sequence's tokens alone, all of
    them or those of a window."""
    generator = random.Random(seed)
    engine, step = remembering(
        family="llama" if seed % 2 else "mistral-sinks",
        num_slots=generator.choice((1, 3, 8)),
        kv_cache_tokens=generator.choice((160, 176, 320, None)),
        prefill_chunk_tokens=generator.choice((1, 5, 16, 33, 500)),
        lookup_decoding=(looks_up := seed % 4 < 2),
    )
    params = SamplingParams(max_new_tokens=40, seed=seed)
    requests = related_requests(14, seed)
    reach = step.shape.architecture.reach
    expected = [expected_tokens(request, params, reach) for request in requests]
    for turn in range(2):  # the second time finds prompts in memory, and what responses were
        results = list(engine.generate(iter(requests), params))
        assert sorted(result.request_id for result in results) == list(range(14))
        for result in results:
            assert result.token_ids == expected[result.request_id]
        statistics = engine.statistics
        assert engine._blocks.in_use == 0
        may_guess = looks_up and turn == 1 and step.shape.num_slots > 1
        assert (statistics.guesses_held > 0) == may_guess, "random tokens are not guessed but by what they were"
        assert 0 < statistics.peak_pages <= statistics.num_pages == step.shape.num_pages
        prompts = sum(len(request.prompt_token_ids) for request in requests)
        computed = statistics.prefill_tokens + statistics.shared_prefix_tokens
        assert computed == prompts if statistics.preemptions == 0 else computed > prompts


def test_preemption_happens_and_the_oldest_always_goes_on(remembering: Any) -> None:
    engine, _ = remembering(num_slots=4, kv_cache_tokens=160)
    params = SamplingParams(max_new_tokens=60, min_new_tokens=60)
    requests = [GenerationRequest(i, [i + 2] * 10, i) for i in range(4)]
    finished = [result.request_id for result in engine.generate(requests, params)]
    assert engine.statistics.preemptions > 0
    assert engine.statistics.peak_pages == 10
    assert finished[0] == 0


def test_pages_before_all_windows_are_given_back(remembering: Any) -> None:
    """Windows of 21 positions lie in 3 pages at most: four sequences of 130 tokens need 12 pages, not 36."""
    engine, _ = remembering(family="mistral-sinks", num_slots=4, kv_cache_tokens=12 * PAGE_TOKENS)
    params = SamplingParams(max_new_tokens=120, min_new_tokens=120)
    assert len(list(engine.generate([GenerationRequest(i, [i + 2] * 10, i) for i in range(4)], params))) == 4
    assert engine.statistics.preemptions == 0 and 8 <= engine.statistics.peak_pages <= 12


def test_requests_enter_when_there_is_memory_for_them(remembering: Any) -> None:
    """Two prompts of 5 pages and a page each to grow: 12 of 14 pages. The third waits without stopping them."""
    engine, step = remembering(num_slots=3, kv_cache_tokens=14 * PAGE_TOKENS)
    params = SamplingParams(max_new_tokens=10, use_greedy=True)
    requests = [GenerationRequest(i, [i + 2] * 80, i) for i in range(3)]
    assert len(list(engine.generate(requests, params))) == 3
    assert engine.statistics.preemptions == 0
    assert step.passes[0] == (0, 160)
    assert (0, 80) in step.passes[1:] or (1, 80) in step.passes[1:]


def test_passes_that_decode_carry_chunks(remembering: Any) -> None:
    engine, step = remembering(num_slots=4, prefill_chunk_tokens=8)
    params = SamplingParams(max_new_tokens=30, min_new_tokens=30)
    requests = ragged_requests(12, longest=60)
    assert len(list(engine.generate(requests, params))) == 12
    assert max(prompt for decode, prompt in step.passes if decode) == 8
    assert step.passes[0] == (0, min(4 * 8 + 4, sum(len(request.prompt_token_ids) for request in requests[:4])))


def test_prompt_tokens_of_a_pass_by_default(remembering: Any) -> None:
    """512 beside decoding on a CPU, 4096 on a GPU, and four times as many in a pass that decodes nothing."""
    engine, step = remembering(num_slots=2, max_sequence_length=3000)
    requests = [GenerationRequest(i, [i + 2] * length, i) for i, length in enumerate((5, 2800))]
    assert len(list(engine.generate(requests, SamplingParams(max_new_tokens=8, min_new_tokens=8)))) == 2
    assert step.passes[:3] == [(0, 2 + 4 * 512), (1, 512), (1, 2805 - 2050 - 512)]
    assert remembering(num_slots=2, device="cuda")[0]._shape.max_step_tokens == 2 + 4 * 4096


def test_memory_that_runs_out_in_a_pass_names_the_keys(remembering: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, step = remembering(num_slots=2)

    def run_out(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(step, "forward", run_out)
    requests = [GenerationRequest(i, [i + 2] * 40, i) for i in range(3)]
    said = r"80 prompt tokens and 0 responses.*prefill_chunk_tokens, now 512"
    with pytest.raises(torch.OutOfMemoryError, match=said):
        list(engine.generate(requests, SamplingParams(max_new_tokens=8)))
    monkeypatch.undo()
    assert len(list(engine.generate(requests, SamplingParams(max_new_tokens=8)))) == 3


def test_an_abandoned_generation_leaves_no_pages(remembering: Any) -> None:
    engine, _ = remembering(num_slots=3)
    requests = [dataclasses.replace(request, max_new_tokens=10 + i) for i, request in enumerate(related_requests(8, 0))]
    results = engine.generate(requests, SamplingParams(max_new_tokens=20))
    next(results)
    assert engine._blocks.in_use > 0
    results.close()
    assert engine._blocks.available == engine._shape.num_pages


def test_too_little_memory_is_an_error_that_names_the_key() -> None:
    with pytest.raises(ValueError, match=r"kv_cache_tokens=159 cannot hold one sequence of 160 tokens; set it to 160"):
        engine_for(kv_cache_tokens=159)
    section = Generation(kv_cache_tokens=159)
    with pytest.raises(ConfigError, match=r"^trainer\.ppo\.generation\.kv_cache_tokens=159 cannot hold one sequence"):
        require_kv_cache(section, 160)
    require_kv_cache(section, 144)
    require_kv_cache(section.replaced(engine="trtllm"), 160)  # which has no such cache


# ---- with a model ------------------------------------------------------------------------------------


def by_id(results: Iterator[GenerationResult]) -> dict[int, GenerationResult]:
    return {result.request_id: result for result in results}


def assert_same(results: dict[int, GenerationResult], expected: dict[int, GenerationResult]) -> None:
    assert results.keys() == expected.keys()
    for index, result in results.items():
        assert result.token_ids == expected[index].token_ids
        torch.testing.assert_close(
            torch.tensor(result.logprobs), torch.tensor(expected[index].logprobs), atol=2e-5, rtol=0
        )


def test_samples_of_one_prompt_compute_it_once() -> None:
    model = hf_model()
    prompt = [random.Random(1).randrange(2, VOCAB) for _ in range(100)]
    requests = [GenerationRequest(i, prompt, seed=i) for i in range(8)]
    params = SamplingParams(max_new_tokens=20, min_new_tokens=20, repetition_penalty=1.1, seed=1)
    engine = engine_for(model=model, num_slots=8, prefill_chunk_tokens=10)  # chunks end inside of pages
    together = by_id(engine.generate(requests, params))
    assert engine.statistics.shared_prefix_tokens == 7 * 96
    assert engine.statistics.prefill_tokens == 100 + 7 * 4
    assert engine.statistics.peak_pages == 6 + 8 * 2
    alone = engine_for(model=model, num_slots=1)
    expected: dict[int, GenerationResult] = {}
    for request in requests:
        alone.refit(weights_of(model).items(), 0)  # forgets the prompt
        expected |= by_id(alone.generate([request], params))
        assert alone.statistics.shared_prefix_tokens == 0
    assert_same(together, expected)
    list(engine.generate(requests[:1], params))
    assert engine.statistics.prefill_tokens == 4  # a later call finds the prompt in memory


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_sequences_that_lose_their_memory_go_on_with_the_same_tokens(family: str) -> None:
    model = hf_model(family)
    params = SamplingParams(max_new_tokens=60, temperature=0.9, top_p=0.95, repetition_penalty=1.2, seed=3)
    requests = ragged_requests(10, longest=40)
    expected = by_id(engine_for(family, model, num_slots=6).generate(requests, params))
    tiny = engine_for(family, model, num_slots=6, kv_cache_tokens=160)
    results = by_id(tiny.generate(requests, params))
    assert tiny.statistics.preemptions > 0
    assert tiny.statistics.peak_pages <= tiny.statistics.num_pages == 10
    assert_same(results, expected)


def test_new_weights_forget_old_prompts() -> None:
    model, other = hf_model(), hf_model(seed=5)
    requests = [GenerationRequest(i, [7] * 50, seed=i) for i in range(3)]
    params = SamplingParams(max_new_tokens=10)
    engine = engine_for(model=model)
    list(engine.generate(requests, params))
    engine.refit(weights_of(other).items(), 1)
    assert_same(by_id(engine.generate(requests, params)), by_id(engine_for(model=other).generate(requests, params)))


def test_new_memory_is_taken_last() -> None:
    """Prompts that never come again do not walk through all pages: twice what was in use at most."""
    blocks = BlockTable(2, 8, 1000)
    touched, most = 0, 0
    for number in range(200):
        for slot in (0, 1):
            assert blocks.enter(slot, list(range(1000 * number + slot * 500, 1000 * number + slot * 500 + 100)), 0) == 0
        touched, most = max(touched, int(blocks.table.max())), max(most, blocks.in_use)
        for slot in (0, 1):
            blocks.release(slot, list(range(1000 * number + slot * 500, 1000 * number + slot * 500 + 100)))
    assert most == 14 and touched <= 2 * most
    assert blocks.enter(0, list(range(199 * 1000, 199 * 1000 + 100)), 0) == 96  # what came last is still known
