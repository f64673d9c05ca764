"""A model learns to use a tool: a calculator, for sums that it cannot do alone.

    make demo-agent

Its stages: a model from scratch that has seen the calculator used; SFT on demonstrations of which most write the answer
down at once, which it learns to imitate, but not to get right; GRPO on two data-parallel ranks, whose episodes
calculator.py leads and whose reward is 1 for the right answer; and evaluation on held-out sums, in episodes, too.
Nothing rewards the tool itself: the policy finds out that it pays. Writes results/demo-agent/report.json and
results/demo-agent/report.html.
"""

from __future__ import annotations

try:
    import nemo_style_aligner  # noqa: F401
except ModuleNotFoundError as error:
    raise SystemExit(f"error: {error}: start this with the environment's python, .venv/bin/python {__file__}") from None

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from run_demo import COMMON, gain, supervised
from stages import DATA_SCRIPTS, REPOSITORY, Demo, data_prefix, last, mpirun, python, require_at_least, write_results

from nemo_style_aligner.arguments import HelpFormatter, output_folder_argument, seed_argument
from nemo_style_aligner.engine.text.jsonl import read_jsonl, write_jsonl
from nemo_style_aligner.engine.text.tokenizer_training import train_bpe_tokenizer
from nemo_style_aligner.trainer.launch.stop_signals import exit_on_sigterm

MODEL = ["--num-layers", 2, "--hidden-size", 128, "--num-heads", 4, "--max-length", 64, "--tied-embeddings"]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + (eos_token if m['role'] == 'assistant' else '') }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
ENVIRONMENT = f"{Path(__file__).with_name('calculator.py')}:episode"
SUMS = ["--min-operand", 300, "--max-operand", 599, "--test-questions", 300, "--wrong-per-question", 1]
USED = 8000  # of the training questions
RESPONSE_TOKENS, SEQUENCE_LENGTH = 44, "model.encoder_seq_length=64"  # of an episode: calls, what is told, an answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--output", type=output_folder_argument, default=REPOSITORY / "results" / "demo-agent")
    parser.add_argument("--seed", type=seed_argument, default=1234)
    parser.add_argument("--tool-share", type=float, default=0.15, help="of demonstrations: those that use the tool")
    parser.add_argument("--base-steps", type=int, default=350)
    parser.add_argument("--sft-steps", type=int, default=60)
    parser.add_argument("--grpo-steps", type=int, default=12)
    args = parser.parse_args()
    require_at_least(parser, args, 1, "base_steps", "sft_steps", "grpo_steps")
    mpirun(2)
    exit_on_sigterm()
    demo = Demo(args.output.resolve(), num_stages=5)
    with demo.stage("base_model", "Data, tokenizer, a model that has seen the calculator used") as results:
        base = make_base_model(demo, args)
        results.append(f"validation loss {last(demo.directory / 'base', 'val/loss'):.3f}")
    with demo.stage("sft", f"SFT on demonstrations, {args.tool_share:.0%} of them with the calculator") as results:
        sft = supervised(demo, "sft", base, demo.directory / "data", args.sft_steps, 1e-3, args.seed)
        results.append(f"validation loss {last(demo.directory / 'sft', 'val/loss'):.3f}")
    with demo.stage("grpo", "GRPO with a calculator, 2 ranks under mpirun") as results:
        policy = run_grpo(demo, args, sft)
        results.append(gain(demo.directory / "actor"))
    report = {}
    for name, model in {"sft": sft, "grpo": policy}.items():
        with demo.stage(f"evaluation_{name}", f"Held-out sums, {name.upper()} model") as results:
            report |= {f"{key}_{name}": value for key, value in evaluate(demo, args, name, model).items()}
            results.append(f"right {report[f'accuracy_{name}']:.1%}, with the tool {report[f'tool_{name}']:.1%}")
    rows = [
        (f"{what}, {name.upper()}", f"{report[f'{key}_{name}']:.1%}")
        for key, what in (("accuracy", "held-out accuracy"), ("tool", "episodes with the calculator"))
        for name in ("sft", "grpo")
    ]
    rows.append(("accuracy of episodes without it, SFT", f"{report['alone_sft']:.1%}"))
    compare = {"SFT": "evaluation_sft.json", "GRPO": "evaluation_grpo.json"}
    write_results(
        demo, report, rows, "GRPO with a calculator", {"GRPO": "actor", "SFT": "sft", "Base model": "base"}, compare
    )


def make_base_model(demo: Demo, args: argparse.Namespace) -> Path:
    """Conversations about sums, a tokenizer with a chat template, a model that learns how the tool is used."""
    folder, random_model = demo.directory, demo.directory / "random.nemo"
    demo.run(
        "data", python(DATA_SCRIPTS / "make_arithmetic.py"), "--output", folder / "data", "--seed", args.seed, *SUMS
    )
    for split in ("train", "test"):
        prompts = folder / "data" / f"{split}_prompts.jsonl"
        lines = [dict(record.fields) for record in read_jsonl(prompts)][:USED]
        write_jsonl(prompts, map(as_conversation, lines))
        for data, share in (("data_base", 1.0), ("data", args.tool_share)):
            write_jsonl(folder / data / f"{split}_sft.jsonl", demonstrations(lines, share, random.Random(args.seed)))
    texts = [json.dumps(dict(record.fields)) for record in read_jsonl(folder / "data_base" / "test_sft.jsonl")]
    train_bpe_tokenizer(texts, 320, folder / "tokenizer")
    (folder / "tokenizer" / "chat_template.jinja").write_text(TEMPLATE)
    demo.run(
        "init", python("init_gpt.py"), "--tokenizer", folder / "tokenizer", "--output", random_model,
        "--seed", args.seed, *MODEL,
    )  # fmt: skip
    return supervised(demo, "base", random_model, folder / "data_base", args.base_steps, 2e-3, args.seed)


def as_conversation(line: dict[str, Any]) -> dict[str, Any]:
    """A line of make_arithmetic.py whose prompt is a message."""
    asked = line["text"].removeprefix("User: ").removesuffix("\nAssistant:")
    return {**{key: line[key] for key in line if key != "text"}, "messages": [{"role": "user", "content": asked}]}


def demonstrations(lines: list[dict[str, Any]], tool_share: float, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Right answers; a share of them from the calculator."""
    for line in lines:
        (asked,) = as_conversation(line)["messages"]
        called = asked["content"].removeprefix("What is ").removesuffix("?")
        answer = {"role": "assistant", "content": line["answer"]}
        told = [{"role": "assistant", "content": f"calc({called})"}, {"role": "tool", "content": line["answer"]}]
        yield {"messages": [asked, *(told if rng.random() < tool_share else []), answer]}


def run_grpo(demo: Demo, args: argparse.Namespace, sft: Path) -> Path:
    """Run the actor, alone, and return the policy's .nemo."""
    data, log_dir = demo.directory / "data", demo.directory / "actor"
    demo.run(
        "actor", *mpirun(2), *python("train_gpt_ppo_actor.py"), *COMMON, "trainer.devices=2", SEQUENCE_LENGTH,
        f"pretrained_checkpoint.restore_from_path={sft}",
        data_prefix(data / "train_prompts.jsonl", data / "test_prompts.jsonl"),
        f"trainer.ppo.environment={ENVIRONMENT}", "trainer.ppo.rewards=[{name: calculator, source: environment}]",
        "trainer.ppo.estimator=grpo", "trainer.ppo.num_rollouts_per_prompt=8", "model.ppo.num_rollout_samples=32",
        "model.ppo.rollout_micro_batch_size=32", "model.global_batch_size=64", "model.micro_batch_size=32",
        f"model.ppo.length_params.max_length={RESPONSE_TOKENS}", "model.ppo.num_val_samples=128",
        f"trainer.ppo.max_steps={args.grpo_steps}", "trainer.ppo.val_check_interval=6", "trainer.ppo.save_samples=True",
        "trainer.ppo.batch_iterator.use_flask=True", "trainer.ppo.batch_iterator.port=0",
        "trainer.ppo.generation.num_slots=64", "model.optim.lr=2e-4", "model.optim.sched.min_lr=1e-4",
        "model.optim.weight_decay=0.0", f"model.seed={args.seed}", f"exp_manager.explicit_log_dir={log_dir}",
    )  # fmt: skip
    return log_dir / "checkpoints" / "megatron_gpt_ppo_actor.nemo"


def evaluate(demo: Demo, args: argparse.Namespace, name: str, model: Path) -> dict[str, float]:
    """Shares of held-out sums: right, with the tool, and of those without it, right."""
    output = demo.directory / f"evaluation_{name}.json"
    demo.run(
        output.stem, python("evaluate_gpt.py"), "--model", model, "--environment", ENVIRONMENT, "--prompts",
        demo.directory / "data" / "test_prompts.jsonl", "--output", output, "--precision", 32,
        "--max-length", RESPONSE_TOKENS, "--num-slots", 64, "--seed", args.seed,
    )  # fmt: skip
    results = json.loads(output.read_text())
    alone = [row["is_right"] for row in results["responses"] if row["replies"] == 1]
    accuracy, tool = (results["summary"][key] for key in ("accuracy", "reward/tool"))
    return {"accuracy": accuracy, "tool": tool, "alone": sum(alone) / max(1, len(alone))}


if __name__ == "__main__":
    main()
