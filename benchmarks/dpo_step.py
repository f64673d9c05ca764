"""One DPO step against TRL's `DPOTrainer` in the same run: the same weights, pairs, dtype and settings.

    python benchmarks/dpo_step.py --nemo policy.nemo --hf DIR --trl-python ENV/bin/python [--pairs 32] [--json FILE]

The two archives are the same model (``examples/nlp/gpt/convert_hf_to_nemo.py``). Ours is the job that users start, in
one process; so is TRL's (`dpo_trl.py`). They run one after the other, ``--rounds`` times. A step is an update with all
pairs, the reference's log-probs included; each contender's first step of a round is not timed. As all pairs are in each
step, both must report the same losses, margins and gradient norms, which are shown.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import available_cores, json_path, positive_int, print_table, write_json

from nemo_style_aligner.arguments import HelpFormatter
from nemo_style_aligner.engine.text.tokenizer import load_tokenizer
from nemo_style_aligner.trainer.telemetry.metrics import read_metrics

BENCHMARKS = Path(__file__).parent
SCRIPT = BENCHMARKS.parent / "examples" / "nlp" / "gpt" / "train_gpt_dpo.py"
LEARNING_RATE, BETA, NAMES = 1e-6, 0.1, ("loss", "margin", "grad_norm")
WORDS = (
    "about after again also back been before being came come could day did down each even find first from "
    "give good great hand have help here high home into just keep kind know last left life like line "
    "little long look made make many may men might more most much must name never new next night now "
    "number off old only other our out over own part people place "
)


def main() -> None:
    args = parse_arguments()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_pairs(args, folder / "pairs.jsonl")
        steps: dict[str, list[dict[str, float]]] = {"ours": [], "TRL": []}
        for turn in range(args.rounds):
            steps["ours"] += own_steps(args, folder, turn)
            steps["TRL"] += trl_steps(args, folder)
    report(args, steps)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--nemo", type=Path, required=True, help="the model, .nemo")
    parser.add_argument("--hf", type=Path, required=True, help="the same model in Hugging Face's form")
    parser.add_argument("--trl-python", required=True, help="python of an environment with trl 1.16.0")
    parser.add_argument("--pairs", type=positive_int, default=32)
    parser.add_argument("--prompt-tokens", type=positive_int, default=64)
    parser.add_argument("--response-tokens", type=positive_int, default=64)
    parser.add_argument("--micro-batch", type=positive_int, default=8, help="pairs per pass, of both")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--steps", type=positive_int, default=3, help="in each round, the first of which is not timed")
    parser.add_argument("--rounds", type=positive_int, default=2)
    parser.add_argument("--json", type=json_path)
    args = parser.parse_args()
    if args.steps < 2:
        parser.error(f"--steps {args.steps}: give at least 2, of which the first is not timed")
    if args.pairs % args.micro_batch:
        parser.error(f"--pairs {args.pairs}: give a multiple of --micro-batch {args.micro_batch}")
    return args


def write_pairs(args: argparse.Namespace, path: Path) -> None:
    """Pairs of words that are one token each; SystemExit if the tokenizer has others. The last token is the EOS."""
    generator, tokenizer = random.Random(1), load_tokenizer(args.hf)

    def text(count: int) -> str:
        words = "".join(f" {generator.choice(WORDS.split())}" for _ in range(count))
        if len(tokenizer.text_to_ids(words)) != count:
            sys.exit(f"{args.hf}: its tokenizer does not have a token for each of the benchmark's words")
        return words

    with path.open("w") as file:
        for _ in range(args.pairs):
            prompt, chosen, rejected = map(text, (args.prompt_tokens, *[args.response_tokens - 1] * 2))
            file.write(json.dumps({"prompt": prompt, "chosen": chosen, "rejected": rejected}) + "\n")


def own_steps(args: argparse.Namespace, folder: Path, turn: int) -> list[dict[str, float]]:
    log_dir = folder / f"own{turn}"
    length = args.prompt_tokens + args.response_tokens
    overrides = [
        f"trainer.precision={'bf16' if args.dtype == 'bfloat16' else 32}",
        f"pretrained_checkpoint.restore_from_path={args.nemo}",
        f"model.data.data_prefix={{train: [{folder / 'pairs.jsonl'}]}}",
        *(f"exp_manager.explicit_log_dir={log_dir}", f"model.encoder_seq_length={length}"),
        *("model.data.append_eod=True", f"model.global_batch_size={args.pairs}"),
        *(f"model.micro_batch_size={args.micro_batch}", f"model.dpo.ref_policy_kl_penalty={BETA}"),
        *(f"model.optim.lr={LEARNING_RATE}", "model.optim.sched=null", "model.optim.betas=[0.9,0.98]"),
        *(f"trainer.dpo.max_epochs={args.steps}", "trainer.dpo.save_interval=0"),
        *("exp_manager.checkpoint_callback_params.monitor=null", "exp_manager.watchdog_minutes=null"),
        "exp_manager.checkpoint_callback_params.filename=at-{step}",
        "exp_manager.checkpoint_callback_params.save_nemo_on_train_end=False",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": str(available_cores())}
    subprocess.run([sys.executable, SCRIPT, *overrides], check=True, env=environment, stdout=subprocess.DEVNULL)
    metrics = read_metrics(log_dir)
    names = {"seconds": "train_step_time", "loss": "loss", "grad_norm": "grad_norm", "margin": "rewards_margin"}
    columns = {ours: [value for _, value in metrics[f"train/{name}"]] for ours, name in names.items()}
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def trl_steps(args: argparse.Namespace, folder: Path) -> list[dict[str, float]]:
    settings = {
        "threads": available_cores(),
        "dtype": args.dtype,
        "policy": str(args.hf),
        "steps": args.steps,
        "pairs": str(folder / "pairs.jsonl"),
        "output": str(folder / "trl"),
        "micro_batch": args.micro_batch,
        "lr": LEARNING_RATE,
        "beta": BETA,
    }
    (folder / "settings.json").write_text(json.dumps(settings))
    command = [args.trl_python, BENCHMARKS / "dpo_trl.py", folder / "settings.json"]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return [json.loads(line) for line in output.splitlines() if line.startswith("{") and '"seconds"' in line]


def report(args: argparse.Namespace, steps: dict[str, list[dict[str, float]]]) -> None:
    timed = {name: [step["seconds"] for n, step in enumerate(rows) if n % args.steps] for name, rows in steps.items()}
    medians = {name: statistics.median(seconds) for name, seconds in timed.items()}
    rows: list[list[Any]] = [
        [name, f"{medians[name]:.1f}", f"{min(timed[name]):.1f}-{max(timed[name]):.1f}"]
        + [
            " ".join(f"{step[key]:.4f}" for step in steps[name][: args.steps])
            for key in ("loss", "margin", "grad_norm")
        ]
        for name in steps
    ]
    print_table(["", "s per step", "range", "loss", "margin", "gradient norm"], rows)
    print(
        f"a step takes {medians['ours'] / medians['TRL']:.0%} of TRL's ({medians['TRL'] / medians['ours']:.1f} times)"
    )
    if args.json:
        write_json(args.json, {"steps": steps, "median_seconds": medians})


if __name__ == "__main__":
    main()
