"""The task of `make demo`, learnt from preferences: DPO, KTO and best of n, each from the same SFT model.

    make demo-preferences

Its stages: a base model that knows sums, SFT on demonstrations of which many refuse to answer, DPO on comparisons, KTO
on the same answers one by one, best of n with exact match as the reward, and evaluation on held-out questions. Writes
results/demo-preferences/report.json and results/demo-preferences/report.html.
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
from nemo_style_aligner.engine.text.jsonl import read_jsonl, write_jsonl


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--preference-steps", type=int, default=60, help="of DPO and of KTO")
    demo, args, sft = begin(parser, "demo-preferences", 9, "preference_steps")
    with demo.stage("dpo", "DPO on comparisons") as results:
        dpo = prefer(demo, args, "dpo", sft, demo.directory / "data", "comparisons")
        results.append(f"held-out pairs told apart: {last(demo.directory / 'dpo', 'val/accuracy'):.1%}")
    with demo.stage("kto", "KTO on single answers") as results:
        judge(demo)
        kto = prefer(demo, args, "kto", sft, demo.directory, "judged")
        results.append(f"margin of rewards {last(demo.directory / 'kto', 'val/rewards_margin'):.2f}")
    with demo.stage("rs", "Best of 4, 2 ranks under mpirun, exact match as the reward") as results:
        best = best_of_n(demo, args, sft)
        results.append(gain(demo.directory / "rs"))
    models = {"sft": sft, "dpo": dpo, "kto": kto, "rs": best}
    report = evaluate(demo, args, models, None)
    rows = [(f"held-out accuracy, {name.upper()}", f"{report[f'accuracy_{name}']:.1%}") for name in models]
    rows += [(f"the same, greedy, {name.upper()}", f"{report[f'accuracy_{name}_greedy']:.1%}") for name in models]
    runs = {"DPO": "dpo", "KTO": "kto", "Best of n": "rs", "SFT": "sft", "Base": "base"}
    compare = {name.upper(): f"evaluation_{name}.json" for name in models}
    write_results(demo, report, rows, "Preferences on sums", runs, compare)


def judge(demo: Demo) -> None:
    """Write the comparisons' answers as KTO's lines, one by one: every even line is a right answer."""
    for split in ("train", "test"):
        lines = []
        for number, record in enumerate(read_jsonl(demo.directory / "data" / f"{split}_comparisons.jsonl")):
            question, answer = record.text("text").split("Assistant:")
            lines.append({"prompt": f"{question}Assistant:", "completion": answer, "label": number % 2 == 0})
        write_jsonl(demo.directory / f"{split}_judged.jsonl", lines)


def prefer(demo: Demo, args: argparse.Namespace, method: str, sft: Path, data: Path, kind: str) -> Path:
    """Run train_gpt_dpo.py or train_gpt_kto.py and return the policy's .nemo."""
    log_dir, steps = demo.directory / method, args.preference_steps
    demo.run(
        method, python(f"train_gpt_{method}.py"), *COMMON, f"pretrained_checkpoint.restore_from_path={sft}",
        data_prefix(data / f"train_{kind}.jsonl", data / f"test_{kind}.jsonl"), "model.data.append_eod=True",
        f"model.{method}.ref_policy_kl_penalty=0.1", "model.global_batch_size=64", "model.micro_batch_size=64",
        f"trainer.{method}.max_steps={steps}", f"trainer.{method}.val_check_interval={max(1, steps // 2)}",
        f"trainer.{method}.save_interval=0", f"trainer.{method}.limit_val_batches=4", "model.optim.lr=1e-4",
        "model.optim.sched.min_lr=5e-5", "model.optim.weight_decay=0.0", f"model.seed={args.seed}",
        f"exp_manager.explicit_log_dir={log_dir}",
    )  # fmt: skip
    return log_dir / "checkpoints" / "megatron_gpt.nemo"


def best_of_n(demo: Demo, args: argparse.Namespace, sft: Path) -> Path:
    """Run train_gpt_rs_actor.py, alone, and return the policy's .nemo."""
    data, log_dir = demo.directory / "data", demo.directory / "rs"
    demo.run(
        "rs", *mpirun(2), *python("train_gpt_rs_actor.py"), *COMMON, "trainer.devices=2",
        f"pretrained_checkpoint.restore_from_path={sft}",
        data_prefix(data / "train_prompts.jsonl", data / "test_prompts.jsonl"),
        "trainer.rs.rewards=[{name: right, source: exact_match}]",
        "model.rs.num_rollouts_per_prompt=4", "model.rs.top_n_rollouts=1", "model.rs.num_rollout_samples=128",
        "model.rs.rollout_micro_batch_size=32", "model.global_batch_size=64", "model.micro_batch_size=32",
        "model.rs.length_params.max_length=12", "model.rs.num_val_samples=128",
        f"trainer.rs.max_steps={args.ppo_steps}", "trainer.rs.val_check_interval=5",
        "trainer.rs.generation.num_slots=64", "model.optim.lr=1e-4", "model.optim.sched.min_lr=5e-5",
        "model.optim.weight_decay=0.0", f"model.seed={args.seed}", f"exp_manager.explicit_log_dir={log_dir}",
    )  # fmt: skip
    return log_dir / "checkpoints" / "megatron_gpt_rs_actor.nemo"


if __name__ == "__main__":
    main()
