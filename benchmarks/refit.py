"""How long a refit takes: trained weights from their parallel layout into a generation engine that is built already.

    python benchmarks/refit.py [--shapes 30m 135m 360m] [--rounds 5] [--json FILE]

Each case runs in real processes over gloo. After each refit, the same processes make a plain copy of as many bytes: the
ratio says what names, layouts and communication cost. docs/performance.md explains the columns.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import multiprocessing
import os
import queue
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import cpu_only  # noqa: F401 (hides GPUs: the figures are those of the host)
import torch
import torch.distributed as dist
from common import (
    PRECISIONS,
    SHAPES,
    available_cores,
    json_path,
    positive_int,
    print_table,
    spread,
    write_json,
)
from sampled_memory import peak_extra_bytes

from nemo_style_aligner.arguments import HelpFormatter
from nemo_style_aligner.engine.embedded.engine import EmbeddedEngine
from nemo_style_aligner.engine.parallel.groups import initialize_model_parallel
from nemo_style_aligner.engine.shard import TensorParallel
from nemo_style_aligner.engine.weights.stream import DEFAULT_BUCKET_BYTES, export_weights, lendable_weights
from nemo_style_aligner.kinds import StepChoice
from nemo_style_aligner.trainer.launch.stop_signals import exit_on_sigterm
from nemo_style_aligner.trainer.models.gpt import build_model, parse_precision
from nemo_style_aligner.trainer.models.lora import LoraSettings, add_adapters

LIMIT_SECONDS = 900.0


@dataclasses.dataclass(frozen=True)
class Case:
    """A training layout and the engine's."""

    name: str
    tensor_parallel: int
    pipeline_parallel: int
    engine_tensor_parallel: int
    step: StepChoice = "auto"
    adapters: bool = False  # of rank 32, beside all linear layers

    @property
    def num_ranks(self) -> int:
        """Processes."""
        return self.tensor_parallel * self.pipeline_parallel


CASES = (
    Case("same layout", 1, 1, 1),
    Case("same layout, in torch", 1, 1, 1, step="torch"),  # which computes with the trainer's weights in place
    Case("same layout, adapters", 1, 1, 1, adapters=True),
    Case("TP 2 to whole", 2, 1, 1),
    Case("TP 2 to whole, adapters", 2, 1, 1, adapters=True),
    Case("PP 2 to whole", 1, 2, 1),
    Case("PP 2 to TP 2", 1, 2, 2),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=("30m", "135m", "360m"), metavar="SHAPE")
    parser.add_argument(
        "--cases",
        nargs="+",
        choices=[case.name for case in CASES],
        metavar="CASE",
        help="default: " + "; ".join(case.name for case in CASES),
    )
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16")
    parser.add_argument(
        "--bucket-megabytes",
        type=positive_int,
        default=DEFAULT_BUCKET_BYTES // 2**20,
        help="size of the stream's buckets",
    )
    parser.add_argument("--rounds", type=positive_int, default=5)
    parser.add_argument("--threads", type=positive_int, default=available_cores(), help="of all ranks together")
    parser.add_argument("--json", type=json_path)
    args = parser.parse_args()
    exit_on_sigterm()
    results = []
    for shape in args.shapes:
        for case in CASES:
            if args.cases is None or case.name in args.cases:
                results.append(summarise(shape, case, run_case(shape, case, args)))
    growth = compare_sizes(results)
    report(results, growth)
    write_json(
        args.json, {"settings": {k: str(v) for k, v in vars(args).items()}, "results": results, "growth": growth}
    )


# ---- a case -------------------------------------------------------------------------------------


def run_case(shape: str, case: Case, args: argparse.Namespace) -> list[dict[str, Any]]:
    """What each rank measured, by rank."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    found: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="refit_") as folder:
        ranks = [
            context.Process(
                target=run_rank, args=(rank, shape, case, args, f"file://{folder}/ranks", answers), daemon=True
            )
            for rank in range(case.num_ranks)
        ]
        # Ranks share the cores: threads that spin while they wait would keep them from one another.
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        for process in ranks:
            process.start()
        try:
            deadline = time.monotonic() + LIMIT_SECONDS
            while len(found) < case.num_ranks:
                with contextlib.suppress(queue.Empty):
                    rank, answer = answers.get(timeout=1)
                    found[rank] = answer
                if any(process.exitcode for process in ranks) or time.monotonic() > deadline:
                    raise SystemExit(f"{shape}, {case.name}: a rank failed or took longer than {LIMIT_SECONDS:g} s")
        finally:
            for process in ranks:
                process.join(0 if len(found) < case.num_ranks else 30)
                process.kill()
                process.join()
    return [found[rank] for rank in range(case.num_ranks)]


def run_rank(rank: int, shape: str, case: Case, args: argparse.Namespace, rendezvous: str, answers: Any) -> None:
    """One process: a shard of the training model, an engine, and refits of the engine from the shard."""
    torch.set_num_threads(max(1, args.threads // case.num_ranks))
    dist.init_process_group(
        "gloo", init_method=rendezvous, rank=rank, world_size=case.num_ranks, timeout=timedelta(seconds=LIMIT_SECONDS)
    )
    initialize_model_parallel(case.tensor_parallel, case.pipeline_parallel, seed=1)
    architecture, dtype = SHAPES[shape], parse_precision(args.precision)
    model = build_model(architecture, {}, dtype, trainable=False)
    if case.adapters:
        model.adapters = add_adapters(model.gpt, architecture, model.layout, LoraSettings(("all",), 32, 32.0))
    engine = EmbeddedEngine(
        architecture,
        dtype=dtype,
        num_slots=1,
        max_sequence_length=64,
        eos_id=0,
        tensor_parallel=TensorParallel(rank, case.num_ranks) if case.engine_tensor_parallel > 1 else None,
        step=case.step,
        trainer_weights=lambda: lendable_weights(model, rank, case.engine_tensor_parallel),
    )
    engine.build()

    def refit() -> None:
        bucket_bytes = args.bucket_megabytes * 2**20
        weights = export_weights(model, bucket_bytes, without=engine.viewed_weights, transient=True)
        engine.refit(weights, engine.weight_version + 1)

    refit()  # touches all memory that is kept
    compilations = engine.num_compilations
    extra_bytes = peak_extra_bytes(refit)
    num_bytes = architecture.num_parameters * dtype.itemsize // case.engine_tensor_parallel
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.zeros(num_bytes, dtype=torch.uint8)
    refit_seconds, copy_seconds = [], []
    for _ in range(args.rounds):
        refit_seconds.append(together(refit))
        copy_seconds.append(together(lambda: target.copy_(source)))
    answers.put(
        (
            rank,
            {
                "refit_seconds": refit_seconds,
                "copy_seconds": copy_seconds,
                "bytes": num_bytes,
                "recompilations": engine.num_compilations - compilations,
                "peak_extra_bytes": extra_bytes,
            },
        )
    )
    dist.barrier()
    dist.destroy_process_group()


def together(action: Callable[[], Any]) -> float:
    """Seconds from when all ranks begin until all are done."""
    dist.barrier()
    started = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - started


# ---- what is reported ---------------------------------------------------------------------------


def summarise(shape: str, case: Case, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of a case: each round as slow as its slowest rank, memory of the rank that needs most."""
    refits = [max(rounds) for rounds in zip(*(rank["refit_seconds"] for rank in ranks), strict=True)]
    copies = [max(rounds) for rounds in zip(*(rank["copy_seconds"] for rank in ranks), strict=True)]
    return {
        "shape": shape,
        "case": case.name,
        "ranks": case.num_ranks,
        "parameters": SHAPES[shape].num_parameters,
        "bytes": ranks[0]["bytes"],
        "refit_seconds": spread(refits),
        "copy_seconds": spread(copies),
        "ratio_to_copy": statistics.median(refits) / statistics.median(copies),
        "recompilations": sum(rank["recompilations"] for rank in ranks),
        "peak_extra_bytes": max(rank["peak_extra_bytes"] for rank in ranks),
    }


def compare_sizes(results: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """For each case the largest model over the smallest, in bytes and in seconds, and how much more memory it needs."""
    growth = {}
    for name in dict.fromkeys(result["case"] for result in results):
        sizes = sorted((r for r in results if r["case"] == name), key=lambda r: r["parameters"])
        small, large = sizes[0], sizes[-1]
        if small is not large:
            growth[name] = {
                "bytes": large["bytes"] / small["bytes"],
                "seconds": large["refit_seconds"]["median"] / small["refit_seconds"]["median"],
                "more_extra_bytes": large["peak_extra_bytes"] - small["peak_extra_bytes"],  # either may be next to none
            }
    return growth


def report(results: list[dict[str, Any]], growth: dict[str, dict[str, float]]) -> None:
    rows = []
    for result in results:
        seconds = result["refit_seconds"]
        rows.append(
            (
                f"{result['shape']}, {result['case']}",
                f"{result['bytes'] / 1e6:.0f} MB",
                f"{seconds['median'] * 1e3:.1f}",
                f"{seconds['min'] * 1e3:.1f}-{seconds['max'] * 1e3:.1f}",
                f"{result['copy_seconds']['median'] * 1e3:.1f}",
                f"{result['ratio_to_copy']:.1f} x",
                str(result["recompilations"]),
                f"{result['peak_extra_bytes'] / 1e6:.0f} MB",
            )
        )
    print_table(("", "weights", "refit ms", "rounds", "copy ms", "ratio", "recompiled", "extra memory"), rows)
    if growth:
        sizes = [
            (name, f"{g['bytes']:.1f} x", f"{g['seconds']:.1f} x", f"{g['more_extra_bytes'] / 1e6:+.0f} MB")
            for name, g in growth.items()
        ]
        print_table(("largest model over smallest", "weights", "seconds", "extra memory"), sizes)


if __name__ == "__main__":
    main()
