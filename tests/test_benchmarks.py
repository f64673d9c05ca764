"""The benchmarks, started as a user starts them, on a tiny model: they run, count right and write what they promise."""

from __future__ import annotations

import argparse
import concurrent.futures
import http.server
import importlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import urllib.request
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from job_processes import ROOT, Job, environment, run

from nemo_style_aligner.engine.architecture import ModelArchitecture

pytestmark = pytest.mark.long

TEST_PPO_STEP = bool(os.environ.get("TEST_PPO_STEP"))

SPREAD = {"median", "min", "max"}


Report = tuple[str, dict[str, Any]]  # what a benchmark printed, and its JSON
REFIT_CASES = ["same layout", "PP 2 to TP 2"]
ARGUMENTS = {
    "generation.py": [
        *("--model", "tiny", "--contenders", "embedded", "embedded-fp32", "hf-sorted", "hf-compiled"),
        *("--workloads", "2", "ragged", "--prompt-tokens", "8", "--new-tokens", "6", "--rounds", "1"),
        *("--ragged-requests", "5", "--ragged-prompts", "2", "9", "--ragged-lengths", "2", "12"),
        *("--floor-megabytes", "16", "--threads", "1"),
    ],
    "refit.py": ["--shapes", "tiny", "--rounds", "2", "--cases", *REFIT_CASES],
    "balance.py": [
        *("--shape", "tiny", "--workers", "2", "--requests", "10", "--lengths", "4", "24", "--slots", "2"),
        *("--rounds", "1"),
    ],
    "service.py": [
        *("--shape", "tiny", "--length", "16", "--batch-rows", "4", "--clients", "1", "8", "--seconds", "8"),
        *("--threads", "1", "--secret"),
    ],
    "training_pass.py": [
        *("--shape", "tiny", "--sequences", "6", "--prompts", "2", "9", "--responses", "2", "40", "--max-tokens", "32"),
        *("--rounds", "1", "--threads", "1", "--torch-layers", "--hugging-face", "1", "4"),
    ],
    "cpu_kernels.py": [
        *("--shape", "tiny", "--sequences", "3", "--prompts", "2", "9", "--responses", "2", "40"),
        *("--layers", "2", "--rounds", "2", "--threads", "1"),
    ],
    "memory.py": [
        *("--sequences", "8", "--precision", "32", "--threads", "1"),
        *("--cases", "packed", "selective", "full", "padded"),
    ],
    "context_parallel.py": ["--sizes", "1", "2", "--lengths", "256", "2048"],
    "lookup.py": [
        *("--model", "tiny", "--groups", "2", "--group", "2", "--slots", "8", "--new-tokens", "24", "--rounds", "2"),
        *("--dtype", "float32", "--temperature", "0.01"),
    ],
    "scaling.py": ["--parts", "queue"],
    "episodes.py": ["--model", "tiny", "--episodes", "8", "--slots", "2", "--seconds", "0.05", "--rounds", "1"],
    "work_queue.py": ["--workers", "8", "--ids", "64", "--batches", "1", "4", "--rounds", "1"],
    "growth.py": [
        *("--model", "tiny", "--models", "tiny", "--rollouts", "4", "8", "--lengths", "4", "--ranks", "1", "2"),
        *("--rounds", "1", "--micro-batch", "2"),
    ],
    "timelines.py": ["--base", "tiny:8:8", "--points", "tiny:8:16", "--placements", "tiny:8:8", "--rounds", "1"],
    "off_policy.py": [
        *("--model", "tiny", "--rollouts", "4", "--lengths", "2", "12", "--warm-up", "1", "--rounds", "2"),
        *("--micro-batch", "2"),
    ],
    "learning.py": [
        *("--variants", "default", "unpacked", "--seeds", "1", "2", "--max-operand", "59"),
        *("--base-steps", "3", "--base-tries", "1", "--sft-steps", "3", "--rm-steps", "4", "--ppo-steps", "2"),
    ],
    "ppo_step.py": [
        *("--model", "tiny", "--no-trl", "--workloads", "ragged", "--rollouts", "4", "--micro-batch", "2"),
        *("--ragged-prompts", "2", "9", "--ragged-lengths", "2", "12", "--rounds", "1", "--floor-megabytes", "16"),
        *("--contenders", "own", "own-engine", "trl"),
    ],
    "grpo_step.py": [
        *("--model", "tiny", "--no-trl", "--workloads", "ragged", "--rollouts", "4", "--group", "2"),
        *("--micro-batch", "2", "--ragged-prompts", "20", "30", "--ragged-lengths", "2", "12", "--rounds", "1"),
        *("--floor-megabytes", "16", "--kl", "0"),
    ],
    "batch_memory.py": ["--samples", "64", "--lengths", "4", "400", "--ranks", "2"],
}

REFUSED = [  # an option with a bad value, after what makes it bad if it is not so by itself
    "ppo_step.py --contenders trl --no-trl",
    "ppo_step.py --micro-batch 0",
    "grpo_step.py --group 1",
    "grpo_step.py --kl -1",
    "dpo_step.py --nemo a --hf b --trl-python c --steps 1",
    "ppo_step.py --warm-up -1",
    "generation.py --workloads foo",
    "generation.py --ragged-lengths 50 8",
    "refit.py --precision 16",
    "growth.py --rounds 0",
    "memory.py --responses 9 2",
    "service.py --seconds 0",
    "work_queue.py --batches 0",
    "balance.py --sleep nan",
    "learning.py --sft-errors 2",
    "cpu_kernels.py --max-tokens 512",
]

# They start jobs of their own, which takes minutes.
WITH_JOBS = ("ppo_step.py", "grpo_step.py", "growth.py", "off_policy.py", "learning.py", "timelines.py")
with_jobs = pytest.mark.skipif(not TEST_PPO_STEP, reason="starts jobs of its own: TEST_PPO_STEP=1 runs it")


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    """Those whose tests are to run, side by side: figures do not matter here, and most of their time is start-up."""
    tests = {item.name for item in request.session.items}
    chosen = {
        name: arguments
        for name, arguments in ARGUMENTS.items()
        if f"test_{Path(name).stem}" in tests and (name not in WITH_JOBS or TEST_PPO_STEP)
    }
    folders = [tmp_path_factory.mktemp("benchmark") for _ in chosen]
    with concurrent.futures.ThreadPoolExecutor(len(chosen)) as pool:
        return dict(zip(chosen, pool.map(benchmark, chosen, folders, chosen.values()), strict=True))


def benchmark(name: str, folder: Path, arguments: list[str]) -> Report:
    report = folder / "report.json"
    command = [sys.executable, str(ROOT / "benchmarks" / name), *arguments, "--json", str(report)]
    if name == "learning.py":
        command += ["--output", str(folder / "learning")]
    output = run(command, folder / "output.log", timeout=400)
    content = json.loads(report.read_text())
    assert content["machine"]["cores"] >= 1 and content["machine"]["versions"]["torch"]
    return output, content


@pytest.mark.parametrize("command", REFUSED)
def test_a_bad_value_ends_at_once(command: str) -> None:
    name, *arguments = command.split()
    option = [word for word in arguments if word.startswith("--")][-1]
    values = " ".join(arguments[arguments.index(option) + 1 :])
    words = [sys.executable, str(ROOT / "benchmarks" / name), *arguments]
    done = subprocess.run(words, capture_output=True, text=True, env=environment(), timeout=60)
    last_line = done.stderr.splitlines()[-1]
    assert done.returncode == 2 and option in last_line and values in last_line, done.stderr


def test_generation(reports: dict[str, Report]) -> None:
    output, report = reports["generation.py"]
    assert not report["failed"], output
    assert "cuda only" in report["skipped"]["hf-compiled"] and "skipped hf-compiled" in output
    assert report["rates"]["memory_bytes_per_second"] > 0
    assert report["rates"]["gemm_operations_per_second"].keys() == {"bfloat16", "float32"}
    uniform, ragged = report["workloads"]["batch 2"], report["workloads"]["ragged"]
    assert (uniform["requests"], uniform["prompt_tokens"], uniform["new_tokens"]) == (2, 16, 12)
    assert uniform["rows"].keys() == {"embedded", "embedded-fp32"}
    assert ragged["rows"].keys() == {"embedded", "embedded-fp32", "hf-sorted"}
    for workload in (uniform, ragged):
        assert workload["floor"]["tokens_per_second"] > 0
        for row in workload["rows"].values():
            assert row["tokens"] == workload["new_tokens"]
            assert row["tokens_per_second"].keys() == SPREAD
            assert row["tokens_per_second"]["median"] == pytest.approx(row["tokens"] / row["seconds"]["median"])
            assert 0 < row["fraction_of_floor"] < 1
            rate = row["tokens_per_second"]["median"]
            assert row["fraction_of_floor"] == pytest.approx(rate / workload["floor"]["tokens_per_second"])
            ours = workload["rows"]["embedded"]["tokens_per_second"]["median"]
            assert row["ours_is_times_faster"] == pytest.approx(ours / rate)
        assert workload["rows"]["embedded"]["agreement"]["share_of_tokens"] == 1
    for row in uniform["rows"].values():
        assert row["prefill_seconds"] > 0
        if (decoding := row["seconds"]["median"] - row["prefill_seconds"]) > 0:  # it need not be beside other jobs
            assert row["decode_tokens_per_second"] == pytest.approx((12 - 2) / decoding)
            assert row["decode_fraction_of_memory_rate"] > 0


def test_refit(reports: dict[str, Report]) -> None:
    output, report = reports["refit.py"]
    assert [result["case"] for result in report["results"]] == REFIT_CASES, output
    for result in report["results"]:
        assert result["recompilations"] == 0
        assert result["refit_seconds"].keys() == SPREAD and result["copy_seconds"]["min"] > 0
        refit, copy = result["refit_seconds"]["median"], result["copy_seconds"]["median"]
        assert result["ratio_to_copy"] == pytest.approx(refit / copy) and result["peak_extra_bytes"] >= 0
    assert report["results"][0]["bytes"] == 2 * report["results"][1]["bytes"] == 2 * report["results"][0]["parameters"]


def test_lookup(reports: dict[str, Report]) -> None:
    _, report = reports["lookup.py"]
    for made in report["rounds"]:
        assert made["plain"]["tokens"] == made["lookup"]["tokens"] and made["plain"]["guessed"] == 0
    last = report["rounds"][-1]
    assert 0 < last["lookup"]["held"] <= last["lookup"]["guessed"]
    assert last["lookup"]["passes"] < last["plain"]["passes"]


def test_context_parallel(reports: dict[str, Report]) -> None:
    _, report = reports["context_parallel.py"]
    grown = {size: of["2048"]["peak_gib"] - of["256"]["peak_gib"] for size, of in report["steps"].items()}
    assert 0 < grown["2"] < 0.8 * grown["1"]


def test_balance(reports: dict[str, Report]) -> None:
    output, report = reports["balance.py"]
    modes = [report["modes"][name] for name in ("work queue", "longest first", "static shards")]
    assert len({mode["tokens"] for mode in modes}) == 1 and modes[0]["tokens"] >= 10 * 4, output
    for mode in modes:
        assert len(mode["idle_share_by_worker"]) == 2 and all(0 <= share <= 1 for share in mode["idle_share_by_worker"])
        assert mode["idle_share"] == pytest.approx(sum(mode["idle_share_by_worker"]) / 2)
    walls = [mode["wall_seconds"]["median"] for mode in modes]
    for place, name in enumerate(("queue_is_times_faster", "longest_first_is_times_faster")):
        assert report["modes"][name]["median"] == pytest.approx(walls[2] / walls[place])


def test_scaling(reports: dict[str, Report]) -> None:
    printed, results = reports["scaling.py"]
    assert "The queue's makespan" in printed
    longest_first = [row["128 each, longest first"] for row in results["queue"]]
    assert len(longest_first) == 6 and all(float(cell.rstrip("%")) < 5 for cell in longest_first)


@with_jobs
def test_timelines(reports: dict[str, Report]) -> None:
    _, results = reports["timelines.py"]
    assert [line["point"] for line in results["points"]] == ["tiny:8:8", "tiny:8:16"]
    (placements,) = results["placements"]
    names = [line["placement"] for line in placements["tried"]]
    assert names == ["flatten", "interleave, one job", "interleave, two jobs", "separate"]
    assert {placements["recommended"], placements["fastest"]} <= {*names}
    phases = {"generate", "logprobs", "init_logprobs", "train", "step", "rest"}
    for line in (*results["points"], *placements["tried"]):
        assert set(line["measured"]) == set(line["predicted"]) == phases


def test_work_queue(reports: dict[str, Report]) -> None:
    output, report = reports["work_queue.py"]
    # One by one, every id is taken once, and every worker asks once in vain.
    assert report["batches"]["1"]["requests"] == 64 + 8, output
    assert "medians of 1 round\n" in output and "\n1 id " in output
    assert 64 / 4 + 8 <= report["batches"]["4"]["requests"] < 64 + 8
    for row in report["batches"].values():
        assert row["ids_per_second"].keys() == SPREAD and row["ids_per_second"]["min"] > 0
        assert 0 < row["latency_seconds"]["p50"]["median"] <= row["latency_seconds"]["p99"]["median"]


def test_episodes(reports: dict[str, Report]) -> None:
    output, report = reports["episodes.py"]
    assert report["needed"] == 8 * (64 + 3 * 16 + 3), output  # and the last token of each reply but the last
    assert 0 <= report["again_per_reply"] < 16 < report["context_per_reply"]
    assert report["ratio_busy"] > 0 and "episodes over single replies, whole: " in output


@with_jobs
def test_growth(reports: dict[str, Report]) -> None:
    output, report = reports["growth.py"]
    points = {(point["series"], point["rollouts"], point["ranks"]): point for point in report["points"]}
    assert points.keys() == {("rollouts", 4, 1), ("rollouts", 8, 1), ("length", 8, 1), ("model", 8, 1),
                             ("ranks", 8, 1), ("ranks", 8, 2)}, output  # fmt: skip
    for point in points.values():
        assert point["seconds"].keys() == SPREAD and point["phases"]["train_policy"] > 0 < point["phases"]["generate"]
        seconds = point["seconds"]["median"]
        assert point["size"] == (32 + 4 if point["series"] == "length" else point["size"])
        assert point["tokens_per_second"] == pytest.approx(point["rollouts"] * (32 + 4) / seconds)


@with_jobs
def test_off_policy(reports: dict[str, Report]) -> None:
    output, report = reports["off_policy.py"]
    found = report["arrangements"]
    ages = {"together": 0, "apart": 0, "ahead": 1}
    assert {name: found[name]["oldest"] for name in ages} == ages, output
    assert found.keys() - ages.keys() == {"in-flight-1", "in-flight-2", "in-flight-4"}
    assert all(0 < found[name]["staleness"] <= found[name]["oldest"] for name in found.keys() - ages.keys()), output
    for line in found.values():
        assert line["seconds"].keys() == SPREAD and line["phases"]["train_policy"] > 0
        assert line["times_faster"] == pytest.approx(line["tokens_per_second"] / found["together"]["tokens_per_second"])
    assert "rollout_wait" in found["ahead"]["phases"] and found["together"]["phases"]["generate"] > 0


@with_jobs
def test_learning(reports: dict[str, Report]) -> None:
    output, report = reports["learning.py"]
    for runs in report["variants"].values():
        assert [len(one["rewards"]) for one in runs] == [2, 2], output
        assert all(0 <= one["accuracy"] <= 1 for one in runs)
    first, second = report["variants"]["default"]
    assert first["rewards"] != second["rewards"], "two seeds and the same run"


@with_jobs
def test_ppo_step(reports: dict[str, Report]) -> None:
    output, report = reports["ppo_step.py"]
    assert "skipped" not in output and not report["skipped"] and list(report["workloads"]) == ["ragged"]
    ragged = report["workloads"]["ragged"]
    ours = ragged["ours"]
    # The jobs counted the tokens: forced lengths with both bounds among them, not what the model would have said.
    assert ragged["rollouts"] == 4 and 4 * 2 < ragged["new_tokens"] == ours["tokens"] < 4 * 12
    assert ours["metrics"]["response_lengths"] * 4 == ragged["prompt_tokens"] + ragged["new_tokens"]
    phases = {name: phase["seconds"]["median"] for name, phase in ours["phases"].items()}
    assert set(ragged["floor_seconds"]) < set(phases), output
    assert all(seconds > 0 for name, seconds in phases.items() if name in ragged["floor_seconds"])
    in_the_critic_job = phases["score"] + phases["train_critic"]
    assert sum(phases.values()) - in_the_critic_job == pytest.approx(ours["seconds"]["median"])
    assert ours["samples_per_second"]["median"] == pytest.approx(4 / ours["seconds"]["median"])
    assert 0 <= ours["share_of_waiting"] < 1 and 0 < ours["fraction_of_floor"] < 1
    assert 0.2 < ragged["padding_efficiency_of_trl"] <= ragged["padding_efficiency_if_padded"] <= 1
    peaks = ours["peak_bytes"]
    assert peaks.keys() == {"actor", "critic", "together"} and min(peaks.values()) > 100 * 2**20
    assert max(peaks["actor"], peaks["critic"]) < peaks["together"] <= peaks["actor"] + peaks["critic"]
    assert not report["failed"] and not ragged["failed"]
    computed_with = ours["computed_with"]
    assert int(computed_with["threads"]["actor"]) >= 1 <= int(computed_with["threads"]["critic"])
    assert "step" in computed_with["generation_step"] and computed_with["layer_kernels"]
    engine = ragged["ours_engine_logprobs"]
    assert "logprobs" not in engine["phases"]
    assert engine["floor_seconds"] <= ours["floor_seconds"]  # which counts a pass that is kept for training once


@with_jobs
def test_grpo_step(reports: dict[str, Report]) -> None:
    """One job, no critic, no reference; each sample of a group has a forced length of its own."""
    output, report = reports["grpo_step.py"]
    assert not report["failed"], output
    ragged = report["workloads"]["ragged"]
    ours = ragged["ours"]
    assert ragged["group"] == 2 and ragged["rollouts"] == 4 and ours["tokens"] == ragged["new_tokens"] > 2 * 4
    assert ours["metrics"]["response_lengths"] * 4 == ragged["prompt_tokens"] + ragged["new_tokens"]
    assert ragged["floor_seconds"].keys() == {"refit", "generate", "logprobs", "train_policy"} < ours["phases"].keys()
    assert not ours["phases"].keys() & {"score", "train_critic", "init_logprobs", "wait_for_critic"}
    assert sum(phase["seconds"]["median"] for phase in ours["phases"].values()) == pytest.approx(
        ours["seconds"]["median"]
    )
    assert ours["peak_bytes"].keys() == {"actor", "together"}
    assert ours["metrics"]["rewards/vowels"] == ours["metrics"]["rewards"] > 0


@with_jobs
def test_grpo_step_against_trl(tmp_path: Path) -> None:
    """Counts of both sides are checked in the benchmark: forced lengths, one for each sample of a group."""
    python = trl_python("1.16.0", "TRL_GRPO_PYTHON")
    arguments = [word for word in ARGUMENTS["grpo_step.py"] if word not in ("--no-trl", "--kl", "0")]
    arguments += ["--trl-micro-batch", "2", "--trl-python", python, "--trl-wait-policy", "PASSIVE"]
    output, report = benchmark("grpo_step.py", tmp_path, arguments)
    assert not report["failed"] and not report["skipped"], output
    ragged = report["workloads"]["ragged"]
    assert ragged["trl"]["tokens"] == ragged["ours"]["tokens"] and ragged["ours_is_times_faster"].keys() == SPREAD
    cpu = {name: ragged[name]["cpu_seconds"]["median"] for name in ("ours", "trl")}
    assert ragged["ours_takes_times_less_cpu"]["median"] == pytest.approx(cpu["trl"] / cpu["ours"])  # of one round
    assert {"generate", "score", "init_logprobs", "train"} < ragged["trl"]["phases"].keys()
    assert "init_logprobs" in ragged["ours"]["phases"] and ragged["ours"]["metrics"]["kl_loss"] >= 0


def test_batch_memory(reports: dict[str, Report]) -> None:
    output, report = reports["batch_memory.py"]
    held, responses = report["ranks"]["2"]["held"], report["tokens"] - 64 * 64
    share = (4 * report["tokens"] + 7 * 4 * responses) / 2  # token ids, and seven numbers of each response token
    assert share < held < 1.2 * share + 64 * 64 < report["padded_bytes"] / 4, output
    assert report["ranks"]["2"]["peak"] >= 0


def trl_python(version: str, variable: str) -> str:
    """An interpreter with this version of trl; without one, the test is skipped, with a warning."""
    python = os.environ.get(variable, sys.executable)
    script = "import importlib.metadata; print(importlib.metadata.version('trl'))"
    found = subprocess.run([python, "-c", script], capture_output=True, text=True).stdout.strip()
    if found != version:
        missing = f"{python} has trl {found or 'not at all'}, {version} is needed ({variable}=...)"
        warnings.warn(f"NOT TESTED against TRL: {missing}", stacklevel=1)
        pytest.skip(f"NOT TESTED against TRL: {missing}")
    return python


def test_no_module_hides_a_package_of_the_peers() -> None:
    """A script's folder comes first where Python looks: peers would import ours for what they can do without."""
    script = "import sys; sys.path.insert(0, sys.argv[1]); import transformers.integrations.hub_kernels, transformers; "
    script += "from transformers import GenerationMixin; print(*(m.__file__ for m in sys.modules.values() if "
    script += "getattr(m, '__file__', None)), sep='\\n')"
    folder = ROOT / "benchmarks"
    loaded = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True, check=True)
    assert str(folder) not in loaded.stdout and "hub_kernels" in loaded.stdout
    import_utils = importlib.import_module("transformers.utils.import_utils")
    optional = {name for name in dir(import_utils) if name.startswith("is_")}
    assert "is_kernels_available" in optional
    assert not [file for file in folder.glob("*.py") if f"is_{file.stem}_available" in optional]


@with_jobs
def test_ppo_step_against_trl(tmp_path: Path) -> None:
    """One at a time, on another seed's workload, with the engine's log-probs; TRL's settings tried out."""
    python = trl_python("1.12.0", "TRL_PYTHON")
    arguments = [
        *("--model", "tiny", "--trl-python", python, "--contenders", "own-engine", "trl", "--workloads", "ragged"),
        *("--rollouts", "2", "--micro-batch", "2", "--trl-micro-batch", "2", "--ragged-prompts", "2", "9"),
        *("--ragged-lengths", "2", "12", "--rounds", "2", "--warm-up", "0", "--floor-megabytes", "16"),
        *("--one-at-a-time", "--trl-tune", "--seed", "5"),
    ]
    output, report = benchmark("ppo_step.py", tmp_path, arguments)
    assert not report["failed"] and not report["skipped"], output
    ragged = report["workloads"]["ragged"]
    for side in (ragged["ours_engine_logprobs"], ragged["trl"]):
        assert side["rounds"] == 2 and side["tokens"] == ragged["new_tokens"] and side["peak_bytes"]["together"] > 2**20
    assert ragged["ours_engine_logprobs_is_times_faster"].keys() == SPREAD
    tried = ragged["trl_settings_tried"]
    best = min(tried, key=lambda one: one["seconds"])
    assert {one["setting"]["wait_policy"] for one in tried} == {None, "PASSIVE", "ACTIVE"}, tried
    assert ragged["trl"]["computed_with"] == best["setting"]


@with_jobs
def test_ppo_step_with_a_peer_that_is_killed(tmp_path: Path) -> None:
    """TRL gets smaller batches twice, then is reported as failed; ours go on, and the exit status says so."""
    peer = tmp_path / "python"
    peer.write_text('#!/bin/sh\nif [ "$1" = -c ]; then echo 1.12.0; else kill -KILL $$; fi\n')
    peer.chmod(0o755)
    file = tmp_path / "report.json"
    arguments = [word for word in ARGUMENTS["ppo_step.py"] if word not in ("--no-trl", "own-engine")]
    command = [sys.executable, str(ROOT / "benchmarks" / "ppo_step.py"), *arguments, "--trl-python", str(peer)]
    command += ["--trl-micro-batch", "2", "--json", str(file)]
    job = Job(command, tmp_path / "output.log")
    try:
        assert job.wait(400) == 1, job.describe()
    finally:
        job.kill()
    report = json.loads(file.read_text())
    assert report["failed"].keys() == {"ragged"} and "was killed" in report["failed"]["ragged"]["trl"]
    assert job.log.read_text().count("ran out of memory and goes on") == 2
    assert report["workloads"]["ragged"]["ours"]["rounds"] == 1 and "trl" not in report["workloads"]["ragged"]


def test_service(reports: dict[str, Report]) -> None:
    output, report = reports["service.py"]
    assert report["bare_seconds"].keys() == {"1", "2", "4"}, output
    one, eight = report["clients"]
    assert one["rows_per_batch"] == 1 and 1 < eight["rows_per_batch"] <= 4
    for entry in (one, eight):
        assert entry["requests"] > 0 and entry["requests_per_second"] > 0 and 0 <= entry["pauses"] < 1
        latency = entry["latency_seconds"]
        assert 0 < latency["p50"] <= latency["p95"] <= latency["p99"]


def test_memory(reports: dict[str, Report]) -> None:
    output, report = reports["memory.py"]
    assert list(report["cases"]) == ["packed", "selective", "full", "padded"], output
    for case, result in report["cases"].items():
        measured, predicted = result["measured"], result["predicted"]
        assert measured.keys() - {"update"} == predicted.keys()
        if case != "padded":  # the planner's formulas hold
            for phase in ("weights, gradients, Adam", "forward + backward"):
                assert predicted[phase] == pytest.approx(measured[phase], rel=0.1), output
        assert min(predicted.values()) > 0 and min(measured.values()) >= 0
    packed, padded = (report["cases"][case]["predicted"]["forward + backward"] for case in ("packed", "padded"))
    assert packed < padded


def test_cpu_kernels(reports: dict[str, Report]) -> None:
    output, report = reports["cpu_kernels.py"]
    assert len(report["lengths"]) == 3 and "torch takes" in output
    assert report["parts"].keys() == {"attention", "SwiGLU", "RMSNorm", "softmax of logits"}
    for by_library in report["parts"].values():
        assert list(by_library)[-1] == "torch" and len(by_library) > 1, output
        for measured in by_library.values():
            for kind in ("forward", "backward"):
                assert measured[kind]["seconds"].keys() == SPREAD and measured[kind]["seconds"]["min"] > 0
                assert measured[kind]["error"] < 0.02
    assert len(report["products"]) == 7
    for measured in report["products"].values():
        for by in ("ours", "torch"):
            assert measured[by]["fraction_of_gemm_rate"]["min"] > 0


def test_training_pass(reports: dict[str, Report]) -> None:
    output, report = reports["training_pass.py"]
    packed, padded = report["passes"]["packed"], report["passes"]["padded"]
    assert report["data_parallel_balance"]["2"]["in_order"] <= report["data_parallel_balance"]["2"]["divided"] <= 1
    assert packed["padding_efficiency"] == 1 > padded["padding_efficiency"], output
    assert padded["computed_tokens"] > packed["computed_tokens"] == report["tokens"] - 6  # no last token is an input
    peers = [report["passes"][f"hugging face, {rows} rows"] for rows in (1, 4)]
    assert [peer["micro_batches"] for peer in peers] == [6, 2]
    assert peers[0]["computed_tokens"] == report["tokens"]  # of single rows: no padding
    assert report["tokens"] < peers[1]["computed_tokens"] < padded["computed_tokens"]  # sorted by length
    for result in (packed, padded, *peers, report["passes"]["packed, torch's layers"]):
        for kind in ("training", "logprobs"):
            assert result[kind]["seconds"].keys() == result[kind]["fraction_of_gemm_rate"].keys() == SPREAD
            assert result[kind]["tokens_per_second"] == pytest.approx(
                report["tokens"] / result[kind]["seconds"]["median"]
            )
    assert report["head_memory_bytes"]["logits"] == 4 * report["scored_tokens"] * 512
    assert "leaked" not in output


@pytest.fixture
def benchmark_module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """A function that imports a module of the benchmarks; GPUs that it hides are visible again after the test."""
    monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module


def test_the_critics_metrics_are_not_asked_of_a_proxy(
    benchmark_module: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Metrics(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'aligner_server_command_seconds_sum{command="infer"} 2.5\n')

    contenders = benchmark_module("ppo_contenders")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):  # of conftest.py
        monkeypatch.delenv(name)
    monkeypatch.setattr(urllib.request, "_opener", None)  # the default one, which keeps what it knows of proxies
    with http.server.HTTPServer(("127.0.0.1", 0), Metrics) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        jobs = contenders.OwnJobs.__new__(contenders.OwnJobs)
        jobs._port = server.server_port
        jobs._setting = SimpleNamespace(environment={contenders.TOKEN_VARIABLE: "secret"})
        assert jobs._critic_seconds() == {"infer": 2.5}


def test_a_contender_is_ended_with_the_benchmark(tmp_path: Path) -> None:
    """It sends the signal itself."""
    code = f"""
import os, pathlib, sys, time
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
from ppo_contenders import start
from nemo_style_aligner.trainer.launch.stop_signals import exit_on_sigterm
exit_on_sigterm()
command = "echo $$ > '{tmp_path}/pid'; sleep 1; kill -TERM $PPID; exec sleep 300"
start(["sh", "-c", command], pathlib.Path(os.devnull), dict(os.environ))
time.sleep(100)
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=120, check=False, cwd=ROOT)
    assert done.returncode == 143
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    benchmark_module: Callable[[str], Any], tmp_path: Path
) -> None:
    json_path = benchmark_module("common").json_path
    for bad in (str(tmp_path), "/proc/figures/growth.json"):
        with pytest.raises(argparse.ArgumentTypeError, match=re.escape(bad)):
            json_path(bad)
    assert json_path(str(tmp_path / "new" / "growth.json")).parent.is_dir()


def test_a_plot_of_an_unknown_format_is_refused_before_anything_is_measured(
    benchmark_module: Callable[[str], Any], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    plot_path = benchmark_module("common").plot_path
    for bad, reason in ((tmp_path / "growth.json", "must end with one of .*, svg, "), (tmp_path, "cannot be written")):
        with pytest.raises(argparse.ArgumentTypeError, match=f"{re.escape(str(bad))}.*{reason}"):
            plot_path(str(bad))
    assert plot_path(str(tmp_path / "new" / "growth.SVG")).parent.is_dir()


def test_memory_names_a_case_whose_process_is_killed(
    benchmark_module: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = benchmark_module("memory")
    monkeypatch.setattr(memory, "exit_on_sigterm", lambda: None)  # a handler would stay
    monkeypatch.setattr(memory, "run_case", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    monkeypatch.setattr(sys, "argv", ["memory.py", "--cases", "selective"])
    with pytest.raises(SystemExit, match=r"selective: .* status -9 .*smaller"):
        memory.main()


def test_refit_sets_the_largest_model_against_the_smallest(benchmark_module: Callable[[str], Any]) -> None:
    small, large = (
        {"case": "a", "parameters": n, "bytes": 2 * n, "refit_seconds": {"median": n / 10}, "peak_extra_bytes": extra}
        for n, extra in ((10, 0), (40, 26_000_000))
    )
    growth = benchmark_module("refit").compare_sizes([large, small])
    assert growth == {"a": {"bytes": 4.0, "seconds": 4.0, "more_extra_bytes": 26_000_000}}


def test_no_pass_of_the_service_is_larger_than_the_bare_ones(benchmark_module: Callable[[str], Any]) -> None:
    bare_sizes = benchmark_module("service").bare_sizes
    assert bare_sizes(rows=1, batch_rows=16) == [1, 8, 16]
    assert bare_sizes(rows=4, batch_rows=2) == [1, 2, 4]


def test_what_ppo_step_is_asked_twice_is_measured_once(
    benchmark_module: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--contenders", "own", "trl", "own", "--workloads", "fixed", "fixed"]
    monkeypatch.setattr(sys, "argv", ["ppo_step.py", *options])
    args = benchmark_module("ppo_step").parse_arguments()
    assert (args.contenders, args.workloads) == (["own", "trl"], ["fixed"])


def test_progress_and_settings_are_in_words(benchmark_module: Callable[[str], Any]) -> None:
    point = benchmark_module("growth").Point(rollouts=8, length=64, model="30m", ranks=1)
    assert f"{point}: {benchmark_module('common').in_seconds([1.234, 2.0])}" == (
        "30m, 8 rollouts of 64 tokens, 1 rank: 1.23 2.00 s"
    )
    facts = {"threads": {"actor": "2", "critic": "1"}, "micro_batch": 8, "wait_policy": None}
    assert benchmark_module("ppo_report").in_words(facts) == "threads 2 (actor) and 1 (critic), micro batch 8"


def test_balance_reports_medians_of_the_rounds(benchmark_module: Callable[[str], Any]) -> None:
    balance, busy = benchmark_module("balance"), {1: (1.0, 0.8), 2: (1.0, 0.8), 3: (1.0, 0.2)}
    walls = {"work queue": [10.0, 10.0, 60.0], "longest first": [8.0, 8.0, 40.0], "static shards": [10.0, 20.0, 80.0]}
    found = [
        {"mode": m, "round": r, "worker": w, "wall_seconds": walls[m][r - 1], "busy_seconds": walls[m][r - 1] * share,
         "tokens": 6}
        for m in balance.MODES for r, by_worker in busy.items() for w, share in enumerate(by_worker)
    ]  # fmt: skip
    results = balance.summarise(found, [[0]] + [[4, 8]] * 3)
    for mode in balance.MODES:
        assert results[mode]["idle_share_by_worker"] == pytest.approx([0.0, 0.2])
        assert results[mode]["idle_share"] == pytest.approx(0.1)
    # Of the rounds' ratios (1, 2 and 4/3), not of medians over rounds that have other lengths (2).
    assert results["queue_is_times_faster"] == pytest.approx({"median": 80 / 60, "min": 1.0, "max": 2.0})


def test_a_benchmark_does_not_wait_for_the_answer_of_a_process_that_has_failed(
    benchmark_module: Callable[[str], Any],
) -> None:
    common, answers = benchmark_module("common"), queue.Queue[str]()
    running, ended, failed = (SimpleNamespace(exitcode=status) for status in (None, 0, -signal.SIGKILL))
    answers.put("of a process that failed later")
    assert common.next_answer(answers, [running, failed], 60) == "of a process that failed later"
    with pytest.raises(SystemExit, match="has failed"):
        common.next_answer(answers, [running, ended, failed], 60)
    with pytest.raises(SystemExit, match="not answered within 0 s"):
        common.next_answer(answers, [running, ended], 0)


def test_the_optimizers_first_step_does_not_count(
    benchmark_module: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    training_pass, clock = benchmark_module("training_pass"), iter([0, 9, 10, 11, 20, 22])  # of steps of 9, 1 and 2 s
    monkeypatch.setattr(training_pass, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert training_pass.optimizer_seconds(SimpleNamespace(step=lambda *_: None), rounds=2) == [1, 2]


def test_a_model_that_is_not_there(benchmark_module: Callable[[str], Any], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--model 31m: there is no such file or directory, nor is it one of tiny, 30m"):
        benchmark_module("model_files").prepare("31m", tmp_path, want_gguf=False)


@pytest.mark.parametrize("name", ["model", "model.gguf", "model.nemo"])
def test_a_model_that_cannot_be_read(benchmark_module: Callable[[str], Any], tmp_path: Path, name: str) -> None:
    model = tmp_path / name
    if model.suffix:
        model.write_text("nothing")
    else:
        model.mkdir()
    with pytest.raises(SystemExit, match=re.escape(f"--model {model}: {model} ")):
        benchmark_module("model_files").prepare(str(model), tmp_path / "made", want_gguf=False)


def test_floors_and_ratios_are_those_of_the_documentation(benchmark_module: Callable[[str], Any]) -> None:
    """Counted by hand for a layer of 2 heads of 4 channels (one for keys), 16 units and 10 tokens."""
    common, report = benchmark_module("common"), benchmark_module("ppo_report")
    a = ModelArchitecture(
        num_layers=1, hidden_size=8, ffn_hidden_size=16, num_attention_heads=2, num_query_groups=1, vocab_size=10,
        tied_embeddings=True,
    )  # fmt: skip
    body = 8 * (8 + 2 * 4) + 8 * 8 + 3 * 8 * 16 + 3 * 8  # q, k, v; output; gate, up, down; norms
    pair = 2 * 2 * 8  # a product with a key and one with a value, for 8 channels
    prompts, responses = [3, 2], [1, 3]

    slow_memory = common.MachineRates(1.0, {"bfloat16": 1e30, "float32": 1.0})
    floor = common.generation_floor(a, prompts, responses, slow_memory)
    # The second response's other two tokens: the prompt and what came before, keys and values of 4 channels each.
    assert floor.prefill_seconds == 2 * (body + 80)
    assert floor.decode_seconds == floor.decode_bytes == 2 * (2 * (body + 80) + 8 * (3 + 4))

    slow_products = common.MachineRates(1e30, {"bfloat16": 1.0, "float32": 0.5})
    floor = common.generation_floor(a, prompts, responses, slow_products)
    assert floor.prefill_seconds == 2 * body * 5 + 2 * 80 * 2 + pair * (6 + 3)
    assert floor.decode_seconds == 2 * (2 * body + 2 * 80) + pair * (3 + 4)
    phases = report.phase_floors(a, [[1, 2, 3], [4, 5]], responses, slow_products, "bfloat16")
    values = 2 * body * 9 + pair * (10 + 15)  # sequences of 4 and 5 tokens
    logprobs = values + 2 * 80 * 4
    expected = {"score": 2 * values, "logprobs": logprobs, "init_logprobs": logprobs, "train_policy": 2 * logprobs,
                "train_critic": 2 * values}  # fmt: skip
    assert {phase: phases[phase] for phase in expected} == pytest.approx(expected)
    together = report.phase_floors(a, [[4, 5]] * 2, responses, slow_products, "bfloat16")
    apart = report.phase_floors(a, [[4, 5], [6, 7]], responses, slow_products, "bfloat16")
    prompt = 2 * body * 2 + pair * 3
    assert apart["logprobs"] - together["logprobs"] == pytest.approx(prompt)
    assert apart["generate"] - together["generate"] == pytest.approx(prompt + 2 * 80)

    def steps(*seconds: float) -> dict[int, Any]:
        return {number: SimpleNamespace(seconds=one) for number, one in enumerate(seconds)}

    assert report.ratios(steps(2.0, 4.0, 1.0), steps(6.0, 6.0)) == {"median": 2.25, "min": 1.5, "max": 3.0}


def test_decoding_is_not_rated_by_a_time_that_is_none(benchmark_module: Callable[[str], Any]) -> None:
    generation, common = benchmark_module("generation"), benchmark_module("common")
    workload = generation.Workload("batch 2", prompts=[[1] * 8] * 2, lengths=[6, 6])
    rates = common.MachineRates(memory=1e9, gemm={})
    floor = common.Floor(prefill_seconds=0.5, decode_seconds=1.0, decode_bytes=1e9)
    figures = generation.decode_figures(workload, 5.0, 1.0, floor, rates)
    assert figures == {
        "prefill_seconds": 1.0,
        "decode_tokens_per_second": 2.5,
        "decode_fraction_of_floor": 0.25,
        "decode_fraction_of_memory_rate": 0.25,
    }
    for prefill in (5.0, 6.0):
        assert generation.decode_figures(workload, 5.0, prefill, floor, rates) == {"prefill_seconds": prefill}
    assert generation.decode_figures(workload.cut(1), 5.0, 4.0, floor, rates) == {"prefill_seconds": 4.0}


def test_growth_keeps_what_is_measured_when_a_later_setting_fails(
    benchmark_module: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    growth = benchmark_module("growth")

    def measure(point: Any, *_: Any) -> Any:
        if point.rollouts == 32:
            raise SystemExit("the critic was killed")
        return growth.Measured([point.rollouts / 4], {"generate": 1.0}, 10**6)

    monkeypatch.setattr(growth, "measure", measure)
    monkeypatch.setattr(growth, "make_models", lambda *_: None)
    monkeypatch.setattr(growth, "exit_on_sigterm", lambda: None)  # a handler would stay
    words = ["growth.py", "--rollouts", "8", "16", "32", "--work-dir", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*words, "--json", str(tmp_path / "g.json")])
    with pytest.raises(SystemExit, match="killed"):
        growth.main()
    points = json.loads((tmp_path / "g.json").read_text())["points"]
    # The one of 16 rollouts, with the default length and model, is in every series.
    assert [(p["series"], p["rollouts"], p["seconds"]["median"]) for p in points] == [
        ("rollouts", 8, 2.0), ("rollouts", 16, 4.0), ("length", 16, 4.0), ("model", 16, 4.0), ("ranks", 16, 4.0),
    ]  # fmt: skip
    assert growth.exponents(points[:2]) == [None, 1.0]


def test_learning_reuses_nothing_of_other_options(
    benchmark_module: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    learning = benchmark_module("learning")
    made: list[Path] = []

    def train_reward_model(demo: Any, *_: Any) -> None:
        made.append(demo.directory / "reward_model" / "checkpoints" / "megatron_gpt.nemo")
        made[-1].parent.mkdir(parents=True)
        made[-1].touch()

    monkeypatch.setattr(learning.run_demo, "make_base_model", lambda *_: None)
    monkeypatch.setattr(learning.run_demo, "train_sft", lambda *_: None)
    monkeypatch.setattr(learning.run_demo, "train_reward_model", train_reward_model)

    def prepare(*options: str) -> Path:
        monkeypatch.setattr(sys, "argv", ["learning.py", "--output", str(tmp_path / "learning"), *options])
        return learning.prepare(learning.parse_arguments())[2]

    assert prepare("--rm-steps", "5") == prepare("--rm-steps", "5", "--seeds", "4") == made[0] and len(made) == 1
    with pytest.raises(SystemExit, match="made with another --max-operand, --rm-steps: name another --output"):
        prepare("--max-operand", "59")
    assert made[0].exists()


def test_benchmarks_of_passes_see_the_gpu() -> None:
    """`cpu_only` hides it at once from whoever imports it, by whatever way."""
    script = "import os, sys; import training_pass, memory; sys.exit('CUDA_VISIBLE_DEVICES' in os.environ)"
    visible = {name: value for name, value in environment().items() if name != "CUDA_VISIBLE_DEVICES"}
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT / "benchmarks", env=visible).returncode == 0
