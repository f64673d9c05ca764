"""For test_ragged.py: log-probs and updates of ragged batches in every layout.

``python multirank_ragged.py <folder>`` leaves ``<folder>/<layout>.pt``: log-probs of all response tokens, metrics
of the updates, how many passes these computed on the first rank, and the weights after them.
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import fork_ranks
from small_models import SHAPE, VOCAB, TensorSource

from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.parallel.groups import initialize_model_parallel
from nemo_style_aligner.engine.weights.stream import export_weights, import_weights
from nemo_style_aligner.kinds import KeepChoice
from nemo_style_aligner.trainer.config import schema
from nemo_style_aligner.trainer.models.actor import Actor
from nemo_style_aligner.trainer.models.gpt import build_model
from nemo_style_aligner.trainer.models.kept_passes import keep_passes
from nemo_style_aligner.trainer.models.optimizer import Optimizer, Schedule
from nemo_style_aligner.trainer.models.packing import MicroBatching
from nemo_style_aligner.trainer.models.policy_losses import LossSettings
from nemo_style_aligner.trainer.models.ragged import RaggedBatch, after_prompts

LR = 1e-3
OPTIM = {"name": "distributed_fused_adam", "lr": LR, "weight_decay": 0.0}
ADAM = schema.Optimizer(**OPTIM)
LOSSES = (
    LossSettings("gspo", 0.05, 0.1, aggregation="sequence_mean", entropy_bonus=0.02),
    LossSettings("ppo", 0.2, 0.3, dual_clip=1.5, kl_coef=0.1, kl_estimator="k2"),
    LossSettings("cispo", aggregation="sequence_sum", constant_length=8, kl_coef=0.1),
)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a job is laid out; ``room``: tokens whose activations the memory holds."""

    name: str
    tp: int = 1
    pp: int = 1
    dp: int = 1
    batching: MicroBatching = MicroBatching(4)  # noqa: RUF009 (frozen)
    sequence_parallel: bool = False
    keep: KeepChoice = "never"
    room: int | None = None
    lopsided: bool = False
    is_long: bool = False  # computed with TEST_LONG alone

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp


BY_TOKENS = MicroBatching(4, max_tokens=25)
LAYOUTS = (
    Layout("reference"),
    Layout("one by one", batching=MicroBatching(1)),
    Layout("kept", keep="always"),
    Layout("kept where there is room", keep="auto", room=30),
    Layout("kept without room", keep="auto", room=0),
    Layout("tp2", tp=2, is_long=True),
    Layout("tp2, sequence parallel", tp=2, sequence_parallel=True, batching=BY_TOKENS),
    Layout("pp2", pp=2, batching=MicroBatching(2)),
    Layout("dp2", dp=2, is_long=True),
    Layout("dp2 by tokens", dp=2, batching=BY_TOKENS, is_long=True),
    Layout("dp2 kept", dp=2, keep="always", batching=MicroBatching(2)),
    Layout("dp2 kept where there is room", dp=2, keep="auto", room=30, batching=MicroBatching(2)),
    Layout("dp2 kept without room", dp=2, keep="auto", room=0, batching=MicroBatching(2)),
    Layout("dp2, one has nothing, kept", dp=2, lopsided=True, keep="always"),
    Layout("dp4", dp=4, batching=MicroBatching(1), is_long=True),
    Layout("tp2 dp2", tp=2, dp=2, sequence_parallel=True, is_long=True),
    Layout("pp2 dp2, one has nothing", pp=2, dp=2, batching=MicroBatching(1), lopsided=True),
)


INSERTED: list[list[int]] = [[], [3, 4, 5, 7], [], [2, 7], [], [2], [], [], [], []]
"""Places of inserted tokens in each response's sequence."""


def global_batch() -> RaggedBatch:
    """Ten responses of 0 to 9 tokens, three of which do not count: there, all numbers are NaN.

    In some, tokens were inserted: between two replies, before the first and behind the last.
    """
    generator = torch.Generator().manual_seed(5)
    prompt_lengths = torch.tensor([3, 1, 7, 2, 4, 1, 12, 5, 2, 1])
    lengths = prompt_lengths + torch.tensor([4, 9, 1, 6, 0, 5, 3, 8, 7, 2])
    wanted = torch.tensor([1, 1, 1, 1, 1, 0, 1, 0, 1, 0]).bool()
    tokens, sampled = torch.randint(0, VOCAB, (int(lengths.sum()),), generator=generator), []
    for row, inserted in zip(after_prompts(lengths, prompt_lengths).split(lengths.tolist()), INSERTED, strict=True):
        sampled.append(row.clone())
        sampled[-1][inserted] = False
    batch = RaggedBatch(tokens.int(), lengths, torch.cat(sampled), {}, wanted)
    counts = wanted.repeat_interleave(batch.sampled_lengths)
    for name, mean, deviation in (
        ("old_logprobs", -4.0, 0.3),
        ("reference_logprobs", -4.0, 0.5),
        ("advantages", 0.0, 1.0),
        ("importance_weights", 1.0, 0.2),
    ):
        column = mean + deviation * torch.randn(len(counts), generator=generator)
        batch.columns[name] = column.masked_fill(~counts, math.nan)
    return batch


def own_rows(layout: Layout, batch: RaggedBatch, rank: int) -> torch.Tensor:
    """The rows of a data-parallel rank."""
    if layout.lopsided:
        return (batch.wanted if rank == 0 else ~batch.wanted).nonzero()[:, 0]
    return torch.arange(len(batch))[rank :: layout.dp]


def step(folder: Path, layout: Layout) -> None:
    from megatron.core import parallel_state

    groups = initialize_model_parallel(layout.tp, layout.pp, seed=1)
    config = {"optim": OPTIM, "sequence_parallel": layout.sequence_parallel}
    model = build_model(ModelArchitecture(**SHAPE), config, torch.float32)
    start = folder / "start.pt"
    if not start.exists():
        torch.save({name: tensor.clone() for name, tensor in export_weights(model)}, start)
    import_weights(model, TensorSource(torch.load(start)))
    optimizer = Optimizer(model, ADAM, Schedule(lr=LR, name="constant"), 1.0)
    optimizer.megatron.reload_model_params()
    actor = Actor(
        model, optimizer, None, training_batching=layout.batching, forward_batching=layout.batching, temperature=0.8,
        loss=LOSSES[0],
    )  # fmt: skip
    keep_passes(model, None, layout.keep, 10)
    if (passes := model.kept_passes) is not None and layout.room is not None:
        passes._free_bytes = lambda: 2.0 * layout.room * passes._bytes_per_token()  # type: ignore[method-assign,operator]
    whole = global_batch()
    mine = own_rows(layout, whole, groups.dp_rank)
    batch = whole.rows(mine)

    passes_of_updates = 0

    def count(layer: torch.nn.Module, _: Any) -> None:
        nonlocal passes_of_updates
        passes_of_updates += is_update

    model.gpt.decoder.layers[0].register_forward_pre_hook(count)
    results: dict[str, Any] = {}
    for number, actor.loss in enumerate(LOSSES):
        is_update = False
        own = actor.logprobs(batch, is_trained=True)
        logprobs = torch.zeros(int(whole.sampled_lengths.sum()))
        logprobs[whole.sampled_places(mine)] = own
        dist.all_reduce(logprobs, group=parallel_state.get_data_parallel_group())
        results[f"logprobs {number}"] = logprobs
        is_update = True
        results[f"metrics {number}"] = actor.update(batch)
    results["passes"] = passes_of_updates
    results["weights"] = {name: tensor.clone() for name, tensor in export_weights(model)}
    if dist.get_rank() == 0:
        torch.save(results, folder / f"{layout.name}.pt")
    parallel_state.destroy_model_parallel()


def run_layouts(folder: Path, world_size: int) -> None:
    for layout in LAYOUTS:
        if layout.world_size == world_size and (not layout.is_long or os.environ.get("TEST_LONG")):
            step(folder, layout)


if __name__ == "__main__":
    for size in (1, 2, 4):
        fork_ranks(size, lambda size=size: run_layouts(Path(sys.argv[1]), size))  # type: ignore[misc]
