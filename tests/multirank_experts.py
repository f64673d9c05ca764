"""Experts in many layouts: the same passes, updates, weights, files and responses; for test_experts.py.

``python multirank_experts.py FOLDER`` writes a file of results for each layout.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from multirank_preferences import BUILD, make_files, trainer_for
from multirank_preferences import report as report_of
from multirank_ragged import ADAM, BY_TOKENS, LOSSES, LR, OPTIM, global_batch
from ranks import fork_ranks
from small_models import SHAPE, TensorSource

from nemo_style_aligner.engine.architecture import Experts, ModelArchitecture
from nemo_style_aligner.engine.contract import GenerationRequest, SamplingParams
from nemo_style_aligner.engine.embedded.engine import EmbeddedEngine
from nemo_style_aligner.engine.parallel.groups import ParallelLayout, initialize_model_parallel, neighbour_group
from nemo_style_aligner.engine.shard import TensorParallel
from nemo_style_aligner.engine.weights.layout import hf_tensors, weight_layout
from nemo_style_aligner.engine.weights.stream import export_weights, import_weights, lendable_weights
from nemo_style_aligner.guard.file_source import open_source
from nemo_style_aligner.kinds import StepChoice
from nemo_style_aligner.trainer.checkpoints.optimizer_state import load_optimizer, optimizer_counters, optimizer_parts
from nemo_style_aligner.trainer.checkpoints.sharded_tensors import load_sharded_tensors
from nemo_style_aligner.trainer.checkpoints.sharded_writing import own_parts, write_tensors
from nemo_style_aligner.trainer.models.actor import Actor
from nemo_style_aligner.trainer.models.critic import Critic, RewardModel, ValueBatch
from nemo_style_aligner.trainer.models.frozen import FrozenWeights
from nemo_style_aligner.trainer.models.gpt import MegatronModel, build_model
from nemo_style_aligner.trainer.models.heads import RewardHeadConfig
from nemo_style_aligner.trainer.models.kept_passes import keep_passes
from nemo_style_aligner.trainer.models.optimizer import Optimizer, Schedule
from nemo_style_aligner.trainer.models.packing import MicroBatching
from nemo_style_aligner.trainer.models.routes import Balance

FOUR = MicroBatching(4)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How ranks divide the model, and the batch into micro batches.

    Attributes:
        etp: None: as ``tp``.
        few: all rows that count are the first data-parallel rank's.
        shape: changes of the architecture.
        engine: ranks of the engine that gets the weights.
    """

    name: str
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int | None = None
    cp: int = 1
    batching: MicroBatching = FOUR
    few: bool = False
    keep: str = "never"
    distributed: bool = False
    engine: int = 1
    recompute: str | None = None
    is_long: bool = False

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.pp * self.dp


LAYOUTS = (
    Layout("reference"),
    Layout("kept", keep="always", batching=BY_TOKENS, is_long=True),
    Layout("selective", recompute="selective", is_long=True),
    Layout("dp2", dp=2, distributed=True, is_long=True),
    Layout("ep2", dp=2, ep=2, batching=MicroBatching(1), distributed=True, is_long=True),
    Layout("ep2, one has nothing", dp=2, ep=2, few=True, keep="auto", recompute="full"),
    Layout("tp2", tp=2, keep="always", engine=2, is_long=True),
    Layout("tp2 ep2", tp=2, ep=2, etp=1, batching=BY_TOKENS, engine=2),
    Layout("etp2", dp=2, etp=2, is_long=True),
    Layout("tp2 etp1", tp=2, etp=1, is_long=True),
    Layout("tp2 ep2 dp2", tp=2, ep=2, etp=1, dp=2, distributed=True, batching=MicroBatching(2), engine=4, is_long=True),
    Layout("tp2 ep2 etp2 dp2", tp=2, ep=2, dp=2, few=True, distributed=True),
    Layout("ep2 pp2", dp=2, ep=2, pp=2, batching=MicroBatching(1), distributed=True, is_long=True),
    Layout("tp2 pp2", tp=2, pp=2, is_long=True),
    Layout("ep4", dp=4, ep=4, batching=BY_TOKENS, distributed=True, is_long=True),
    Layout("cp2", cp=2, keep="always", batching=BY_TOKENS, is_long=True),
    Layout("cp2 ep2", cp=2, ep=2),
    Layout("cp2 dp2 ep4", cp=2, dp=2, ep=4, few=True, distributed=True, batching=MicroBatching(2), is_long=True),
    Layout("tp2 cp2 ep2", tp=2, cp=2, ep=2, etp=1, distributed=True, recompute="full", is_long=True),
)
JOB_LAYOUTS = ("reference", "ep2", "tp2 ep2", "cp2 ep2") if os.environ.get("TEST_LONG") else ("reference", "ep2")
KINDS: dict[str, Experts] = {
    "softmax": Experts(number=4, per_token=2, ffn_hidden_size=24),
    "sigmoid": Experts(
        number=4, per_token=2, ffn_hidden_size=16, scores="sigmoid", scaling=1.5, has_bias=True,
        shared_ffn_hidden_size=24,
    ),
    "biased": Experts(number=4, per_token=2, ffn_hidden_size=24),
}  # fmt: skip
FEATURES: dict[str, dict[str, Any]] = {  # GPT-OSS'
    "biased": {
        "bias": True, "clamped_swiglu": True, "attention_sinks": True, "sliding_window": 7, "windowed_layers": (0, 2),
    },
}  # fmt: skip


def kinds_of(layout: Layout) -> list[str]:
    """Without TEST_LONG one for each layout of several ranks. Ranks cannot share experts with biases."""
    every = [kind for kind in KINDS if kind != "biased" or (layout.etp or layout.tp) == 1]
    is_whole = layout.world_size == 1 or os.environ.get("TEST_LONG")
    return every if is_whole else [every[(len(layout.name) + 1) % len(every)]]


def architecture(kind: str) -> ModelArchitecture:
    """Of a model in which all layers but the first have experts."""
    features = FEATURES.get(kind, {"qkv_bias": True})
    return ModelArchitecture(**SHAPE | {"num_layers": 4} | features, experts=KINDS[kind], dense_layers=(0,))


def first_weights(a: ModelArchitecture) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    tensors = hf_tensors(weight_layout(a))
    return {name: torch.randn(part.shape, generator=generator) * 0.2 for name, part in tensors.items()}


def initialize(layout: Layout) -> ParallelLayout:
    return initialize_model_parallel(
        layout.tp, layout.pp, seed=1, ep_size=layout.ep, etp_size=layout.etp, cp_size=layout.cp
    )


def make(layout: Layout, kind: str) -> tuple[MegatronModel, Actor]:
    optim = ADAM if layout.distributed else ADAM.replaced(name="adam")
    config = {
        "optim": OPTIM | {"name": optim.name},
        "sequence_parallel": True,
        "activations_checkpoint_granularity": layout.recompute,
    }
    model = build_model(architecture(kind), config, torch.float32)
    import_weights(model, TensorSource(first_weights(model.architecture)))
    optimizer = Optimizer(model, optim, Schedule(lr=LR, name="constant"), 1.0)
    optimizer.megatron.reload_model_params()
    frozen = FrozenWeights(
        model,
        "swap" if layout.few else "resident",
        lambda: build_model(architecture(kind), {}, torch.float32, trainable=False),
    )
    actor = Actor(
        model, optimizer, frozen, training_batching=layout.batching, forward_batching=layout.batching, temperature=0.8,
        loss=LOSSES[0],
    )  # fmt: skip
    keep_passes(model, frozen, layout.keep, 10)  # type: ignore[arg-type]
    return model, actor


def routed_somehow(tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Routes of sequences that no router has chosen: of each token and place some two of the four experts, uint8."""
    table = torch.rand(64, 64, 3, 4, generator=torch.Generator().manual_seed(6)).argsort(-1)[..., :2].flatten(2)
    places = torch.cat([torch.arange(int(length)) for length in lengths])
    return table[tokens.long() % 64, places % 64].to(torch.uint8)


def responses(model: MegatronModel, size: int, step: StepChoice = "native") -> list[tuple[list[int], list[float], str]]:
    """Of engines over ``size`` ranks each, with the model's weights."""
    rank = dist.get_rank() % size
    engine = EmbeddedEngine(
        model.architecture,
        dtype=torch.float32,
        num_slots=2,
        max_sequence_length=40,
        eos_id=1,
        prefill_chunk_tokens=8,
        tensor_parallel=TensorParallel(rank, size, neighbour_group(size)),
        trainer_weights=functools.partial(lendable_weights, model, rank, size),
        records_routes=True,
        step=step,
    )
    engine.build()
    engine.refit(export_weights(model, 4096, without=engine.viewed_weights, transient=True), version=0)
    requests = [GenerationRequest(i, [(7 * i + 3 * j) % 50 for j in range(1 + 9 * i)], i) for i in range(3)]
    params = SamplingParams(max_new_tokens=8, min_new_tokens=8, temperature=0.9, seed=5)
    made = sorted(engine.generate(requests, params), key=lambda result: result.request_id)
    return [(result.token_ids, result.logprobs, result.routes) for result in made]


def run(folder: Path, layout: Layout, kind: str) -> None:
    from megatron.core import parallel_state

    groups = initialize(layout)
    model, actor = make(layout, kind)
    given = first_weights(model.architecture)
    exported = list(export_weights(model, 2000))
    assert [name for name, _ in exported] == list(given)
    assert all(torch.equal(tensor, given[name]) for name, tensor in exported)
    whole = global_batch()
    counts = whole.wanted if groups.dp_rank == 0 else ~whole.wanted
    mine = counts.nonzero()[:, 0] if layout.few else torch.arange(len(whole))[groups.dp_rank :: layout.dp]
    whole.routes = routed_somehow(whole.tokens, whole.lengths)
    batch, results = whole.rows(mine), dict[str, Any]()
    results["responses"] = responses(model, layout.engine)
    for of_torch, of_native in zip(responses(model, layout.engine, "torch"), results["responses"], strict=True):
        assert (of_torch[0], of_torch[2]) == (of_native[0], of_native[2])
        assert max(abs(a - b) for a, b in zip(of_torch[1], of_native[1], strict=True)) < 1e-5
    for number, actor.loss in enumerate(LOSSES):
        actor.replays_routes = number == len(LOSSES) - 1
        logprobs = torch.zeros(int(whole.sampled_lengths.sum()))
        logprobs[whole.sampled_places(mine)] = actor.logprobs(batch, is_trained=True)
        dist.all_reduce(logprobs, group=parallel_state.get_data_parallel_group())
        results[f"logprobs {number}"] = logprobs
        if not number:
            off = actor.reference_logprobs(batch) - logprobs[whole.sampled_places(mine)]
            assert not len(off) or off.abs().max() < 1e-5, "the first policy is the reference"
        results[f"metrics {number}"] = actor.routing | actor.update(batch)
    checkpoints(folder, layout, kind, model, actor)
    results["weights"] = {name: tensor.clone() for name, tensor in export_weights(model)}
    if dist.get_rank() == 0:
        torch.save(results, folder / f"{kind}, {layout.name}.pt")
    dist.barrier()
    parallel_state.destroy_model_parallel()


def checkpoints(folder: Path, layout: Layout, kind: str, model: MegatronModel, actor: Actor) -> None:
    """Written here and read here, to the last bit; that of the reference, read here."""
    optimizer = actor.optimizer
    path = folder / f"{kind}, {layout.name}"
    if not dist.get_rank():
        (path / "state").mkdir(parents=True)
    dist.barrier()
    weights = [part for _, parts in model.trained_parts() for part in parts]
    write_tensors([*own_parts(weights), *optimizer_parts(optimizer, model)], path / "state")
    counters = optimizer_counters(optimizer)
    before = [tensor.clone() for _, tensor in model.named_weights()]
    states = [part.data.clone() for part in optimizer_parts(optimizer, model)]
    for source in (folder / f"{kind}, reference", path):
        for _, tensor in model.named_weights():
            tensor.detach().zero_()
        with open_source(source) as opened:
            load_sharded_tensors(weights, opened, "state", ignored=("optimizer.",))
            load_optimizer(optimizer, model, counters, opened, "state")
        for (name, tensor), old in zip(model.named_weights(), before, strict=True):
            off = (tensor - old).abs().max().item()
            assert off <= (0 if source == path else 2e-5), f"{source.name}: {name} is off by {off}"
    for part, old in zip(optimizer_parts(optimizer, model), states, strict=True):
        assert torch.equal(part.data, old), part.key


def jobs(folder: Path, layout: Layout) -> None:
    """Two updates of each supervised method, in which experts are balanced, and a validation; what a critic gives.

    Of 5 rows in micro batches of tokens, ranks have shares that make different numbers of passes.
    """
    from megatron.core import parallel_state

    initialize(layout)
    results: dict[str, Any] = {}
    for method in BUILD:
        keys = ("model.global_batch_size=5", "model.max_tokens_per_micro_batch=24", "model.sequence_parallel=True")
        trainer = trainer_for(method, folder / "jobs", folder / f"{method}, {layout.name}", *keys)
        trainer.model.balance = Balance.of(trainer.model.architecture, coefficient=0.5, bias_step=0.01)
        results[method] = report_of(trainer)
    results["critic"] = of_critic()
    if dist.get_rank() == 0:
        torch.save(results, folder / f"jobs, {layout.name}.pt")
    dist.barrier()
    parallel_state.destroy_model_parallel()


def of_critic() -> dict[str, Any]:
    """Of a critic beside the reward model that it was."""
    head = RewardHeadConfig()
    config = {"optim": OPTIM, "sequence_parallel": True}
    build = functools.partial(build_model, architecture("softmax"), config, torch.float32, head=head)
    model, batching, generator = build(), MicroBatching(1, 24), torch.Generator().manual_seed(8)
    weights = first_weights(model.architecture)
    weights["score.weight"] = weights.pop("lm_head.weight")[:1]
    import_weights(model, TensorSource(weights))
    frozen = FrozenWeights(model, "resident", functools.partial(build, trainable=False))
    critic = Critic(
        model, Optimizer(model, ADAM, Schedule(lr=LR, name="constant"), 1.0), head, training_batching=batching,
        global_batch_size=3, forward_batching=batching, loss_clip=0.2,
    )  # fmt: skip
    tokens, lengths = torch.randint(0, 50, (5, 20), generator=generator), torch.tensor([20, 3, 9, 17, 4])
    values = critic.values(tokens, lengths)
    mask = (torch.arange(19) < lengths[:, None] - 1).float()
    returns = torch.randn(5, 19, generator=generator)
    reports = critic.train(ValueBatch(tokens, returns, values.cpu(), mask))
    rewards = RewardModel(frozen, head, batching).rewards(tokens, lengths)
    return {"values": values, "reports": reports, "rewards": rewards, "later": critic.values(tokens, lengths)}


def main(folder: Path, world_size: int) -> None:
    from megatron.core import parallel_state

    if world_size == 1:
        (folder / "jobs").mkdir()
        initialize_model_parallel(1, 1, seed=3)
        make_files(folder / "jobs", experts=KINDS["sigmoid"])
        parallel_state.destroy_model_parallel()
    for layout in LAYOUTS:
        if layout.name in JOB_LAYOUTS and layout.world_size == world_size:
            jobs(folder, layout)
    for layout in LAYOUTS:
        if layout.world_size == world_size and (not layout.is_long or os.environ.get("TEST_LONG")):
            for kind in kinds_of(layout):
                run(folder, layout, kind)


if __name__ == "__main__":
    for size in (1, 2, 4):
        fork_ranks(size, lambda size=size: main(Path(sys.argv[1]), size))  # type: ignore[misc]
