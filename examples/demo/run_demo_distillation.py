"""The task of `make demo`, learnt from a teacher: from its stored logits, and from its say on the policy's answers.

    make demo-distillation

Its stages: a base model that knows sums, the teacher; SFT on demonstrations of which many refuse to answer, which
makes the student; its distillation from the teacher's logits; its on-policy distillation; and evaluation on held-out
questions. Writes results/demo-distillation/report.json and results/demo-distillation/report.html.
"""

from __future__ import annotations

try:
    import nemo_style_aligner  # noqa: F401
except ModuleNotFoundError as error:
    raise SystemExit(f"error: {error}: start this with the environment's python, .venv/bin/python {__file__}") from None

import argparse
from pathlib import Path

from run_demo import COMMON, begin, evaluate
from stages import REPOSITORY, Demo, data_prefix, last, mpirun, python, write_results

from nemo_style_aligner.arguments import HelpFormatter
from nemo_style_aligner.trainer.telemetry.metrics import read_metrics

STORE_LOGITS = REPOSITORY / "examples" / "nlp" / "synthetic_data_gen" / "compute_topk_logits.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--distillation-steps", type=int, default=60, help="from stored logits")
    demo, args, sft = begin(parser, "demo-distillation", 9, "distillation_steps")
    teacher = demo.directory / "base" / "checkpoints" / "megatron_gpt_sft.nemo"
    with demo.stage("logits", "The teacher's logits"):
        store_logits(demo, teacher)
    with demo.stage("kd", "Distillation from the logits") as results:
        student = distill(demo, args, sft)
        results.append(f"validation: divergence {last(demo.directory / 'kd', 'val/kd_loss'):.3f}")
    with demo.stage("opd", "On-policy distillation, 2 ranks under mpirun") as results:
        policy = distill_on_policy(demo, args, sft, teacher)
        kl = read_metrics(demo.directory / "opd")["train_rollouts/teacher_kl"]
        results.append(f"KL from the teacher {kl[0][1]:.3f} -> {kl[-1][1]:.3f}")
    models = {"teacher": teacher, "sft": sft, "kd": student, "opd": policy}
    report = evaluate(demo, args, models, None)
    rows = [(f"held-out accuracy, {name.upper()}", f"{report[f'accuracy_{name}']:.1%}") for name in models]
    rows += [(f"the same, greedy, {name.upper()}", f"{report[f'accuracy_{name}_greedy']:.1%}") for name in models]
    runs = {"From logits": "kd", "On-policy": "opd", "SFT": "sft", "Teacher": "base"}
    compare = {name.upper(): f"evaluation_{name}.json" for name in models}
    write_results(demo, report, rows, "Distillation on sums", runs, compare)


def store_logits(demo: Demo, teacher: Path) -> None:
    """Run compute_topk_logits.py on the right answers of training and held-out questions."""
    for split in ("train", "test"):
        demo.run(
            f"logits_{split}", *python(STORE_LOGITS), "trainer.precision=32", "model.encoder_seq_length=48",
            f"pretrained_checkpoint.restore_from_path={teacher}", "top_k=8",
            f"data.data.file_path={demo.directory / 'data_base' / f'{split}_sft.jsonl'}",
            f"output_path={demo.directory / f'{split}_logits.jsonl'}", "model.global_batch_size=256",
            "model.micro_batch_size=64", f"exp_manager.explicit_log_dir={demo.directory / 'logits'}",
        )  # fmt: skip


def distill(demo: Demo, args: argparse.Namespace, sft: Path) -> Path:
    """Run train_gpt_knowledge_distillation.py and return the student's .nemo."""
    log_dir, steps, kd = demo.directory / "kd", args.distillation_steps, "trainer.knowledge_distillation"
    demo.run(
        "kd", *python("train_gpt_knowledge_distillation.py"), *COMMON,
        f"pretrained_checkpoint.restore_from_path={sft}",
        data_prefix(demo.directory / "train_logits.jsonl", demo.directory / "test_logits.jsonl"),
        "model.global_batch_size=64", "model.micro_batch_size=64", f"{kd}.max_steps={steps}",
        f"{kd}.val_check_interval={steps}", f"{kd}.save_interval=0", f"{kd}.limit_val_batches=4",
        # The divergence does not see refusals, which are not among the teacher's top k; the texts' own loss does.
        "model.knowledge_distillation.sft_loss_weight=0.4",
        "model.optim.lr=3e-4", "model.optim.sched.min_lr=1e-4", "model.optim.weight_decay=0.0",
        f"model.seed={args.seed}", f"exp_manager.explicit_log_dir={log_dir}",
    )  # fmt: skip
    return log_dir / "checkpoints" / "megatron_gpt_knowledge_distillation.nemo"


def distill_on_policy(demo: Demo, args: argparse.Namespace, sft: Path, teacher: Path) -> Path:
    """Run the actor with a teacher, alone, and return the policy's .nemo. The rewards are only measured."""
    data, log_dir = demo.directory / "data", demo.directory / "opd"
    demo.run(
        "opd", *mpirun(2), *python("train_gpt_reinforce_actor.py"), *COMMON, "trainer.devices=2",
        f"pretrained_checkpoint.restore_from_path={sft}",
        data_prefix(data / "train_prompts.jsonl", data / "test_prompts.jsonl"),
        "trainer.reinforce.estimator=on_policy_distillation", "trainer.reinforce.num_rollouts_per_prompt=1",
        f"trainer.reinforce.teacher.restore_from_path={teacher}", "trainer.reinforce.initial_policy_kl_penalty=0",
        "trainer.reinforce.rewards=[{name: right, source: exact_match}]",
        "model.reinforce.num_rollout_samples=256", "model.reinforce.rollout_micro_batch_size=32",
        "model.global_batch_size=64", "model.micro_batch_size=32", "model.reinforce.length_params.max_length=12",
        "model.reinforce.num_val_samples=128", f"trainer.reinforce.max_steps={args.ppo_steps}",
        "trainer.reinforce.val_check_interval=5", "trainer.reinforce.generation.num_slots=64", "model.optim.lr=1e-4",
        "model.optim.sched.min_lr=5e-5", "model.optim.weight_decay=0.0", f"model.seed={args.seed}",
        f"exp_manager.explicit_log_dir={log_dir}",
    )  # fmt: skip
    return log_dir / "checkpoints" / "megatron_gpt_reinforce_actor.nemo"


if __name__ == "__main__":
    main()
