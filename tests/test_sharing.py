"""A prompt that several sequences begin with is computed once, and every number is as if it had been each time."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_models import VOCAB
from trained_models import ARCHITECTURES, OPTIM

from nemo_style_aligner.trainer.models import attention, layers, whole_layer
from nemo_style_aligner.trainer.models.attention import EngineSelfAttention
from nemo_style_aligner.trainer.models.context import part_of_row
from nemo_style_aligner.trainer.models.gpt import MegatronModel, build_model
from nemo_style_aligner.trainer.models.heads import RewardHeadConfig
from nemo_style_aligner.trainer.models.kept_passes import KeptPasses
from nemo_style_aligner.trainer.models.packing import MicroBatching, Sequences, pack_row
from nemo_style_aligner.trainer.models.pipeline import Scoring, Tokens, forward, train_step
from nemo_style_aligner.trainer.models.ragged import RaggedBatch, after_prompts
from nemo_style_aligner.trainer.models.spans import Spans, taken

pytestmark = pytest.mark.usefixtures("one_thread", "one_rank")

PROMPTS, RESPONSES = (7, 20, 3), (5, 1, 9, 2)  # each response once to each prompt


def groups(vocab_size: int = VOCAB) -> RaggedBatch:
    """A group of four for each prompt, in a random order; one does not count."""
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(vocab_size, (size,), generator=draw) for size in PROMPTS]
    rows = [(p, torch.randint(vocab_size, (size,), generator=draw)) for p in prompts for size in RESPONSES]
    rows = [rows[i] for i in torch.randperm(len(rows), generator=draw).tolist()]
    lengths = torch.tensor([len(prompt) + len(response) for prompt, response in rows])
    sampled = after_prompts(lengths, torch.tensor([len(prompt) for prompt, _ in rows]))
    count = int(sampled.sum())
    columns = {"weights": torch.linspace(0.5, 1.5, count)}
    wanted = torch.arange(len(rows)) != 4
    return RaggedBatch(torch.cat([x for row in rows for x in row]).int(), lengths, sampled, columns, wanted)


def weighted(outputs: torch.Tensor, batch: Any) -> Any:
    weights = batch.columns["weights"] if isinstance(batch, RaggedBatch) else torch.ones_like(outputs)
    return (outputs * weights.view(outputs.shape)).sum(), torch.tensor(float(outputs.numel())), {}


def numbers(model: MegatronModel, batch: RaggedBatch, batching: MicroBatching) -> tuple[list[torch.Tensor], int]:
    """Log-probs (or values), the loss and all gradients; and how many tokens went through the model in training."""
    scoring = None if model.has_reward_head else Scoring(0.7, entropy=False)
    squeeze = (lambda x, _: x[..., 0]) if model.has_reward_head else (lambda x, _: x)
    computed: list[int] = []
    hook = model.gpt.embedding.register_forward_pre_hook(
        lambda _, args, given: computed.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    outputs = forward(model, batch, None, batching, squeeze, scoring=scoring)
    of_forward, training = sum(computed), len(computed)
    model.module.train()
    model.module.zero_grad_buffer()
    loss = train_step(model, batch, None, batching, weighted, scoring=scoring)["loss"]
    hook.remove()
    assert sum(computed[training:]) == of_forward
    found = [outputs, torch.tensor(loss), *(p.main_grad.clone() for p in model.trained_parameters())]
    return found, of_forward


ADAPTERS = {"target_modules": ["all"], "row_init_method": "normal"}
WAYS: dict[str, dict[str, Any]] = {
    "whole layers": {},
    "selective": {"activations_checkpoint_granularity": "selective"},
    "full": {"activations_checkpoint_granularity": "full"},
    "adapters": {"peft": {"peft_scheme": "lora", "lora_tuning": ADAPTERS}},
}


@pytest.mark.parametrize("head", [None, RewardHeadConfig()], ids=["language", "values"])
@pytest.mark.parametrize("way", [*WAYS, "torch", "engine", "biases", "norms of heads", "windows", "sinks"])
def test_every_number_is_the_same(way: str, head: RewardHeadConfig | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probs or values, loss and gradients: with compiled layers and without, recomputed or not, with adapters."""
    if way == "engine":  # as with Transformer Engine, whose parts are others
        monkeypatch.setattr(layers, "LocalSelfAttention", EngineSelfAttention)
    if way in ("torch", "engine"):
        for module in (attention, whole_layer):
            monkeypatch.setattr(module, "kernels_for", lambda _: None)
    name = {"biases": "layernorm1p", "norms of heads": "qk-norm", "windows": way, "sinks": way}.get(way, "llama")
    model = build_model(ARCHITECTURES[name], {"optim": OPTIM, **WAYS.get(way, {})}, torch.float32, head=head)
    batch = groups()
    apart, num_apart = numbers(model, batch, MicroBatching(12, shares_prompts=False))
    for batching in (MicroBatching(12), MicroBatching(1, max_tokens=30), MicroBatching(5)):
        shared, num_shared = numbers(model, batch, batching)
        for found, expected in zip(shared, apart, strict=True):
            torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
        assert num_shared < num_apart
    used = sum(PROMPTS) + len(PROMPTS) * sum(size - 1 for size in RESPONSES)
    left_out = batch.sequences().used.index(0)
    of_it = int(batch.sampled_lengths[left_out]) - 1
    assert numbers(model, batch, MicroBatching(12))[1] == used - of_it


def test_groups_of_one_change_no_bit() -> None:
    model = build_model(ARCHITECTURES["llama"], {"optim": OPTIM}, torch.float32)
    every = groups()
    known, chosen = set(), []
    for row, tokens in enumerate(every.tokens.split(every.lengths.tolist())):
        prompt = tuple(tokens[: int(every.lengths[row] - every.sampled_lengths[row])].tolist())
        chosen += [] if prompt in known else [row]
        known.add(prompt)
    batch = every.rows(torch.tensor(chosen))
    assert len(batch) == len(PROMPTS)
    for batching in (MicroBatching(2), MicroBatching(1, max_tokens=30)):
        shared, _ = numbers(model, batch, batching)
        apart, _ = numbers(model, batch, dataclasses.replace(batching, shares_prompts=False))
        assert all(map(torch.equal, shared, apart))


def test_kept_passes_of_groups_are_trained_on() -> None:
    """The pass for log-probs is the update's, and gives the bits of one that is computed again."""
    batch, batching, found = groups(), MicroBatching(1, max_tokens=40), []
    for is_kept in (True, False):
        torch.manual_seed(1)
        model = build_model(ARCHITECTURES["llama"], {"optim": OPTIM}, torch.float32)
        model.kept_passes = KeptPasses(model, "always", len(batch)) if is_kept else None
        passes: list[int] = []
        model.gpt.register_forward_hook(lambda *_, passes=passes: passes.append(1))
        outputs = forward(model, batch, None, batching, lambda x, _: x, scoring=Scoring(), is_trained=True)
        model.module.train()
        train_step(model, batch, None, batching, weighted, scoring=Scoring())
        found.append([outputs, *(p.main_grad.clone() for p in model.trained_parameters())])
        computed = len(passes)
        assert computed == (2 if is_kept else 4)
    assert all(map(torch.equal, *found))


def test_a_reward_model_shares_what_it_finds() -> None:
    """Whole sequences in padded batches, of which nobody knows the prompts."""
    model = build_model(ARCHITECTURES["llama"], {}, torch.float32, head=RewardHeadConfig(), trainable=False)
    tokens = torch.randint(VOCAB, (1, 30), generator=torch.Generator().manual_seed(2)).repeat(4, 1)
    tokens[1, 18:], tokens[2, 25:], tokens[3] = 1, 2, tokens[3].flip(0)
    wanted = torch.zeros(4, 30, dtype=torch.bool)
    wanted[torch.arange(4), torch.tensor([29, 28, 29, 27])] = True
    found = []
    for shares_prompts in (True, False):
        computed: list[int] = []
        hook = model.gpt.embedding.register_forward_pre_hook(
            lambda _, args, given, computed=computed: computed.append(given["input_ids"].shape[1]), with_kwargs=True
        )
        batching = MicroBatching(4, shares_prompts=shares_prompts)
        outputs = forward(model, Tokens(tokens), wanted, batching, lambda x, _: x[..., 0], (30,))
        hook.remove()
        found.append((outputs, sum(computed)))
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-5, rtol=0)
    assert [computed for _, computed in found] == [117 - 2 * 18, 117]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", [2, 3])
def test_parts_of_a_row_attend_as_the_whole_row(size: int, seed: int) -> None:
    """Each token is in one part; from the keys of all parts, each sees what it sees in the whole row, in that order."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(9) for _ in range(draw.choice((1, 4, 17)))] for _ in range(3)]
    rows = [draw.choice(prompts) + [draw.randrange(9) for _ in range(draw.randrange(1, 12))] for _ in range(7)]
    asked = Sequences(
        [torch.tensor(row) for row in rows],
        [torch.arange(len(row) - 1) >= draw.randrange(len(row) - 1) for row in rows],
    )
    whole = pack_row(asked.sharing(asked.prompt_lengths()), 1)
    parts = [part_of_row(whole, size, rank, 4) for rank in range(size)]
    (length,) = {part.tokens.shape[1] for part, _ in parts}
    assert length % 4 == 0 and length * size < whole.tokens.shape[1] + size * (len(whole.sequences.spans.spans) + 4)
    for part, _ in parts:
        context = part.sequences.context
        assert context is not None and sorted(context.keys.tolist()) == list(range(size * length))
    count = whole.tokens.shape[1]
    context = parts[0][0].sequences.context
    assert context is not None
    gathered = torch.cat([part.tokens[0] for part, _ in parts])[context.keys]
    assert torch.equal(gathered[:count], whole.tokens[0])  # keys lie in the row's order

    def seen(spans: Spans) -> list[list[int]]:
        """Keys that each token sees."""
        found = []
        for span in spans:
            keys = taken(torch.arange(size * length), span.keys).tolist()
            first = len(keys) - span.queries.size
            found += [keys[: first + place + 1] for place in range(span.queries.size)]
        return found

    expected, place = seen(whole.sequences.spans), context.keys.argsort()
    for rank, (part, own) in enumerate(parts):
        for token, keys in enumerate(seen(part.sequences.spans)):
            where = int(place[rank * length + token])
            assert where >= count or keys == expected[where]
            assert where >= count or part.sequences.positions[token] == whole.sequences.positions[where]
        assert torch.equal(part.tokens[0][part.outputs], whole.tokens[0][whole.outputs[own]])
    outputs = torch.cat([F.pad(own, (0, context.most_outputs - len(own))) for _, own in parts])
    assert outputs[context.outputs].tolist() == list(range(len(whole.outputs)))
