"""For test_models.py: log-probs and entropies of a vocabulary split over two ranks, and their gradients.

``python multirank_models.py <folder>`` leaves ``<folder>/split.safetensors``: each rank's slice, together.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from multirank_ppo import fork_ranks
from safetensors.torch import save_file

from nemo_style_aligner.models.logprobs import next_token_entropy, next_token_logprobs
from nemo_style_aligner.parallel.groups import all_gather_rows, initialize_model_parallel

VOCAB, PADDED, TEMPERATURE = 21, 26, 0.7  # the second rank's slice ends in five padding rows


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [3, 6, PADDED] whose padding is huge, tokens [3, 6], and weights [3, 5] that make a loss of a result."""
    generator = torch.Generator().manual_seed(2)
    logits = 4 * torch.randn(3, 6, PADDED, generator=generator)
    logits[..., VOCAB:] = 50.0
    tokens = torch.randint(0, VOCAB, (3, 6), generator=generator)
    return logits, tokens, torch.randn(3, 5, generator=generator)


def split(folder: Path) -> None:
    layout = initialize_model_parallel(2, 1, seed=1)
    logits, tokens, weights = inputs()
    results: dict[str, torch.Tensor] = {}
    for name in ("logprobs", "entropy"):
        mine = logits.chunk(2, dim=-1)[layout.tp_rank].clone().requires_grad_()
        if name == "logprobs":
            values = next_token_logprobs(mine * 1, tokens, VOCAB, TEMPERATURE)
        else:
            values = next_token_entropy(mine * 1, VOCAB, TEMPERATURE)
        (values * weights).sum().backward()
        assert mine.grad is not None
        results[name] = values.detach()
        # Slices are columns: put them in rows to gather them.
        results[f"{name} gradient"] = all_gather_rows(mine.grad.permute(2, 0, 1).contiguous()).permute(1, 2, 0)
    if layout.tp_rank == 0:
        save_file({k: v.contiguous() for k, v in results.items()}, folder / "split.safetensors")


if __name__ == "__main__":
    fork_ranks(Path(sys.argv[1]), 2, lambda: split(Path(sys.argv[1])))
