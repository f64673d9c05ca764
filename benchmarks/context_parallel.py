"""How much longer a sequence fits into a rank with ``model.context_parallel_size``, by measured peaks of memory.

    python benchmarks/context_parallel.py [--sizes 1 2 4] [--lengths 2048 8192] [--json FILE]

SFT jobs as users start them, on as many processes as a sequence is shared by, with one sequence in each step, of either
length. The peak of rank 0 grows with the length by what a token costs a rank: how many tokens fit into what memory is
left goes with its inverse. The model is made from scratch (`init_gpt.py`), and computes in fp32.
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

from common import available_cores, json_path, positive_int, print_table, write_json

from nemo_style_aligner.arguments import HelpFormatter
from nemo_style_aligner.engine.text.tokenizer_training import train_bpe_tokenizer
from nemo_style_aligner.trainer.telemetry.metrics import read_metrics

SCRIPTS = Path(__file__).parents[1] / "examples" / "nlp" / "gpt"
SHAPE = {"num-layers": 8, "hidden-size": 384, "num-heads": 6, "num-query-groups": 2}
STEPS = 3  # the first is not counted: it makes Adam's moments


def main() -> None:
    args = parse_arguments()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder, max(args.lengths))
        steps = {
            size: {length: run(folder, size, length) for length in sorted(args.lengths)} for size in sorted(args.sizes)
        }
    report(steps)
    write_json(args.json, {"shape": SHAPE, "steps": steps})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--sizes", type=positive_int, nargs="+", default=[1, 2, 4], help="ranks that share a sequence")
    parser.add_argument("--lengths", type=positive_int, nargs=2, default=[2048, 8192], help="tokens, two lengths")
    parser.add_argument("--json", type=json_path)
    args = parser.parse_args()
    if len(set(args.lengths)) < 2 or 1 not in args.sizes:
        parser.error("give two different --lengths, and 1 among the --sizes")
    return args


def make_model(folder: Path, longest: int) -> None:
    """A tokenizer of digits and a model of random weights."""
    train_bpe_tokenizer(["0 1 2 3 4 5 6 7 8 9"] * 10, vocab_size=300, directory=str(folder / "tokenizer"))
    sizes = [part for name, value in SHAPE.items() for part in (f"--{name}", str(value))]
    command = [sys.executable, str(SCRIPTS / "init_gpt.py"), "--tokenizer", str(folder / "tokenizer")]
    command += ["--output", str(folder / "base.nemo"), "--max-length", str(longest), *sizes]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def run(folder: Path, size: int, length: int) -> dict[str, float]:
    """One job's GiB at the peak of a step, and seconds of a step, medians."""
    data, log_dir = folder / f"{length}.jsonl", folder / f"cp{size}-{length}"
    digits = random.Random(1)
    text = " ".join(digits.choice("0123456789") for _ in range(2 * length))  # longer: it is cut to the length
    data.write_text(json.dumps({"input": "0", "output": text}) + "\n")
    overrides = [
        *(f"trainer.devices={size}", "trainer.precision=32", f"model.context_parallel_size={size}"),
        *(f"trainer.sft.max_epochs={STEPS}", "trainer.sft.save_interval=0", "trainer.sft.val_check_interval=0"),
        *(f"model.restore_from_path={folder / 'base.nemo'}", f"exp_manager.explicit_log_dir={log_dir}"),
        *(f"model.data.train_ds.file_path={data}", f"model.data.train_ds.max_seq_length={length}"),
        *("model.global_batch_size=1", "model.micro_batch_size=1", "model.optim.sched=null"),
        *("exp_manager.checkpoint_callback_params.monitor=null", "exp_manager.watchdog_minutes=null"),
        *("exp_manager.checkpoint_callback_params.filename=at-{step}", f"model.encoder_seq_length={length}"),
        "exp_manager.checkpoint_callback_params.save_nemo_on_train_end=False",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": str(max(1, available_cores() // size))}
    command = [sys.executable, str(SCRIPTS / "train_gpt_sft.py"), *overrides]
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    metrics = read_metrics(log_dir)

    def median(name: str) -> float:
        return statistics.median([value for _, value in metrics[name]][1:])

    return {"peak_gib": median("memory/train_step_time_peak_gib"), "seconds": median("train/train_step_time")}


def report(steps: dict[int, dict[int, dict[str, float]]]) -> None:
    """Peaks, bytes a token and how many times as long a sequence fits as on one rank."""
    per_token = {}
    for size, by_length in steps.items():
        (short, first), (long, last) = sorted(by_length.items())
        per_token[size] = (last["peak_gib"] - first["peak_gib"]) * 2**20 / (long - short)
    lengths = sorted(steps[1])
    header = ["ranks a sequence", *(f"GiB at {length}" for length in lengths), "KiB a token", "times as long", "s"]
    rows = [
        [
            str(size),
            *(f"{by_length[length]['peak_gib']:.2f}" for length in lengths),
            f"{per_token[size]:.0f}",
            f"{per_token[1] / per_token[size]:.2f}",
            f"{by_length[lengths[-1]]['seconds']:.1f}",
        ]
        for size, by_length in steps.items()
    ]
    print_table(header, rows)


if __name__ == "__main__":
    main()
