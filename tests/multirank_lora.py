"""For test_lora.py: updates of adapters in every layout.

``python multirank_lora.py <folder>`` leaves ``<folder>/<layout>.pt``: log-probs, losses and gradient norms of the
updates, and the merged weights; and of the first layout also ``start.pt``, weights and adapters at the beginning.
"""

from __future__ import annotations

import dataclasses
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
from nemo_style_aligner.trainer.checkpoints.sharded_tensors import Part
from nemo_style_aligner.trainer.config import schema
from nemo_style_aligner.trainer.models.gpt import MegatronModel, build_model
from nemo_style_aligner.trainer.models.optimizer import Optimizer, Schedule
from nemo_style_aligner.trainer.models.packing import MicroBatching
from nemo_style_aligner.trainer.models.pipeline import Scoring, forward, train_step
from nemo_style_aligner.trainer.models.supervised_losses import LanguageModelBatch, language_model_objective

LR, RANK, ALPHA, UPDATES = 1e-2, 3, 6.0, 3
OPTIM = {"name": "distributed_fused_adam", "lr": LR, "weight_decay": 0.1}
ADAM = schema.Optimizer(**OPTIM)
PEFT: dict[str, Any] = {
    "peft_scheme": "lora",
    "lora_tuning": {
        "target_modules": ["all"], "adapter_dim": RANK, "alpha": ALPHA, "row_init_method": "normal",
    },
}  # fmt: skip
ARCHITECTURE = ModelArchitecture(**SHAPE, tied_embeddings=True)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a job is laid out."""

    name: str
    tp: int = 1
    pp: int = 1
    dp: int = 1
    rows: int = 4
    options: tuple[tuple[str, Any], ...] = ()
    is_long: bool = False

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp


SP = ("sequence_parallel", True)
DROPPING = {**PEFT, "lora_tuning": PEFT["lora_tuning"] | {"adapter_dropout": 0.3}}
FULL = ("activations_checkpoint_granularity", "full")
LAYOUTS = (
    Layout("reference"),
    Layout("one by one", rows=1, is_long=True),
    Layout("full recompute", options=(FULL,)),
    Layout("selective recompute", options=((FULL[0], "selective"),), is_long=True),
    Layout("tp2", tp=2, is_long=True),
    Layout("tp2, dropout", tp=2, options=(("peft", DROPPING),)),
    Layout("tp2, sequence parallel", tp=2, rows=1, options=(SP,)),
    Layout("pp2", pp=2, rows=1),
    Layout("dp2", dp=2),
    Layout("dp2, fused_adam", dp=2, options=(("optim", OPTIM | {"name": "fused_adam"}),), is_long=True),
    Layout("tp4", tp=4, options=(FULL,), is_long=True),
    Layout("tp2 pp2, sequence parallel", tp=2, pp=2, options=(SP,), is_long=True),
    Layout("tp2 dp2", tp=2, dp=2, rows=1, is_long=True),
)


def batch() -> LanguageModelBatch:
    """Nine sequences of 2 to 12 tokens; the loss is on some."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, VOCAB, (9, 12), generator=generator)
    lengths = torch.tensor([12, 5, 2, 9, 12, 7, 3, 11, 8])
    mask = (torch.arange(1, 12) < lengths[:, None]) & (torch.rand(9, 11, generator=generator) < 0.7)
    return LanguageModelBatch(tokens, mask.float())


def adapters(model: MegatronModel) -> dict[str, torch.Tensor]:
    """The whole adapters as all ranks' checkpoints have them, by the names in Hugging Face's model.

    An element that no part has is NaN, and one that several have is wrong. What ranks have copies of is the same.
    """
    mine = [part for _, parts in model.trained_parts() for part in parts]
    everywhere: list[list[Part]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, mine)
    whole: dict[str, torch.Tensor] = {}
    counts: dict[str, torch.Tensor] = {}
    for part in sorted((part for parts in everywhere for part in parts), key=lambda part: not part.is_main):
        name = part.key.removeprefix("model.adapter.")
        box = tuple(slice(o, o + n) for o, n in zip(part.offsets, part.data.shape, strict=True))
        if not part.is_main:
            assert torch.equal(whole[name][box], part.data), name
            continue
        whole.setdefault(name, torch.full(part.shape, torch.nan))[box] = part.data
        counts.setdefault(name, torch.zeros(part.shape))[box] += 1 / model.layout.dp_size
    return {name: tensor * counts[name] for name, tensor in whole.items()}


def train(folder: Path, layout: Layout) -> None:
    from megatron.core import parallel_state

    initialize_model_parallel(layout.tp, layout.pp, seed=1)
    model = build_model(ARCHITECTURE, {"optim": OPTIM, "peft": PEFT, "seed": 7, **dict(layout.options)}, torch.float32)
    start = folder / "start.pt"
    if not start.exists():
        plain = build_model(ARCHITECTURE, {}, torch.float32, trainable=False)
        weights = {name: tensor.clone() for name, tensor in export_weights(plain)}
        torch.save({"weights": weights, "adapters": adapters(model)}, start)
    import_weights(model, TensorSource(torch.load(start)["weights"]))
    optimizer = Optimizer(model, ADAM, Schedule(lr=LR, name="constant"), 1.0)
    data, objective, batching = batch(), language_model_objective(), MicroBatching(layout.rows)
    wanted = objective.wanted(data)
    results: dict[str, Any] = {}
    for number in range(UPDATES):
        model.module.train()
        optimizer.zero_grad()
        metrics = train_step(model, data, wanted, batching, objective.loss, scoring=objective.scoring)
        results[f"update {number}"] = metrics | optimizer.step(metrics["loss"], "the batch", metrics["num_items"])
    results["logprobs"] = forward(
        model, data, torch.ones(9, 11).bool(), batching, lambda outputs, _: outputs, (11,), scoring=Scoring()
    )
    results["weights"] = {name: tensor.clone() for name, tensor in export_weights(model)}
    results["adapters"] = adapters(model)
    results["trained"] = sum(parameter.numel() for parameter in model.trained_parameters())
    results["tensors"] = len(model.trained_parameters())
    results["buffers"] = sum(buffer.grad_data.numel() for buffer in model.module.buffers)  # type: ignore[union-attr, misc]
    if dist.get_rank() == 0:
        torch.save(results, folder / f"{layout.name}.pt")
    parallel_state.destroy_model_parallel()


def run_layouts(folder: Path, world_size: int) -> None:
    for layout in LAYOUTS:
        if layout.world_size == world_size and (not layout.is_long or os.environ.get("TEST_LONG")):
            train(folder, layout)


if __name__ == "__main__":
    for size in (1, 2, 4) if os.environ.get("TEST_LONG") else (1, 2):
        fork_ranks(size, lambda size=size: run_layouts(Path(sys.argv[1]), size))  # type: ignore[misc]
