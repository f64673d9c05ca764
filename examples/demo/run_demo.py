"""RLHF from a base model to PPO on a task with known answers: sums of two numbers, with a model made from scratch.

    make demo

Its stages: a base model that knows sums, SFT on demonstrations of which many refuse to answer, a reward model from
comparisons, PPO on two data-parallel ranks with the work queue and the critic service, and evaluation on held-out
questions. Writes results/demo/report.json and results/demo/report.html.
"""

from __future__ import annotations

try:
    import nemo_style_aligner  # noqa: F401
except ModuleNotFoundError as error:
    raise SystemExit(f"error: {error}: start this with the environment's python, .venv/bin/python {__file__}") from None

import argparse
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from stages import DATA_SCRIPTS, REPOSITORY, Demo, data_prefix, last, mpirun, python, require_at_least, write_results

from nemo_style_aligner.arguments import HelpFormatter, output_folder_argument, seed_argument
from nemo_style_aligner.engine.parallel.machine import free_port
from nemo_style_aligner.engine.text.jsonl import read_jsonl
from nemo_style_aligner.engine.text.tokenizer_training import train_bpe_tokenizer
from nemo_style_aligner.trainer.launch.stop_signals import exit_on_sigterm
from nemo_style_aligner.trainer.telemetry.metrics import read_metrics

MODEL = ["--num-layers", 2, "--hidden-size", 256, "--num-heads", 8, "--max-length", 48, "--tied-embeddings"]
UNDERSTOOD = 0.1
"""Below this validation loss a base model knows sums. Until it learns how last digits add up, the loss stays at 0.5."""
SEQUENCE_LENGTH = "model.encoder_seq_length=48"
COMMON = ["trainer.precision=32", SEQUENCE_LENGTH, "exp_manager.create_wandb_logger=False"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    demo, args, sft = begin(parser, "demo", num_stages=6)
    reward_model, reward_model_accuracy = train_reward_model(demo, args, sft)
    with demo.stage("ppo", "PPO, 2 ranks under mpirun, critic over HTTP") as results:
        policy = run_ppo(demo, args, sft, reward_model)
        results.append(gain(demo.directory / "actor"))
    report = evaluate(demo, args, {"sft": sft, "ppo": policy}, reward_model)
    write_summary(demo, {**report, "reward_model_accuracy": reward_model_accuracy})


def begin(
    parser: argparse.ArgumentParser, name: str, num_stages: int, *counts: str
) -> tuple[Demo, argparse.Namespace, Path]:
    """What the demos on sums begin with: the command line, the base model and the SFT model.

    Args:
        parser: may have options of the demo's own, of which ``counts`` must be at least 1.
        name: of the folder below results.
    """
    parser.add_argument("--output", type=output_folder_argument, default=REPOSITORY / "results" / name)
    add_options(parser)
    args = parser.parse_args()
    require_at_least(parser, args, 1, *counts)
    check_options(parser, args)
    exit_on_sigterm()
    demo = Demo(args.output.resolve(), num_stages=num_stages)
    return demo, args, train_sft(demo, args, make_base_model(demo, args))


def gain(log_dir: Path) -> str:
    """The mean reward of a run's first and last step."""
    rewards = read_metrics(log_dir)["train_rollouts/rewards"]
    return f"reward {rewards[0][1]:.2f} -> {rewards[-1][1]:.2f}"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for sizes and seeds; the defaults are the demo's."""
    parser.add_argument("--seed", type=seed_argument, default=1234)
    # Operands with the same number of digits: with one or two, it depends on the seed when the model learns sums.
    parser.add_argument("--min-operand", type=int, default=10)
    parser.add_argument("--max-operand", type=int, default=99)
    parser.add_argument("--base-steps", type=int, default=700)
    parser.add_argument("--base-tries", type=int, default=3, help="seeds to try until a base model knows sums")
    parser.add_argument("--sft-steps", type=int, default=120)
    parser.add_argument("--sft-errors", type=float, default=0.4, help="share of demonstrations that refuse to answer")
    parser.add_argument("--rm-steps", type=int, default=600)
    parser.add_argument("--ppo-steps", type=int, default=10)


def check_options(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End with a message if an option of `add_options` makes no sense, or if PPO could not be started."""
    require_at_least(parser, args, 1, "base_steps", "base_tries", "sft_steps", "rm_steps", "ppo_steps")
    if not 0 <= args.min_operand <= args.max_operand:
        parser.error(f"--min-operand {args.min_operand}: must be between 0 and --max-operand {args.max_operand}")
    if not 0 <= args.sft_errors <= 1:
        parser.error(f"--sft-errors {args.sft_errors}: must be between 0 and 1")
    mpirun(2)


def make_base_model(demo: Demo, args: argparse.Namespace) -> Path:
    """A model from scratch that knows sums: random weights, then training on right answers."""
    folder = demo.directory
    with demo.stage("base_model", "Data, tokenizer, base model") as results:
        for data, errors in (("data_base", 0.0), ("data", args.sft_errors)):
            # The same seed holds out the same questions.
            demo.run(
                "data", python(DATA_SCRIPTS / "make_arithmetic.py"), "--output", folder / data, "--seed", args.seed,
                "--min-operand", args.min_operand, "--max-operand", args.max_operand, "--test-questions", 500,
                "--sft-errors", errors, "--mistakes", "refusals", "--wrong-per-question", 6,
            )  # fmt: skip
        texts = [record.text("text") for record in read_jsonl(folder / "data" / "train_comparisons.jsonl")[:4000]]
        train_bpe_tokenizer(texts, 320, folder / "tokenizer")
        for seed in range(args.seed, args.seed + args.base_tries):  # whether it learns sums is partly luck
            log_dir = folder / "base"
            shutil.rmtree(log_dir, ignore_errors=True)
            demo.run(
                "init", python("init_gpt.py"), "--tokenizer", folder / "tokenizer", "--output", folder / "random.nemo",
                "--seed", seed, *MODEL,
            )  # fmt: skip
            start, data, steps = folder / "random.nemo", folder / "data_base", args.base_steps
            model = supervised(demo, "base", start, data, steps, 1e-3, seed)
            loss = last(log_dir, "val/loss")
            if loss < UNDERSTOOD:
                break
            results.append(f"seed {seed} did not learn sums (validation loss {loss:.3f})")
        results.append(f"{len(read_jsonl(folder / 'data' / 'train_prompts.jsonl'))} questions, 500 held out")
        results.append(f"validation loss {loss:.3f}")
    return model


def train_sft(demo: Demo, args: argparse.Namespace, base: Path) -> Path:
    with demo.stage("sft", f"SFT on demonstrations, {args.sft_errors:.0%} of them refusals") as results:
        model = supervised(demo, "sft", base, demo.directory / "data", args.sft_steps, 1e-3, args.seed)
        results.append(f"validation loss {last(demo.directory / 'sft', 'val/loss'):.3f}")
    return model


def supervised(demo: Demo, name: str, start: Path, data: Path, steps: int, lr: float, seed: int) -> Path:
    """Run train_gpt_sft.py and return the .nemo that it writes."""
    log_dir = demo.directory / name
    demo.run(
        name, python("train_gpt_sft.py"), *COMMON, f"model.restore_from_path={start}",
        f"model.data.train_ds.file_path={data / 'train_sft.jsonl'}",
        f"model.data.validation_ds.file_path={data / 'test_sft.jsonl'}",
        "model.data.train_ds.global_batch_size=64", "model.data.train_ds.micro_batch_size=64",
        "trainer.sft.max_epochs=100", f"trainer.sft.max_steps={steps}", f"trainer.sft.val_check_interval={steps}",
        "trainer.sft.save_interval=0", f"model.optim.lr={lr}", f"model.optim.sched.min_lr={lr / 10}",
        "model.optim.sched.warmup_steps=20", "model.optim.betas=[0.9,0.95]",
        f"exp_manager.explicit_log_dir={log_dir}", f"model.seed={seed}",
    )  # fmt: skip
    return log_dir / "checkpoints" / "megatron_gpt_sft.nemo"


def train_reward_model(demo: Demo, args: argparse.Namespace, sft: Path) -> tuple[Path, float]:
    data, log_dir = demo.directory / "data", demo.directory / "reward_model"
    with demo.stage("reward_model", "Reward model on comparisons") as results:
        demo.run(
            "reward_model", python("train_reward_model.py"), *COMMON,
            f"pretrained_checkpoint.restore_from_path={sft}",
            data_prefix(data / "train_comparisons.jsonl", data / "test_comparisons.jsonl"),
            "model.data.append_eod=True", "model.force_head_dtype=float32",
            "++model.micro_batch_size=64", "++model.global_batch_size=64",
            f"trainer.rm.max_steps={args.rm_steps}", f"trainer.rm.val_check_interval={max(1, args.rm_steps // 2)}",
            "trainer.rm.save_interval=0", "model.optim.lr=1e-3", "model.optim.sched.min_lr=1e-4",
            f"exp_manager.explicit_log_dir={log_dir}", f"model.seed={args.seed}",
        )  # fmt: skip
        accuracy = last(log_dir, "val/accuracy")
        results.append(f"ranks {accuracy:.1%} of held-out pairs right")
    return log_dir / "checkpoints" / "megatron_gpt.nemo", accuracy


def run_ppo(
    demo: Demo,
    args: argparse.Namespace,
    sft: Path,
    reward_model: Path,
    folder: str = ".",
    more_actor: Sequence[str] = (),
    more_critic: Sequence[str] = (),
) -> Path:
    """Run the critic service and the PPO actor, and return the policy's .nemo.

    Args:
        folder: where in the demo's directory the log directories ``actor`` and ``critic`` are.
        more_actor, more_critic: further overrides of their configs.
    """
    data, port = demo.directory / "data", free_port()
    log_dir = demo.directory / folder / "actor"
    critic = [
        *python("serve_ppo_critic.py"), *COMMON, f"pretrained_checkpoint.restore_from_path={reward_model}",
        f"trainer.ppo.port={port}", "trainer.ppo.combine_rm_and_critic_server=True",
        "trainer.ppo.inference_micro_batch_size=64", "model.forward_micro_batch_size=64",
        "model.micro_batch_size=64", "model.global_batch_size=64", "model.optim.lr=5e-4",
        "model.optim.sched.min_lr=5e-4", f"exp_manager.explicit_log_dir={log_dir.with_name('critic')}", *more_critic,
    ]  # fmt: skip
    actor = [
        *mpirun(2), *python("train_gpt_ppo_actor.py"), *COMMON, "trainer.devices=2",
        f"pretrained_checkpoint.restore_from_path={sft}",
        data_prefix(data / "train_prompts.jsonl", data / "test_prompts.jsonl"), "++model.data.data_impl=jsonl",
        "model.ppo.num_rollout_samples=256", "model.ppo.rollout_micro_batch_size=32",
        "model.global_batch_size=64", "model.micro_batch_size=32", "model.ppo.length_params.max_length=12",
        "model.ppo.num_val_samples=128", f"trainer.ppo.max_steps={args.ppo_steps}", "trainer.ppo.val_check_interval=5",
        "trainer.ppo.batch_iterator.use_flask=True", "trainer.ppo.batch_iterator.port=0",
        "trainer.ppo.generation.num_slots=64", "trainer.ppo.initial_policy_kl_penalty=1.0",
        "trainer.ppo.critic_warmup_steps=2", "model.optim.lr=1e-4", "model.optim.sched.min_lr=5e-5",
        "model.optim.weight_decay=0.0", f"model.seed={args.seed}",
        f"remote_critic_rm.critic.port={port}", f"exp_manager.explicit_log_dir={log_dir}", *more_actor,
    ]  # fmt: skip
    with demo.service("critic", port, *critic):
        demo.run("actor", *actor)
    return log_dir / "checkpoints" / "megatron_gpt_ppo_actor.nemo"


def evaluate(
    demo: Demo, args: argparse.Namespace, models: Mapping[str, Path], reward_model: Path | None
) -> dict[str, float]:
    """Accuracies and, with a reward model, rewards of ``models``, by name."""
    report: dict[str, float] = {}
    for name, model in models.items():
        with demo.stage(f"evaluation_{name}", f"Held-out questions, {name.upper()} model") as results:
            for mode, flags in (("", []), ("_greedy", ["--greedy"])):
                output = demo.directory / f"evaluation_{name}{mode}.json"
                summary = evaluate_model(demo, args, model, reward_model, output, flags)
                report[f"accuracy_{name}{mode}"] = summary["accuracy"]
                if reward_model is not None:
                    report[f"reward_{name}{mode}"] = summary["reward"]
            results.append(f"accuracy {report[f'accuracy_{name}']:.1%}")
            results.append(f"greedy {report[f'accuracy_{name}_greedy']:.1%}")
    return report


def evaluate_model(
    demo: Demo,
    args: argparse.Namespace,
    model: Path,
    reward_model: Path | None,
    output: Path,
    flags: Sequence[str] = (),
) -> dict[str, float]:
    """Accuracy, and reward if there is a reward model, of a model's answers to the held-out questions."""
    rewards = [] if reward_model is None else ["--reward-model", reward_model]
    demo.run(
        output.stem, python("evaluate_gpt.py"), "--model", model, "--prompts",
        demo.directory / "data" / "test_prompts.jsonl", "--output", output, *rewards,
        "--precision", 32, "--max-length", 12, "--num-slots", 64, "--seed", args.seed, *flags,
    )  # fmt: skip
    return json.loads(output.read_text())["summary"]


def write_summary(demo: Demo, report: dict[str, float]) -> None:
    kl = last(demo.directory / "actor", "train_rollouts/init_policy_kl")
    rows = [
        ("held-out accuracy, SFT", f"{report['accuracy_sft']:.1%}"),
        ("held-out accuracy, PPO", f"{report['accuracy_ppo']:.1%}"),
        ("the same, greedy decoding, SFT", f"{report['accuracy_sft_greedy']:.1%}"),
        ("the same, greedy decoding, PPO", f"{report['accuracy_ppo_greedy']:.1%}"),
        ("mean reward, SFT", f"{report['reward_sft']:.2f}"),
        ("mean reward, PPO", f"{report['reward_ppo']:.2f}"),
        ("reward model's accuracy on held-out pairs", f"{report['reward_model_accuracy']:.1%}"),
        ("KL penalty per token at the end", f"{kl:.4f}"),
    ]
    runs = {"PPO": "actor", "SFT": "sft", "Reward model": "reward_model", "Critic": "critic", "Base model": "base"}
    compare = {"SFT": "evaluation_sft.json", "PPO": "evaluation_ppo.json"}
    write_results(demo, {**report, "kl": kl}, rows, "RLHF on sums: from base model to PPO", runs, compare)


if __name__ == "__main__":
    main()
