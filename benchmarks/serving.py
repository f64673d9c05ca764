"""What the API costs: tokens a second that clients of `nsa serve` get, beside those of the bare engine.

    python benchmarks/serving.py [--model smollm2-135m] [--clients 1 8 32] [--rounds 3] [--json FILE]

The server is a process as users start it, its clients are threads of another; each sends one request after the other.
The bare engine, in this process, generates as many responses to the same prompts at the same time. Both take turns, so
that a noisy machine is as noisy to both. Responses are of one length. "stream" clients read server-sent events; answers
to "schema" clients are JSON objects, line by line, that conform to one: masks cost a token what these take longer.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from common import json_path, positive_int, print_table, work_folder, write_json
from model_files import prepare

from nemo_style_aligner.arguments import HelpFormatter
from nemo_style_aligner.engine.contract import GenerationRequest, SamplingParams
from nemo_style_aligner.engine.parallel.groups import single_process
from nemo_style_aligner.engine.text.tokenizer_training import train_bpe_tokenizer
from nemo_style_aligner.tools.serving.checkpoint import load_model
from nemo_style_aligner.trainer.launch.stop_signals import exit_on_sigterm

KEY = "sk-benchmark"
# Never at its end, so that all responses are of one length.
PERSONS = r"""start: (person "\n")+
person: %json {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"},
    "tags": {"type": "array", "items": {"enum": ["red", "green"]}}, "of": {"type": "object", "properties": {
    "street": {"type": "string"}}}}, "required": ["name", "age", "tags"], "additionalProperties": false}
"""
WAYS: dict[str, dict[str, object]] = {
    "whole": {"ignore_eos": True},
    "stream": {"ignore_eos": True, "stream": True},
    "schema": {"guided_grammar": PERSONS, "logit_bias": {"0": -100}},
}
READY_SECONDS = 180.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="a shape's name, or a Hugging Face directory")
    parser.add_argument("--precision", choices=("bf16", "32"), default="bf16")
    parser.add_argument("--clients", type=positive_int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=positive_int, default=64)
    parser.add_argument("--response-tokens", type=positive_int, default=128)
    parser.add_argument("--rounds", type=positive_int, default=3)
    parser.add_argument("--json", type=json_path)
    args = parser.parse_args()
    exit_on_sigterm()
    with work_folder(None) as folder, single_process():
        model = prepare(args.model, folder / "files", want_gguf=False).hf
        if not (model / "tokenizer.json").is_file():
            train_bpe_tokenizer(texts(), 32000, model)  # masks cost by the size of the vocabulary
        results = measure(args, model)
    rows = [
        (
            f"{clients}",
            kind,
            f"{row['tokens_per_second']:.0f}",
            f"{100 * row['of_bare']:.1f}%",
            f"{row['microseconds_more_than_whole']:.0f}" if kind == "schema" else "",
        )
        for clients, kinds in results.items()
        for kind, row in kinds.items()
    ]
    print(f"{args.model}, {args.precision}: medians of {args.rounds} rounds")
    print_table(("clients", "way", "tokens/s", "of the bare engine", "us/token for masks"), rows)
    write_json(args.json, {"settings": {key: str(value) for key, value in vars(args).items()}, "clients": results})


def measure(args: argparse.Namespace, model: Path) -> dict[str, dict[str, dict[str, float]]]:
    """For each number of clients and way to generate: tokens a second, and as a share of the bare engine's."""
    length, slots = args.prompt_tokens + args.response_tokens, max(args.clients)
    engine, _ = load_model(model, precision=args.precision, num_slots=slots, max_length=length)
    sampling = SamplingParams(max_new_tokens=args.response_tokens, ignore_eos=True)
    times: dict[tuple[int, str], list[float]] = {}
    with serving(model, args.precision, slots, length) as port, multiprocessing.get_context("spawn").Pool(1) as pool:
        for number in range(args.rounds + 1):  # the first one warms up
            for clients in args.clients:
                prompts = [prompt(args.prompt_tokens, number * 1000 + i) for i in range(clients)]
                started = time.monotonic()
                requests = [GenerationRequest(i, ids, i) for i, ids in enumerate(prompts)]
                assert len(list(engine.generate(requests, sampling))) == clients
                seconds = {"bare engine": time.monotonic() - started}
                for way in WAYS:
                    seconds[way] = pool.apply(ask_all, (port, prompts, args.response_tokens, way))
                for way, spent in seconds.items():
                    times.setdefault((clients, way), []).append(spent)
    results: dict[str, dict[str, dict[str, float]]] = {}
    for (clients, way), spent in times.items():
        bare, whole = times[clients, "bare engine"], times[clients, "whole"]
        results.setdefault(str(clients), {})[way] = {
            "tokens_per_second": clients * args.response_tokens / statistics.median(spent[1:]),
            "of_bare": statistics.median(b / s for b, s in zip(bare[1:], spent[1:], strict=True)),
            "microseconds_more_than_whole": 1e6
            * statistics.median(s - w for w, s in zip(whole[1:], spent[1:], strict=True))
            / (clients * args.response_tokens),
        }
    return results


def texts() -> list[str]:
    """This repository's sources and docs: a vocabulary as large as models have needs many words."""
    root = Path(__file__).parents[1]
    return [file.read_text() for kind in ("py", "md") for file in root.glob(f"[a-z]*/**/*.{kind}")]


def prompt(length: int, number: int) -> list[int]:
    """Token ids; no two prompts begin alike, so that none shares pages."""
    return [2 + (number * 7 + place * 13 + number // 200) % 250 for place in range(length)]


@contextlib.contextmanager
def serving(model: Path, precision: str, slots: int, length: int) -> Iterator[int]:
    """`nsa serve` as a process; its port."""
    command = [sys.executable, "-m", "nemo_style_aligner", "serve", str(model), "--port", "0"]
    command += ["--precision", precision, "--num-slots", str(slots), "--max-length", str(length)]
    with work_folder(None) as folder, (log_file := folder / "log").open("w") as log:
        environment = os.environ | {"NEMO_STYLE_ALIGNER_TOKEN": KEY}
        process = subprocess.Popen(command, stderr=log, env=environment)
        try:
            deadline = time.monotonic() + READY_SECONDS
            while not (found := re.search(r"ready: \S+:(\d+)/v1", log_file.read_text())):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the server has not started:\n{(folder / 'log').read_text()}")
                time.sleep(0.2)
            yield int(found[1])
        finally:
            process.terminate()
            process.wait(60)


def ask_all(port: int, prompts: list[list[int]], length: int, way: str) -> float:
    """The seconds until all clients, each a thread with a connection, have their responses."""
    failures: list[BaseException] = []
    begin = threading.Barrier(len(prompts) + 1)

    def client(ids: list[int]) -> None:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
            connection.connect()
            begin.wait()
            body = {"prompt": ids, "max_tokens": length, **WAYS[way]}
            fields = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(body), fields)
            answer = connection.getresponse()
            content = answer.read()
            assert answer.status == 200, content
            if way == "stream":
                assert content.endswith(b"data: [DONE]\n\n")
            else:
                assert json.loads(content)["usage"]["completion_tokens"] == length, content
            connection.close()
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=client, args=(ids,)) for ids in prompts]
    for thread in threads:
        thread.start()
    begin.wait()
    started = time.monotonic()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return time.monotonic() - started


if __name__ == "__main__":
    main()
