"""Tokens per second of the embedded engine, the megatron baseline and Hugging Face `generate`, in one run.

    python benchmarks/generation.py [--model policy.nemo] [--requests 32] [--slots 16] [--new-tokens 64] [--json FILE]

Without --model the weights are random, in SmolLM2-135M's shape. Prompts are ragged; every response has the same
length. The engines take turns, and each figure is the median of its rounds: compare the ratios, not the figures.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

from nemo_style_aligner.architecture import ModelArchitecture
from nemo_style_aligner.checkpoints.nemo_archive import load_nemo_config, load_nemo_weights
from nemo_style_aligner.generation.embedded.engine import EmbeddedEngine
from nemo_style_aligner.generation.engine import GenerationEngine, GenerationRequest, SamplingParams
from nemo_style_aligner.generation.megatron import MegatronEngine
from nemo_style_aligner.models.gpt import MegatronModel, build_model, parse_precision
from nemo_style_aligner.parallel.groups import device, initialize_model_parallel, initialize_single_process
from nemo_style_aligner.weights.huggingface import hf_config
from nemo_style_aligner.weights.stream import export_weights

SMOLLM2_135M = ModelArchitecture(
    num_layers=30,
    hidden_size=576,
    ffn_hidden_size=1536,
    num_attention_heads=9,
    num_query_groups=3,
    vocab_size=49152,
    tied_embeddings=True,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=(16, 128), help="shortest and longest prompt")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    initialize_single_process()
    initialize_model_parallel(1, 1, 1)
    model = make_model(args.model, parse_precision(args.precision))
    requests = make_requests(args, model.architecture.vocab_size)
    sampling = SamplingParams(max_new_tokens=args.new_tokens, min_new_tokens=args.new_tokens, use_greedy=True)
    options = {
        "num_slots": args.slots,
        "max_sequence_length": args.prompt_tokens[1] + args.new_tokens,
        "eos_id": 0,
    }
    embedded = EmbeddedEngine(model.architecture, dtype=model.config.params_dtype, device=device(), **options)
    contenders: dict[str, Callable[[], None]] = {
        "embedded": engine_run(embedded, model, requests, sampling),
        "megatron baseline": engine_run(MegatronEngine(model, **options), model, requests, sampling),
        "Hugging Face generate": hugging_face_run(model, requests, args.slots, args.new_tokens),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(args.rounds + 1):  # the first round warms up
        for name, run in contenders.items():
            started = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - started)
    report(args, seconds)
    dist.destroy_process_group()


def make_model(path: Path | None, dtype: torch.dtype) -> MegatronModel:
    if path is None:
        return build_model(SMOLLM2_135M, {}, dtype, trainable=False)
    model = build_model(ModelArchitecture.from_nemo_config(load_nemo_config(path)), {}, dtype, trainable=False)
    load_nemo_weights(path, model)
    return model


def make_requests(args: argparse.Namespace, vocab_size: int) -> list[GenerationRequest]:
    generator = torch.Generator().manual_seed(1)
    low, high = args.prompt_tokens
    lengths = torch.randint(low, high + 1, (args.requests,), generator=generator).tolist()
    prompts = [torch.randint(1, vocab_size, (n,), generator=generator).tolist() for n in lengths]
    return [GenerationRequest(i, prompt) for i, prompt in enumerate(prompts)]


def engine_run(
    engine: GenerationEngine, model: MegatronModel, requests: list[GenerationRequest], sampling: SamplingParams
) -> Callable[[], None]:
    engine.build()
    engine.refit(export_weights(model), 0)

    def run() -> None:
        assert len(list(engine.generate(requests, sampling))) == len(requests)

    return run


def hugging_face_run(
    model: MegatronModel, requests: list[GenerationRequest], batch_size: int, new_tokens: int
) -> Callable[[], None]:
    config = transformers.AutoConfig.for_model(**hf_config(model.architecture, model.config.params_dtype))
    reference = transformers.AutoModelForCausalLM.from_config(config).to(device(), model.config.params_dtype).eval()
    reference.load_state_dict(dict(export_weights(model)), strict=False)

    def run() -> None:
        for start in range(0, len(requests), batch_size):
            prompts = [torch.tensor(r.prompt_ids) for r in requests[start : start + batch_size]]
            ids = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True, padding_side="left").to(device())
            reference.generate(
                ids,
                attention_mask=(ids != 0).long(),
                do_sample=False,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
                pad_token_id=0,
                eos_token_id=0,
            )

    return run


def report(args: argparse.Namespace, seconds: dict[str, list[float]]) -> None:
    tokens = args.requests * args.new_tokens
    ours = statistics.median(seconds["embedded"][1:])
    rows = {}
    for name, measured in seconds.items():
        rounds = sorted(measured[1:])
        rows[name] = {
            "tokens_per_second": tokens / statistics.median(rounds),
            "slowest": tokens / rounds[-1],
            "fastest": tokens / rounds[0],
            "embedded_is_times_faster": statistics.median(rounds) / ours,
        }
    print(f"{'':24}{'tokens/s':>10}{'(slowest - fastest)':>22}{'embedded is':>14}")
    for name, row in rows.items():
        spread = f"({row['slowest']:.0f} - {row['fastest']:.0f})"
        print(f"{name:24}{row['tokens_per_second']:10.0f}{spread:>22}{row['embedded_is_times_faster']:12.2f} x")
    if args.json is not None:
        args.json.write_text(
            json.dumps({"settings": {k: str(v) for k, v in vars(args).items()}, "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
