"""The task of `make demo`, learnt by GRPO from the right answers: no reward model, no critic.

    make demo-grpo

Its stages: a base model that knows sums, SFT on demonstrations of which many refuse to answer, GRPO on two
data-parallel ranks with exact match as the reward, and evaluation on held-out questions. Writes
results/demo-grpo/report.json and results/demo-grpo/report.html.
"""

from __future__ import annotations

try:
    import nemo_style_aligner  # noqa: F401
except ModuleNotFoundError as error:
    raise SystemExit(f"error: {error}: start this with the environment's python, .venv/bin/python {__file__}") from None

import argparse
from pathlib import Path

from run_demo import COMMON, begin, evaluate, gain
from stages import Demo, data_prefix, last, mpirun, python, write_results

from nemo_style_aligner.arguments import HelpFormatter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    demo, args, sft = begin(parser, "demo-grpo", num_stages=5)
    with demo.stage("grpo", "GRPO, 2 ranks under mpirun, exact match as the reward") as results:
        policy = run_grpo(demo, args, sft)
        results.append(gain(demo.directory / "actor"))
    write_summary(demo, evaluate(demo, args, {"sft": sft, "grpo": policy}, None))


def run_grpo(demo: Demo, args: argparse.Namespace, sft: Path) -> Path:
    """Run the actor, alone, and return the policy's .nemo."""
    data, log_dir = demo.directory / "data", demo.directory / "actor"
    demo.run(
        "actor", *mpirun(2), *python("train_gpt_ppo_actor.py"), *COMMON, "trainer.devices=2",
        f"pretrained_checkpoint.restore_from_path={sft}",
        data_prefix(data / "train_prompts.jsonl", data / "test_prompts.jsonl"),
        "trainer.ppo.estimator=grpo", "trainer.ppo.num_rollouts_per_prompt=8", "model.ppo.num_rollout_samples=32",
        "trainer.ppo.rewards=[{name: right, source: exact_match}]",
        "model.ppo.rollout_micro_batch_size=32", "model.global_batch_size=64", "model.micro_batch_size=32",
        "model.ppo.length_params.max_length=12", "model.ppo.num_val_samples=128",
        f"trainer.ppo.max_steps={args.ppo_steps}", "trainer.ppo.val_check_interval=5",
        "trainer.ppo.generation.num_slots=64", "trainer.ppo.initial_policy_kl_penalty=0.01", "trainer.ppo.kl_in=loss",
        "trainer.ppo.kl_estimator=k3", "model.optim.lr=1e-4", "model.optim.sched.min_lr=5e-5",
        "model.optim.weight_decay=0.0", f"model.seed={args.seed}", f"exp_manager.explicit_log_dir={log_dir}",
    )  # fmt: skip
    return log_dir / "checkpoints" / "megatron_gpt_ppo_actor.nemo"


def write_summary(demo: Demo, report: dict[str, float]) -> None:
    kl = last(demo.directory / "actor", "train_rollouts/init_policy_kl")
    rows = [
        ("held-out accuracy, SFT", f"{report['accuracy_sft']:.1%}"),
        ("held-out accuracy, GRPO", f"{report['accuracy_grpo']:.1%}"),
        ("the same, greedy decoding, SFT", f"{report['accuracy_sft_greedy']:.1%}"),
        ("the same, greedy decoding, GRPO", f"{report['accuracy_grpo_greedy']:.1%}"),
        ("KL (k3) per token at the end", f"{kl:.4f}"),
    ]
    runs = {"GRPO": "actor", "SFT": "sft", "Base model": "base"}
    compare = {"SFT": "evaluation_sft.json", "GRPO": "evaluation_grpo.json"}
    write_results(demo, {**report, "kl": kl}, rows, "GRPO on sums: from base model to right answers", runs, compare)


if __name__ == "__main__":
    main()
