"""Forward passes that are kept for the update: the same numbers, in the memory that there is."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import tracemalloc
from collections.abc import Iterator

import pytest
import torch
from small_models import VOCAB
from trained_models import ADAM, ARCHITECTURES, OPTIM, make_actor, policy_batch, tokens

from nemo_style_aligner.kinds import KeepChoice
from nemo_style_aligner.trainer.config.schema import Updates
from nemo_style_aligner.trainer.models import kept_passes as kept_passes_module
from nemo_style_aligner.trainer.models import logprobs as logprobs_module
from nemo_style_aligner.trainer.models import products
from nemo_style_aligner.trainer.models.activation_memory import activation_bytes
from nemo_style_aligner.trainer.models.actor import Actor
from nemo_style_aligner.trainer.models.critic import Critic, ValueBatch
from nemo_style_aligner.trainer.models.frozen import FrozenWeights
from nemo_style_aligner.trainer.models.gpt import MegatronModel, build_model
from nemo_style_aligner.trainer.models.heads import RewardHeadConfig
from nemo_style_aligner.trainer.models.kept_passes import Part, keep_passes
from nemo_style_aligner.trainer.models.nonfinite import STOP
from nemo_style_aligner.trainer.models.optimizer import Optimizer, Schedule
from nemo_style_aligner.trainer.models.packing import MicroBatching, Sequences
from nemo_style_aligner.trainer.models.ragged import after_prompts

pytestmark = pytest.mark.usefixtures("one_thread", "one_rank")


def keeping_actor(choice: KeepChoice, update_size: int = 5, dtype: torch.dtype = torch.float32) -> Actor:
    model = build_model(ARCHITECTURES["llama"], {"optim": OPTIM}, dtype)
    actor = make_actor(model, None)
    keep_passes(model, None, choice, update_size)
    return actor


def keeping_critic(choice: KeepChoice, update_size: int, nonfinite: Updates = STOP) -> Critic:
    head = RewardHeadConfig()
    model = build_model(ARCHITECTURES["llama"], {"optim": OPTIM}, torch.float32, head=head)
    optimizer = Optimizer(model, ADAM, Schedule(lr=1e-2, name="constant"), 1.0, nonfinite)
    keep_passes(model, None, choice, update_size)
    return Critic(
        model, optimizer, head, training_batching=MicroBatching(2), global_batch_size=update_size,
        forward_batching=MicroBatching(2), loss_clip=0.2,
    )  # fmt: skip


def weights_of(model: MegatronModel) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@contextlib.contextmanager
def counted_passes(model: MegatronModel) -> Iterator[list[int]]:
    """Tokens of each forward pass."""
    passes: list[int] = []
    hook = model.gpt.register_forward_pre_hook(lambda _, arguments: passes.append(arguments[0].shape[1]))
    yield passes
    hook.remove()


def same_start(*models: MegatronModel) -> None:
    first, *others = (dict(model.named_parameters()) for model in models)
    with torch.no_grad():
        for other in others:
            for name, parameter in other.items():
                parameter.copy_(first[name])


def test_a_step_that_was_abandoned_leaves_nothing_to_the_next() -> None:
    kept, fresh = keeping_actor("always"), keeping_actor("never")
    same_start(kept.model, fresh.model)
    kept.logprobs(policy_batch(tokens(seed=1)), is_trained=True)
    batch = policy_batch(tokens(seed=2))
    torch.testing.assert_close(kept.logprobs(batch, is_trained=True), kept.logprobs(batch))
    with counted_passes(kept.model) as passes:
        reports = [actor.update(batch) for actor in (kept, fresh)]
        assert passes == [] and reports[0] == reports[1]
        assert all(torch.equal(p, weights_of(fresh.model)[name]) for name, p in weights_of(kept.model).items())
        kept.update(batch)  # with other weights, nothing is known of it
        assert sum(passes) == 5 * 11


def test_outputs_that_were_not_wanted_are_computed_for_training() -> None:
    """The same tokens, but the pass was asked for fewer of their log-probs."""
    kept, fresh = keeping_actor("always"), keeping_actor("never")
    same_start(kept.model, fresh.model)
    batch = policy_batch(tokens())
    fewer = after_prompts(batch.lengths, torch.tensor([1, 1, 1, 5, 1]))
    asked = dataclasses.replace(batch, sampled=fewer, columns={})
    kept.logprobs(asked, is_trained=True)
    reports = [actor.update(batch) for actor in (kept, fresh)]
    assert reports[0] == reports[1]


def test_logits_of_kept_passes_are_kept_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The output layer multiplies once per token for them, then twice for their gradients."""
    made: list[tuple[int, int]] = []
    product = logprobs_module.product

    def counted(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        made.append((a.shape[0], b.shape[1]))
        return product(a, b, out)

    monkeypatch.setattr(logprobs_module, "product", counted)
    monkeypatch.setattr(products, "_has_bf16_arithmetic", lambda: True)
    actor = keeping_actor("auto", dtype=torch.bfloat16)
    assert actor.model.kept_passes is not None
    actor.model.kept_passes._free_bytes = lambda: 1e9  # type: ignore[method-assign]
    ids, (_, h) = tokens(), actor.model.gpt.shared_embedding_or_output_weight().shape
    actor.logprobs(policy_batch(ids), is_trained=True)
    per_token = activation_bytes(ARCHITECTURES["llama"], 2) + 2 * VOCAB
    assert actor.model.kept_passes._held() == 5 * 11 * per_token
    assert sum(rows for rows, width in made if width == VOCAB) == 5 * 11
    made.clear()
    fresh = keeping_actor("never", dtype=torch.bfloat16)
    same_start(actor.model, fresh.model)
    reports = [actor.update(policy_batch(ids))]
    assert sum(rows for rows, width in made if width == h) == 5 * 11
    assert not [rows for rows, width in made if width == VOCAB]
    reports.append(fresh.update(policy_batch(ids)))
    assert reports[0] == reports[1]  # with the norm of the gradients


@pytest.mark.parametrize(
    ("free", "unused", "is_kept"),  # bytes beside the reserve, and bytes of the process, in activations of the batch
    [
        (2.0, 0.0, True),
        (0.5, 0.0, False),  # half of 1.5 is too little
        (0.5, 1.0, True),  # but what the process has nobody else gets
        (-3.0, 1.0, True),
        (-3.0, 0.9, False),  # a save is using some of it, say
    ],
)
def test_passes_are_kept_in_memory_that_the_process_has_anyway(
    free: float, unused: float, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_passes_module, "keep_freed_memory", lambda: True)
    actor = keeping_actor("auto")
    passes, ids = actor.model.kept_passes, tokens()
    assert passes is not None
    of_all = 5 * 11 * activation_bytes(ARCHITECTURES["llama"], 4)
    monkeypatch.setattr(kept_passes_module, "unused_memory", lambda: int(unused * of_all))
    for at_hand in (2.0, free):
        passes._free_bytes = lambda at_hand=at_hand: at_hand * of_all  # type: ignore[method-assign,misc]
        actor.logprobs(policy_batch(ids), is_trained=True)
        held = passes._held()
        actor.update(policy_batch(ids))
    assert held == of_all * is_kept


def test_sequences_that_differ_in_their_last_token_alone_are_told_apart() -> None:
    """It is no input of the model, but a target: answers of one token to the same prompt, say."""
    kept, fresh = keeping_actor("always"), keeping_actor("never")
    same_start(kept.model, fresh.model)
    ids, order = tokens().clone(), torch.tensor([3, 0, 4, 1, 2])
    ids[3, :-1] = ids[1, :-1]
    ids[3, -1] = (ids[1, -1] + 1) % VOCAB
    batch = policy_batch(ids)
    kept.logprobs(batch, is_trained=True)
    batch.columns["advantages"].view(5, 11)[3] *= -2.0
    batch = batch.rows(order)
    with counted_passes(kept.model) as passes:
        reports = [kept.update(batch), fresh.update(batch)]
        assert passes == []
    assert reports[0]["loss"] == pytest.approx(reports[1]["loss"], rel=1e-5)
    assert reports[0]["grad_norm"] == pytest.approx(reports[1]["grad_norm"], rel=1e-4)


def test_equal_sequences_are_told_apart_by_what_was_wanted_of_them() -> None:
    """A prompt and a response may read as another's longer prompt and shorter response."""
    kept, fresh = keeping_actor("always"), keeping_actor("never")
    same_start(kept.model, fresh.model)
    ids = tokens().clone()
    ids[3] = ids[1]
    batch = policy_batch(ids)
    batch.sampled[len(ids[0]) :][:7] = False  # its prompt has 7 tokens
    batch.columns = {name: torch.cat([x[:11], x[17:]]) for name, x in batch.columns.items()}
    kept.logprobs(batch, is_trained=True)
    with counted_passes(kept.model) as passes:
        assert kept.update(batch) == fresh.update(batch)
        assert passes == []


def test_a_validation_makes_room_for_the_next_rollouts() -> None:
    critic = keeping_critic("always", 5)
    model, passes_kept = critic.model, critic.model.kept_passes
    lengths = torch.tensor([12, 5, 9, 12, 7])
    critic.values(tokens(seed=1), lengths)
    critic.values(tokens(seed=2)[:2], lengths[:2])
    critic.values(tokens(seed=2)[2:], lengths[2:])
    assert passes_kept is not None
    assert passes_kept._held() <= (int((lengths - 1).sum()) + 2 * 11) * passes_kept._bytes_per_token()
    mask = (torch.arange(11)[None] < lengths[:, None] - 1).float()
    batch = ValueBatch(tokens(seed=2), torch.randn(5, 11), torch.zeros(5, 11), mask)
    with counted_passes(model) as passes:
        critic.train(batch)
        assert passes == [] and passes_kept._held() == 0
        critic.values(tokens(seed=2), lengths)
        critic.weights_changed()
        passes.clear()
        critic.train(batch)
        assert sum(passes) == int((lengths - 1).sum())


@pytest.mark.parametrize("choice", ["always", "never"])
def test_kept_passes_of_a_sequence_that_is_left_out_spoil_no_update(choice: KeepChoice) -> None:
    """Two sequences in a pass; the gradient of the one that is left out would be 0 times NaN."""
    critic = keeping_critic(choice, 4, Updates(on_nonfinite="skip", max_consecutive_skips=2))
    model = critic.model
    embedding = model.gpt.embedding.word_embeddings.weight
    ids, lengths = tokens(4), torch.tensor([12, 12, 9, 11])
    ids[ids == 7] = 8
    ids[1, 4] = 7
    with torch.no_grad():
        embedding[7] = math.nan
    values = critic.values(ids, lengths)
    is_bad = ~values.isfinite().all(1)
    assert is_bad.tolist() == [False, True, False, False]
    mask = (torch.arange(11)[None] < lengths[:, None] - 1).float() * ~is_bad[:, None]
    batch = ValueBatch(ids, torch.randn(4, 11), values.masked_fill(is_bad[:, None], 0), mask)
    with counted_passes(model) as passes:
        (report,) = critic.train(batch)
        assert sum(passes) == (11 if choice == "always" else 11 + 8 + 10)  # the first again, which shared a pass
    assert report["skipped_updates"] == 0 and math.isfinite(report["grad_norm"])


def test_a_critic_of_several_updates_keeps_nothing() -> None:
    """It uses nothing either, not even in its first batch: one that is resumed later rounds as one that is not."""
    critic = keeping_critic("always", 2)
    kept = critic.model.kept_passes
    lengths, ones = torch.full((4,), 12), torch.ones(4, 11)
    assert kept is not None
    for held in (True, False):
        critic.values(tokens(4), lengths)
        assert (kept._held() > 0) == held
        with counted_passes(critic.model) as passes:
            # The newest sequences first, which the first update could take.
            critic.train(ValueBatch(tokens(4).flip(0), torch.randn(4, 11), torch.zeros(4, 11), ones))
        assert sum(passes) == 4 * 11 and kept._held() == 0
    critic.train(ValueBatch(tokens(2), torch.randn(2, 11), torch.zeros(2, 11), ones[:2]))
    critic.values(tokens(2), lengths[:2])
    assert kept._held() > 0


def test_finding_kept_passes_takes_little_memory() -> None:
    """Half of the responses were cut off and are not trained on: any of their beginnings might have been computed."""
    kept = keeping_actor("always", update_size=256).model.kept_passes
    assert kept is not None
    ids = torch.randint(0, 10**6, (256, 1024), generator=torch.Generator().manual_seed(1))
    lengths = torch.linspace(300, 1024, 256).long()
    wanted = torch.arange(1023)[None] < lengths[:, None] - 1
    for row in range(0, 256, 2):
        kept.add(Part([], 0, Sequences.padded(ids[row : row + 2], wanted[row : row + 2])))
    wanted[1::2] = False
    asked = Sequences.padded(ids, wanted)
    tracemalloc.start()
    try:
        taken = kept.take(asked)
        assert tracemalloc.get_traced_memory()[1] < ids.nbytes
    finally:
        tracemalloc.stop()
    assert [part.rows for part in taken] == [[row, row + 1] for row in range(0, 256, 2)]


def test_passes_that_cannot_be_kept() -> None:
    llama = ARCHITECTURES["llama"]
    model = build_model(llama, {"optim": OPTIM, "hidden_dropout": 0.1}, torch.float32)
    keep_passes(model, None, "auto", 5)
    assert model.kept_passes is None
    with pytest.raises(ValueError, match=r"keep_activations=always: with dropout"):
        keep_passes(model, None, "always", 5)
    tuning = {"target_modules": ["all"], "adapter_dim": 2, "adapter_dropout": 0.1}
    options = {"optim": OPTIM, "peft": {"peft_scheme": "lora", "lora_tuning": tuning}}
    adapted = build_model(llama, options, torch.float32)
    keep_passes(adapted, None, "auto", 5)
    assert adapted.kept_passes is None
    model = build_model(llama, {"optim": OPTIM}, torch.float32)
    swapped = FrozenWeights(model, "swap", lambda: model)
    keep_passes(model, swapped, "auto", 5)
    keep_passes(model, None, "never", 5)
    assert model.kept_passes is None
    with pytest.raises(ValueError, match="other weights take the place of the trained ones"):
        keep_passes(model, swapped, "always", 5)
