"""How fast a model is trained and scored: forward + backward and log-prob passes on sequences of many lengths.

    python benchmarks/training_pass.py [--shape smollm2-135m] [--sequences 16] [--rounds 2] [--json FILE]

Sequences in packed rows against rows padded to the longest, log-probs in chunks against logits of all positions, and
with ``--hugging-face`` against Hugging Face's model of the same shape; each against what the machine's rate of matrix
products allows. docs/performance.md explains the columns.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import random
import time
import unittest.mock
from collections.abc import Callable
from typing import Any

import as_in_jobs  # noqa: F401 (before torch)
import torch
import torch.nn.functional as F
from common import (
    PRECISIONS,
    SHAPES,
    Bounds,
    available_cores,
    default_precision,
    json_path,
    long_tailed,
    measure_gemm,
    positive_int,
    print_table,
    spread,
    write_json,
)
from sampled_memory import peak_extra_bytes
from torch.nn.utils.rnn import pad_sequence

from nemo_style_aligner.arguments import HelpFormatter
from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.parallel.allocator import keep_freed_memory
from nemo_style_aligner.engine.parallel.groups import device, single_process
from nemo_style_aligner.engine.weights.huggingface_config import hf_config
from nemo_style_aligner.trainer.config import schema
from nemo_style_aligner.trainer.models import layer_kernels
from nemo_style_aligner.trainer.models.actor import Actor
from nemo_style_aligner.trainer.models.gpt import build_model, parse_precision
from nemo_style_aligner.trainer.models.logprobs import Prediction, predict
from nemo_style_aligner.trainer.models.nonfinite import STOP
from nemo_style_aligner.trainer.models.optimizer import Optimizer, Schedule
from nemo_style_aligner.trainer.models.packing import MicroBatching, micro_batches, shares
from nemo_style_aligner.trainer.models.pipeline import Scoring, forward, train_step
from nemo_style_aligner.trainer.models.policy_losses import LossSettings
from nemo_style_aligner.trainer.models.ragged import RaggedBatch, after_prompts
from nemo_style_aligner.trainer.models.sharing import Costs

OPTIM = {"name": "distributed_fused_adam", "lr": 1e-6, "weight_decay": 0.1, "betas": [0.9, 0.98]}
ADAM = schema.Optimizer(**OPTIM)


@dataclasses.dataclass(frozen=True)
class Workload:
    """Sequences: a prompt and a response each."""

    batch: RaggedBatch

    @property
    def lengths(self) -> torch.Tensor:
        """Tokens of each prompt and response."""
        return self.batch.lengths

    @property
    def num_outputs(self) -> int:
        """Tokens of responses."""
        return int(self.batch.sampled_lengths.sum())

    @property
    def num_tokens(self) -> int:
        """Tokens of prompts and responses."""
        return int(self.lengths.sum())

    def operations(self, architecture: ModelArchitecture) -> list[int]:
        """Operations of a forward pass over each sequence, as far as the response's log-probs depend on it."""
        asked = self.batch.sequences()
        return [architecture.forward_operations(*row) for row in zip(asked.used, asked.num_outputs, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    add_workload_arguments(parser)
    add_batching_arguments(parser, max_tokens=4096)
    parser.add_argument("--rounds", type=positive_int, default=2)
    parser.add_argument("--threads", type=positive_int, default=available_cores())
    parser.add_argument("--skip-padded", action="store_true")
    parser.add_argument("--torch-layers", action="store_true", help="also packed rows without the compiled layers")
    parser.add_argument(
        "--hugging-face",
        nargs="*",
        type=positive_int,
        metavar="ROWS",
        help="also transformers' model, on so many rows at a time (without a number: 2), sorted by length and padded "
        "to the longest of them",
    )
    parser.add_argument("--json", type=json_path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory()  # as jobs do
    precision = args.precision or default_precision()
    dtype = parse_precision(precision)
    architecture = SHAPES[args.shape]
    with single_process():
        model = build_model(architecture, {"optim": OPTIM}, dtype)
        optimizer = Optimizer(model, ADAM, Schedule(lr=1e-6, name="constant"), 1.0, STOP)
        batching = MicroBatching(args.padded_rows, args.max_tokens)
        actor = Actor(
            model,
            optimizer,
            None,
            training_batching=batching,
            forward_batching=batching,
            temperature=1.0,
            loss=LossSettings(),
        )
        workload = make_workload(args, architecture)
        gc.collect()
        gc.freeze()  # as `RunControl.begin` does
        results = {"packed": measure(actor, workload, batching, False, args.rounds, dtype)}
        if args.torch_layers:
            with unittest.mock.patch.object(layer_kernels, "best_kernels", lambda: None):
                results["packed, torch's layers"] = measure(actor, workload, batching, False, args.rounds, dtype)
        if not args.skip_padded:
            in_rows = MicroBatching(args.padded_rows)
            results["padded"] = measure(actor, workload, in_rows, True, args.rounds, dtype)
        for rows in () if args.hugging_face is None else args.hugging_face or (2,):
            name = f"hugging face, {rows} rows"
            results[name] = measure_hugging_face(architecture, workload, rows, args.rounds, dtype)
        memory = head_memory(actor, workload)
        balance = data_parallel_balance(workload.operations(model.architecture))
        seconds = {"optimizer": spread(optimizer_seconds(optimizer, args.rounds))}
    gc.unfreeze()  # or nanobind, as in Triton, would report what is frozen as leaked
    report(results, memory, seconds, balance, workload)
    write_json(
        args.json,
        {
            "settings": {k: str(v) for k, v in vars(args).items()} | {"precision": precision},
            "parameters": architecture.num_parameters,
            "tokens": workload.num_tokens,
            "scored_tokens": workload.num_outputs,
            "passes": results,
            "head_memory_bytes": memory,
            "data_parallel_balance": balance,
            "seconds": seconds,
        },
    )


def add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the model and of `make_workload`."""
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--precision", choices=PRECISIONS, help="default: bf16 if the processor computes in it")
    parser.add_argument("--sequences", type=positive_int, default=16)
    parser.add_argument("--prompts", action=Bounds, default=(16, 128), metavar=("MIN", "MAX"), help="tokens")
    parser.add_argument("--responses", action=Bounds, default=(8, 256), metavar=("MIN", "MAX"), help="tokens")


def add_batching_arguments(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    """Add the options of the division into micro batches, packed ones of ``max_tokens`` unless told."""
    parser.add_argument("--max-tokens", type=positive_int, default=max_tokens, help="in a packed micro batch")
    parser.add_argument("--padded-rows", type=positive_int, default=4, help="in a padded micro batch")


def make_workload(args: argparse.Namespace, architecture: ModelArchitecture) -> Workload:
    """Random tokens; prompt lengths are drawn uniformly, response lengths have a long tail."""
    draw = random.Random(1)
    prompts = torch.tensor([draw.randint(*args.prompts) for _ in range(args.sequences)])
    lengths = prompts + torch.tensor(long_tailed(args.sequences, args.responses, draw))
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, architecture.vocab_size, (int(lengths.sum()),), generator=generator)
    return Workload(make_batch(tokens, lengths, prompts, generator))


def make_batch(
    tokens: torch.Tensor, lengths: torch.Tensor, prompt_lengths: torch.Tensor, generator: torch.Generator
) -> RaggedBatch:
    """With random advantages."""
    advantages = torch.randn(int((lengths - prompt_lengths).sum()), generator=generator)
    columns = {
        "old_logprobs": torch.full_like(advantages, -10.0),
        "advantages": advantages,
        "importance_weights": torch.ones_like(advantages),
    }
    sampled = after_prompts(lengths, prompt_lengths)
    return RaggedBatch(tokens.int(), lengths, sampled, columns, torch.ones(len(lengths), dtype=torch.bool))


def padded(batch: RaggedBatch) -> RaggedBatch:
    """Every row as long as the longest, with outputs at all positions, as without packing."""
    tokens = pad_sequence(batch.tokens.long().split(batch.lengths.tolist()), batch_first=True)
    ones = torch.ones_like(batch.lengths)
    return make_batch(tokens.flatten(), ones * tokens.shape[1], ones, torch.Generator().manual_seed(2))


# ---- passes -------------------------------------------------------------------------------------


def measure(
    actor: Actor, workload: Workload, batching: MicroBatching, is_padded: bool, rounds: int, dtype: torch.dtype
) -> dict[str, Any]:
    """Our training and log-prob passes; ``is_padded``: see `padded`."""
    batch = padded(workload.batch) if is_padded else workload.batch
    model, scoring = actor.model, Scoring(actor.temperature)

    def train() -> None:
        model.module.train()
        actor.optimizer.zero_grad()
        train_step(model, batch, None, batching, actor._loss, scoring=scoring)

    def score() -> None:
        forward(model, batch, None, batching, lambda logprobs, _: logprobs, scoring=scoring)

    used = batch.sequences().used
    return {
        "micro_batches": len(micro_batches(Costs.apart(used), batching)),
        "computed_tokens": sum(used),
        "padding_efficiency": sum(workload.batch.sequences().used) / sum(used),
        **measure_passes(train, score, workload, model.architecture, rounds, dtype),
    }


def measure_hugging_face(
    architecture: ModelArchitecture, workload: Workload, num_rows: int, rounds: int, dtype: torch.dtype
) -> dict[str, Any]:
    """The same passes by transformers' model with SDPA.

    Micro batches are ``num_rows`` sequences of about the same length, as its trainer makes them if asked to; logits are
    of all positions from the first response on.
    """
    import transformers  # takes seconds

    config = transformers.AutoConfig.for_model(**hf_config(architecture, dtype))
    with device():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    sequences = workload.batch.sequences()
    all_tokens, mask = (pad_sequence(list(x), batch_first=True) for x in (sequences.tokens, sequences.wanted))
    advantages = torch.zeros(mask.shape).masked_scatter(mask, workload.batch.columns["advantages"])
    by_length = sorted(range(len(workload.lengths)), key=lambda row: int(workload.lengths[row]))
    parts = []
    for first in range(0, len(by_length), num_rows):
        rows = by_length[first : first + num_rows]
        width = int(workload.lengths[rows].max())
        attended = torch.arange(width) < workload.lengths[rows, None]
        first = int(mask[rows].any(0).nonzero()[0])
        weights = advantages[rows, first : width - 1]
        parts.append(tuple(x.to(device()) for x in (all_tokens[rows, :width].long(), attended, weights)))

    def loss(tokens: torch.Tensor, attended: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Weighted sum over the positions of ``weights`` [b, k], the last of each row."""
        kept = weights.shape[1]
        logits = model(tokens, attention_mask=attended, use_cache=False, logits_to_keep=kept + 1).logits
        predictions, targets = logits[:, :-1].float().flatten(0, 1), tokens[:, -kept:].flatten()
        return (F.cross_entropy(predictions, targets, reduction="none") * weights.flatten()).sum()

    def train() -> None:
        model.train()
        model.zero_grad()
        for part in parts:
            loss(*part).backward()

    @torch.inference_mode()
    def score() -> None:
        for part in parts:
            loss(*part)

    computed = sum(tokens.numel() for tokens, *_ in parts)
    return {
        "micro_batches": len(parts),
        "computed_tokens": computed,
        "padding_efficiency": workload.num_tokens / computed,
        **measure_passes(train, score, workload, architecture, rounds, dtype),
    }


def measure_passes(
    train: Callable[[], None],
    score: Callable[[], None],
    workload: Workload,
    architecture: ModelArchitecture,
    rounds: int,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Training and log-prob passes in turns, each followed by a measurement of the rate of matrix products."""
    seconds: dict[str, list[float]] = {"training": [], "logprobs": []}
    fractions: dict[str, list[float]] = {"training": [], "logprobs": []}
    passes = {"training": (train, 3.0), "logprobs": (score, 1.0)}
    operations = sum(workload.operations(architecture))
    for round_ in range(rounds + 1):  # the first warms up
        for name, (action, factor) in passes.items():
            taken = timed(action)
            if round_:
                # Products of bf16 are exact in fp32, too, which is faster where bf16 is emulated.
                rate = max(measure_gemm(device(), kind) for kind in {dtype, torch.float32})
                seconds[name].append(taken)
                fractions[name].append(factor * operations / taken / rate)
    return {
        name: {
            "seconds": spread(seconds[name]),
            "tokens_per_second": workload.num_tokens / spread(seconds[name])["median"],
            "fraction_of_gemm_rate": spread(fractions[name]),
        }
        for name in passes
    }


def timed(action: Callable[[], Any]) -> float:
    """Seconds that ``action`` takes, the GPU's work included."""
    started = time.perf_counter()
    action()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def optimizer_seconds(optimizer: Optimizer, rounds: int) -> list[float]:
    """Seconds of each of ``rounds`` steps after the first, which allocates the moments."""
    return [timed(lambda: optimizer.step(0.0, "a benchmark")) for _ in range(rounds + 1)][1:]


def data_parallel_balance(work: list[int]) -> dict[int, dict[str, float]]:
    """By number of data-parallel ranks: mean over largest number of operations of a rank, with the batch divided as in
    jobs (``divided``) and with sequences dealt out in their order (``in_order``)."""
    found = {}
    for ranks in (n for n in (2, 4, 8) if n <= len(work) // 2):
        divisions = {
            "divided": shares(Costs.apart(work), ranks),
            "in_order": [range(r, len(work), ranks) for r in range(ranks)],
        }
        by_rank = {name: [sum(work[i] for i in part) for part in parts] for name, parts in divisions.items()}
        found[ranks] = {name: sum(sums) / ranks / max(sums) for name, sums in by_rank.items()}
    return found


# ---- memory of the output layer -----------------------------------------------------------------


def head_memory(actor: Actor, workload: Workload) -> dict[str, int]:
    """The most memory that log-probs of all responses at once need beyond their inputs, forward and backward."""
    count = workload.num_outputs
    weight = actor.model.gpt.shared_embedding_or_output_weight()
    hidden = torch.randn(count, 1, weight.shape[1], dtype=weight.dtype, device=weight.device).requires_grad_()
    targets = torch.zeros(count, dtype=torch.int64, device=weight.device)
    vocab_size = actor.model.architecture.vocab_size

    def chunked() -> None:
        wanted = Prediction(torch.arange(count, device=weight.device), targets)
        predict(hidden, weight, vocab_size, wanted, sequence_parallel=False).sum().backward()

    def full() -> None:
        F.cross_entropy(F.linear(hidden[:, 0], weight).float(), targets, reduction="sum").backward()

    sizes = {}
    for name, action in {"chunked": chunked, "full": full}.items():
        hidden.grad = weight.grad = None
        sizes[name] = peak_extra_bytes(action)
    actor.optimizer.zero_grad()
    return {"positions": count, "logits": 4 * count * weight.shape[0], **sizes}


def report(
    results: dict[str, Any],
    memory: dict[str, int],
    seconds: dict[str, dict[str, float]],
    balance: dict[int, dict[str, float]],
    workload: Workload,
) -> None:
    rows = []
    for name, result in results.items():
        for kind in ("training", "logprobs"):
            measured = result[kind]
            rows.append(
                (
                    f"{name}, {kind}",
                    f"{measured['seconds']['median']:.2f}",
                    f"{measured['tokens_per_second']:.0f}",
                    f"{100 * measured['fraction_of_gemm_rate']['median']:.0f}%",
                    f"{100 * result['padding_efficiency']:.0f}%",
                    str(result["micro_batches"]),
                )
            )
    print(f"{workload.num_tokens} tokens, {workload.num_outputs} of them in responses\n")
    print_table(("", "seconds", "tokens/s", "of GEMM rate", "padding efficiency", "micro batches"), rows)
    print_table(
        ("output layer, forward + backward", "extra memory"),
        [(name, f"{memory[name] / 1e6:.0f} MB") for name in ("chunked", "full", "logits")],
    )
    print_table(
        ("data-parallel ranks", "balance", "in order"),
        [(str(ranks), f"{found['divided']:.1%}", f"{found['in_order']:.1%}") for ranks, found in balance.items()],
    )
    print(f"optimizer: {seconds['optimizer']['median']:.2f} s", flush=True)


if __name__ == "__main__":
    main()
