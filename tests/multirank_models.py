"""For test_layers.py: log-probs and entropies of a vocabulary split over ranks, and their gradients; recomputation.

``python multirank_models.py <folder>`` leaves ``<folder>/split.safetensors``: each rank's slice, together. The third
rank holds nothing but padding of the vocabulary. ``<folder>/recompute.pt``: what a training pass on packed rows gives
and keeps for its backward pass, with activations recomputed or not, sharded by sequence parallelism or not.
``<folder>/dropout.pt``: what attention's dropout leaves on each rank.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import fork_ranks
from safetensors.torch import save_file

from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.parallel.groups import all_gather_rows, initialize_model_parallel
from nemo_style_aligner.trainer.models import logprobs
from nemo_style_aligner.trainer.models.gpt import MegatronModel, build_model
from nemo_style_aligner.trainer.models.logprobs import Prediction, predict
from nemo_style_aligner.trainer.models.packing import MicroBatching
from nemo_style_aligner.trainer.models.pipeline import Scoring, Tokens, evaluate_step, train_step

RANKS, VOCAB, PADDED, TEMPERATURE = 3, 21, 42, 0.7  # slices of 14 rows: 14, 7 and 0 true ones
ARCHITECTURE = ModelArchitecture(
    num_layers=2, hidden_size=24, ffn_hidden_size=36, num_attention_heads=6, num_query_groups=3, vocab_size=VOCAB
)


def inputs() -> tuple[torch.Tensor, torch.Tensor, Prediction, torch.Tensor]:
    """Hidden states [12, 1, 8], weight [PADDED, 8] with huge padding, the prediction, and weights [7, 2] of a loss."""
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(12, 1, 8, generator=generator)
    weight = 2 * torch.randn(PADDED, 8, generator=generator)
    weight[VOCAB:] = 50.0
    targets = torch.randint(0, VOCAB, (7,), generator=generator)
    wanted = Prediction(torch.tensor([0, 2, 3, 5, 8, 9, 11]), targets, TEMPERATURE, entropy=True)
    return hidden, weight, wanted, torch.randn(7, 2, generator=generator)


def split(folder: Path) -> None:
    layout = initialize_model_parallel(RANKS, 1, seed=1)
    logprobs._CHUNK_BYTES = 4 * 14 * 3  # three rows at a time
    results: dict[str, torch.Tensor] = {}
    for name in ("whole", "sequence parallel"):
        hidden, weight, wanted, loss_weights = inputs()
        is_split = name == "sequence parallel"
        mine = (hidden.chunk(RANKS)[layout.tp_rank] if is_split else hidden).clone().requires_grad_()
        slice_ = weight.chunk(RANKS)[layout.tp_rank].clone().requires_grad_()
        values = predict(mine, slice_, VOCAB, wanted, sequence_parallel=is_split)
        (values * loss_weights).sum().backward()
        assert mine.grad is not None and slice_.grad is not None
        results[f"{name} values"] = values.detach()
        results[f"{name} hidden gradient"] = all_gather_rows(mine.grad) if is_split else mine.grad
        results[f"{name} weight gradient"] = all_gather_rows(slice_.grad)
    if layout.tp_rank == 0:
        save_file({k: v.contiguous() for k, v in results.items()}, folder / "split.safetensors")


class SavedBytes:
    """Counts the bytes that a forward pass keeps for its backward pass, weights apart."""

    def __init__(self, model: MegatronModel) -> None:
        self._weights = {p.untyped_storage().data_ptr() for p in model.gpt.parameters()}
        self._kept: dict[int, torch.UntypedStorage] = {}
        self._is_backward = False
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, self._give)

    def _keep(self, x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()  # held, so that no address is used twice
        if not self._is_backward and storage.data_ptr() not in self._weights:
            self._kept[storage.data_ptr()] = storage
        return x

    def _give(self, x: torch.Tensor) -> torch.Tensor:
        self._is_backward = True  # what is computed again from here on is kept for a moment only
        return x

    @property
    def total(self) -> int:
        return sum(storage.nbytes() for storage in self._kept.values())


def recompute(folder: Path) -> None:
    """The same loss of the same packed rows, with every way to save memory."""
    tokens = torch.randint(0, VOCAB, (5, 40), generator=torch.Generator().manual_seed(3))
    wanted = torch.arange(39) < torch.tensor([39, 7, 30, 12, 20])[:, None]
    results: dict[str, Any] = {}
    for sharded in (False, True):
        for granularity in (None, "selective", "full"):
            config = {
                "optim": {"name": "distributed_fused_adam"},
                "sequence_parallel": sharded,
                "activations_checkpoint_granularity": granularity,
            }
            torch.manual_seed(4)
            model = build_model(ARCHITECTURE, config, torch.float32)
            saved, saved_in_validation = SavedBytes(model), SavedBytes(model)
            arguments = (
                model,
                Tokens(tokens),
                wanted,
                MicroBatching(5),
                lambda output, batch: (-output.sum(), (output != 0).sum(), {}),
            )
            model.module.train()
            with saved.hooks:
                loss = train_step(*arguments, scoring=Scoring())["loss"]
            gradients = torch.cat([p.main_grad.flatten().clone() for p in model.gpt.parameters()])
            model.module.eval()
            with saved_in_validation.hooks:
                evaluate_step(*arguments, scoring=Scoring())
            sizes = saved.total, saved_in_validation.total
            results[f"{granularity}, {'sharded' if sharded else 'whole'}"] = (loss, gradients, *sizes)
    if dist.get_rank() == 0:
        torch.save(results, folder / "recompute.pt")


def dropout(folder: Path) -> None:
    """Attention over the same ones on each rank, with dropout, and the next number of the ranks' common stream."""
    from megatron.core import tensor_parallel

    tensor_parallel.model_parallel_cuda_manual_seed(5, force_reset_rng=True)
    results: dict[str, torch.Tensor] = {}
    for sharded in (False, True):
        torch.manual_seed(6)
        config = {"attention_dropout": 0.5, "sequence_parallel": sharded}
        model = build_model(ARCHITECTURE, config, torch.float32, trainable=False)
        attention = model.gpt.decoder.layers[0].self_attention.core_attention.train()
        ones = torch.ones(20, 1, 2, 4)
        # as megatron-core's block calls its layers
        with tensor_parallel.get_cuda_rng_tracker().fork() if sharded else contextlib.nullcontext():
            left = attention(ones, ones[:, :, :1], ones[:, :, :1])
        name = "sharded" if sharded else "whole"
        results[name] = all_gather_rows(left[None])
        results[f"{name}, next number"] = all_gather_rows(torch.rand(1))
    if dist.get_rank() == 0:
        torch.save(results, folder / "dropout.pt")


def scenarios(folder: Path) -> None:
    split(folder)
    recompute(folder)
    dropout(folder)


if __name__ == "__main__":
    fork_ranks(RANKS, lambda: scenarios(Path(sys.argv[1])))
