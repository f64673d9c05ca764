"""For test_models.py: log-probs and entropies of a vocabulary split over ranks, and their gradients.

``python multirank_models.py <folder>`` leaves ``<folder>/split.safetensors``: each rank's slice, together. The third
rank holds nothing but padding of the vocabulary.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from multirank_ppo import fork_ranks
from safetensors.torch import save_file

from nemo_style_aligner.models import logprobs
from nemo_style_aligner.models.logprobs import Prediction, predict
from nemo_style_aligner.parallel.groups import all_gather_rows, initialize_model_parallel

RANKS, VOCAB, PADDED, TEMPERATURE = 3, 21, 42, 0.7  # slices of 14 rows: 14, 7 and 0 true ones


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


if __name__ == "__main__":
    fork_ranks(Path(sys.argv[1]), RANKS, lambda: split(Path(sys.argv[1])))
