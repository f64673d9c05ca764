"""Ragged batches: what they are, and that passes and updates over them are the same in every layout."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from job_processes import ROOT, run
from multirank_ragged import ADAM, LAYOUTS, LOSSES, LR, OPTIM, Layout, global_batch
from small_models import SHAPE, VOCAB
from torch.nn.utils.rnn import pad_sequence

from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.text.jsonl import DataError
from nemo_style_aligner.kinds import KeepChoice
from nemo_style_aligner.trainer.models.actor import Actor
from nemo_style_aligner.trainer.models.gpt import build_model
from nemo_style_aligner.trainer.models.kept_passes import keep_passes
from nemo_style_aligner.trainer.models.optimizer import Optimizer, Schedule
from nemo_style_aligner.trainer.models.packing import MicroBatching
from nemo_style_aligner.trainer.models.pipeline import Scoring, Tokens, forward
from nemo_style_aligner.trainer.models.policy_losses import LossSettings
from nemo_style_aligner.trainer.models.ragged import RaggedBatch, after_prompts

pytestmark = pytest.mark.usefixtures("one_thread", "one_rank")

Result = dict[str, Any]


def make_actor(keep: KeepChoice = "never", num_rows: int = 4) -> Actor:
    torch.manual_seed(3)
    model = build_model(ModelArchitecture(**SHAPE), {"optim": OPTIM}, torch.float32)
    batching = MicroBatching(num_rows)
    keep_passes(model, None, keep, 10)
    return Actor(
        model, Optimizer(model, ADAM, Schedule(lr=LR, name="constant"), 1.0), None, training_batching=batching,
        forward_batching=batching, temperature=0.8, loss=LossSettings(aggregation="sequence_mean"),
    )  # fmt: skip


# ---- the batch --------------------------------------------------------------------------------


def test_rows_and_wanted_positions() -> None:
    batch = RaggedBatch(
        tokens=torch.arange(1, 10, dtype=torch.int32),
        lengths=torch.tensor([2, 4, 3]),
        sampled=after_prompts(torch.tensor([2, 4, 3]), torch.tensor([2, 1, 2])),
        columns={"x": torch.tensor([1.0, 2.0, 3.0, 4.0])},
        wanted=torch.tensor([True, True, False]),
    )
    assert len(batch) == 3 and batch.sampled_lengths.tolist() == [0, 3, 1]
    assert [row.tolist() for row in batch.sequences().tokens] == [[1, 2], [3, 4, 5, 6], [7, 8, 9]]
    assert [row.tolist() for row in batch.sequences().wanted] == [[], [True, True, True], []]
    turned = batch.rows(torch.tensor([2, 1, 2]))
    assert turned.tokens.tolist() == [7, 8, 9, 3, 4, 5, 6, 7, 8, 9] and turned.tokens.dtype == torch.int32
    assert turned.columns["x"].tolist() == [4.0, 1.0, 2.0, 3.0, 4.0] and turned.wanted.tolist() == [False, True, False]
    nothing = batch.rows(torch.zeros(0, dtype=torch.int64))
    assert not len(nothing) and not len(nothing.sequences())


def test_log_probs_are_those_of_a_padded_batch() -> None:
    actor, batch = make_actor(), global_batch()
    sequences = batch.sequences()
    wanted, tokens = (pad_sequence(list(rows), batch_first=True) for rows in (sequences.wanted, sequences.tokens))
    tokens = tokens.long()
    padded = forward(
        actor.model, Tokens(tokens), wanted, MicroBatching(4), lambda outputs, _: outputs, (wanted.shape[1],),
        Scoring(actor.temperature),
    )  # fmt: skip
    flat = actor.logprobs(batch)
    counts = batch.wanted.repeat_interleave(batch.sampled_lengths)
    assert torch.equal(flat[counts], padded[wanted]) and not flat[~counts].any() and flat[counts].all()


def test_a_batch_without_rows_or_without_rows_that_count() -> None:
    actor, batch = make_actor(), global_batch()
    nothing = batch.rows(torch.zeros(0, dtype=torch.int64))
    uncounted = dataclasses.replace(batch, wanted=torch.zeros(10, dtype=torch.bool))
    before = [p.detach().clone() for p in actor.model.gpt.parameters()]
    for empty in (nothing, uncounted):
        assert not actor.logprobs(empty).any()
        assert actor.update(empty).keys() == {"loss", "lr", "skipped_updates"}
    assert all(torch.equal(p, old) for p, old in zip(actor.model.gpt.parameters(), before, strict=True))


def test_a_token_outside_of_the_vocabulary_is_named() -> None:
    actor, batch = make_actor(), global_batch()
    batch.tokens[-1] = batch.tokens[30] = VOCAB
    with pytest.raises(DataError, match=f"token {VOCAB} is not in the model's vocabulary of {VOCAB}"):
        actor.logprobs(batch)


# ---- kept passes ------------------------------------------------------------------------------


@pytest.mark.parametrize("room", [None, 30, 0])
def test_rows_that_are_left_out_after_their_pass_change_nothing(room: int | None) -> None:
    """A reward was NaN, say: the pass is there, the row no longer counts, its columns hold no numbers."""
    batch = global_batch()
    left_out = torch.tensor([1, 1, 1, 0, 1, 1, 1, 1, 0, 1]).bool() & batch.wanted
    reports, weights = [], []
    for keep in ("auto", "never"):
        actor = make_actor(keep)  # type: ignore[arg-type]
        if (passes := actor.model.kept_passes) is not None:
            per_token = passes._bytes_per_token()
            passes._free_bytes = lambda n=per_token: 2.0 * n * (1000 if room is None else room)  # type: ignore[method-assign,misc]
        actor.logprobs(batch, is_trained=True)
        counts = left_out.repeat_interleave(batch.sampled_lengths)
        columns = {name: x.masked_fill(~counts, math.nan) for name, x in batch.columns.items()}
        reports.append(actor.update(dataclasses.replace(batch, columns=columns, wanted=left_out)))
        weights.append(torch.cat([p.detach().flatten() for p in actor.model.gpt.parameters()]))
    for name in reports[0].keys() - {"padding_efficiency"}:
        assert reports[0][name] == pytest.approx(reports[1][name], rel=1e-5), name
    assert torch.allclose(*weights, atol=0.01 * LR, rtol=0)


def test_passes_with_log_probs_that_are_no_numbers_are_forgotten() -> None:
    actor, batch = make_actor("always", num_rows=2), global_batch()
    starts = batch.lengths.cumsum(0) - batch.lengths
    batch.tokens[batch.tokens == 7] = 8
    batch.tokens[starts[3]] = 7
    with torch.no_grad():
        actor.model.gpt.embedding.word_embeddings.weight[7] = math.nan
    logprobs = actor.logprobs(batch, is_trained=True)
    is_finite = torch.tensor([bool(row.isfinite().all()) for row in logprobs.split(batch.sampled_lengths.tolist())])
    assert (~is_finite).nonzero().tolist() == [[3]]
    report = actor.update(dataclasses.replace(batch, wanted=batch.wanted & is_finite))
    assert report["skipped_updates"] == 0 and math.isfinite(report["grad_norm"])


# ---- layouts ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Result]:
    """What multirank_ragged.py leaves of a layout."""
    folder = tmp_path_factory.mktemp("layouts")
    run([sys.executable, str(ROOT / "tests" / "multirank_ragged.py"), str(folder)], folder / "ranks.log", 240)
    return lambda name: torch.load(folder / f"{name}.pt", weights_only=True)


def test_the_updates_are_some_that_could_differ(result: Callable[[str], Result]) -> None:
    reference = result("reference")
    first, second, third = (reference[f"metrics {number}"] for number in range(len(LOSSES)))
    assert first["scaled_entropy"] > 0 and second["kl_loss"] > 0 and "kl_loss" not in first
    assert all(0 < metrics["clip_fraction"] < 1 < metrics["grad_norm"] for metrics in (first, second, third))
    assert (reference["logprobs 0"] - reference["logprobs 2"]).abs().max() > 0.01
    assert reference["passes"] == 6 and result("kept")["passes"] == result("dp2 kept")["passes"] == 0


@pytest.mark.parametrize(
    "layout",
    [pytest.param(layout, marks=[pytest.mark.long] * layout.is_long, id=layout.name) for layout in LAYOUTS[1:]],
)
def test_layouts_agree(result: Callable[[str], Result], layout: Layout) -> None:
    """In log-probs, metrics, and new weights."""
    found, expected = result(layout.name), result("reference")
    for number in range(len(LOSSES)):
        torch.testing.assert_close(found[f"logprobs {number}"], expected[f"logprobs {number}"], atol=2e-5, rtol=0)
        metrics, expected_metrics = found[f"metrics {number}"], expected[f"metrics {number}"]
        assert metrics.keys() == expected_metrics.keys()
        for name in metrics.keys() - {"padding_efficiency", "dp_balance"}:
            assert metrics[name] == pytest.approx(expected_metrics[name], rel=2e-5, abs=5e-7), name
    for name, weight in found["weights"].items():  # 5% of the learning rate, where the gradient is next to nothing
        torch.testing.assert_close(weight, expected["weights"][name], atol=0.05 * LR, rtol=0)


@pytest.mark.parametrize("world", ["", "dp2 "])
def test_what_memory_has_room_for_changes_no_bit(result: Callable[[str], Result], world: str) -> None:
    kept, *others = (result(world + name) for name in ("kept", "kept where there is room", "kept without room"))
    assert kept["passes"] < others[0]["passes"] < others[1]["passes"]
    for other in others:
        for name in kept.keys() - {"passes", "weights"}:
            assert torch.equal(kept[name], other[name]) if "logprobs" in name else kept[name] == other[name], name
        assert all(torch.equal(weight, other["weights"][name]) for name, weight in kept["weights"].items())
