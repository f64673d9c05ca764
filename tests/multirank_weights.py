"""Run by `test_weights.py`: weights in and out of sharded models, and into engines.

``python multirank_weights.py <tp>x<pp> ...``

Reshapes one world of ranks into several tensor x pipeline x data layouts, so that start-up is paid once.
Prints one line per check; any rank that fails ends the run.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import fork_ranks
from small_models import TensorSource

from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.contract import GenerationRequest, GenerationResult, SamplingParams
from nemo_style_aligner.engine.embedded.engine import EmbeddedEngine
from nemo_style_aligner.engine.parallel.agreement import OtherRankError, result_on_every_rank
from nemo_style_aligner.engine.parallel.groups import (
    ParallelLayout,
    all_gather_rows,
    initialize_model_parallel,
    neighbour_group,
)
from nemo_style_aligner.engine.rope import RopeScaling
from nemo_style_aligner.engine.shard import TensorParallel
from nemo_style_aligner.engine.weights import shared_buckets as shared_buckets_module
from nemo_style_aligner.engine.weights.layout import hf_tensors, weight_layout
from nemo_style_aligner.engine.weights.shared_buckets import shared_buckets
from nemo_style_aligner.engine.weights.stream import export_weights, import_weights, lendable_weights
from nemo_style_aligner.kinds import StepChoice
from nemo_style_aligner.trainer.config.loading import load_defaults
from nemo_style_aligner.trainer.config.schema import PPOActor
from nemo_style_aligner.trainer.models.gpt import MegatronModel, build_model
from nemo_style_aligner.trainer.models.heads import RewardHeadConfig
from nemo_style_aligner.trainer.models.packing import MicroBatching
from nemo_style_aligner.trainer.models.pipeline import Scoring, Tokens, forward, train_step
from nemo_style_aligner.trainer.rl.rollouts.setup import training_group

RANKS = 4
BASE = {
    "num_layers": 4,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 8,
    "num_query_groups": 2,
    "vocab_size": 101,
    "max_position_embeddings": 64,
    "init_method_std": 0.2,
}
ARCHITECTURES = {
    "llama": ModelArchitecture(**BASE),
    "tied": ModelArchitecture(
        **BASE, tied_embeddings=True, kv_channels=8, no_rope_layers=(1, 2), rope_scaling=RopeScaling("yarn", 4.0, 8),
        softmax_scale=0.3, embedding_multiplier=3.0, residual_multiplier=0.5, logits_scaling=1.5,
    ),
    "qwen": ModelArchitecture(**BASE, qkv_bias=True, qk_layernorm=True),
    "gpt": ModelArchitecture(**BASE, bias=True, gated=False, activation="gelu", normalization="layernorm"),
    "olmo": ModelArchitecture(**BASE, layer_norms="after", qk_layernorm=True, qk_norm_over_heads=True),
    "gemma": ModelArchitecture(
        **BASE, layer_norms="both", normalization="rmsnorm1p", activation="gelu-tanh", softmax_scale=0.3,
        attn_logit_softcapping=2.0, final_logit_softcapping=3.0, embedding_multiplier=32**0.5, tied_embeddings=True,
    ),
    "sinks": ModelArchitecture(
        **BASE, attention_sinks=True, sliding_window=5, windowed_layers=(0, 2), local_rotary_base=50.0,
    ),
}  # fmt: skip
MODEL_CFG = {"make_vocab_size_divisible_by": 8}
# Training layout -> model -> ranks of the engines that get its weights; 4 are more than there are key heads.
ENGINE_SIZES = {
    (1, 1): {"llama": (2, 4), "tied": (4,), "gemma": (2,)},
    (2, 1): {"gpt": (2,), "sinks": (2,)},
    (4, 1): {"qwen": (4,), "olmo": (2, 4)},
    (2, 2): {"llama": (2,), "tied": (2,)},
}
TOKENS = torch.arange(24).reshape(2, 12) * 5 % 101


def random_weights(architecture: ModelArchitecture, num_attributes: int = 0) -> dict[str, torch.Tensor]:
    """The same values on every rank, in bf16's precision so that both dtypes hold them exactly."""
    generator = torch.Generator().manual_seed(7)
    tensors = hf_tensors(weight_layout(architecture, num_attributes=num_attributes))
    return {
        name: (torch.randn(part.shape, generator=generator) * 0.2).bfloat16().float() for name, part in tensors.items()
    }


def check(condition: bool, what: str) -> None:
    if not condition:
        raise AssertionError(f"rank {dist.get_rank()}: {what}")


def logits(model) -> torch.Tensor:
    if model.layout.tp_size > 1:
        from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region as gather
    else:
        gather = torch.nn.Identity()
    return forward(
        model,
        Tokens(TOKENS),
        torch.ones_like(TOKENS, dtype=torch.bool),
        MicroBatching(2),
        lambda out, _: gather(out)[..., :101].float(),
        (12, 101),
    )


def round_trip(name: str, dtype: torch.dtype, bucket_bytes: int, expected: dict[str, torch.Tensor]) -> None:
    architecture = ARCHITECTURES[name]
    weights = random_weights(architecture)
    model = build_model(architecture, MODEL_CFG, dtype, trainable=False)
    import_weights(model, TensorSource(weights))
    streamed = dict(export_weights(model, bucket_bytes))
    check(list(streamed) == list(weights), f"{name}: names or order differ")
    for key, tensor in streamed.items():
        check(tensor.dtype == dtype, f"{name}: {key} is {tensor.dtype}")
        check(torch.equal(tensor.float(), weights[key]), f"{name}: {key} differs")
    shared = {key: tensor.clone() for key, tensor in export_weights(model, bucket_bytes, transient=True)}
    check(shared.keys() == streamed.keys(), f"{name}: names differ in shared memory")
    check(all(torch.equal(shared[key], streamed[key]) for key in shared), f"{name}: values differ in shared memory")
    other = build_model(architecture, MODEL_CFG, dtype, trainable=False)
    import_weights(other, TensorSource(streamed))
    for (key, a), (_, b) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        check(torch.equal(a, b), f"{name}: local {key} differs after import")
    if dtype == torch.float32:
        result = logits(model)
        expected.setdefault(name, result)
        difference = (result - expected[name]).abs().max().item()
        check(difference < 2e-5, f"{name}: logits differ by {difference}")


def generation(name: str, sizes: tuple[int, ...], expected: dict[str, list[GenerationResult]]) -> None:
    """From this training layout to engines over ``sizes`` ranks: the same responses as on one.

    Engines cut as the model view its weights: all but the vocabulary, which is padded to other rows per rank, and q, k
    and v where there are more ranks than key heads, norms over all heads.
    """
    architecture = ARCHITECTURES[name]
    model = build_model(architecture, MODEL_CFG, torch.float32, trainable=False)
    import_weights(model, TensorSource(random_weights(architecture)))
    length = 24 if name == "llama" else 5
    penalty = 1.1 if name == "llama" else 1.0  # with which nothing is guessed
    params = SamplingParams(
        max_new_tokens=length, min_new_tokens=length, temperature=0.9, repetition_penalty=penalty, seed=5
    )
    requests = [GenerationRequest(i, [(7 * i + 3 * j) % 101 for j in range(1 + 9 * (i % 3))], i) for i in range(4)]
    layout = model.layout
    for size in (1, *sizes):
        rank, lends = dist.get_rank() % size, layout.tp_size > 1
        engine = EmbeddedEngine(
            architecture,
            dtype=torch.float32,
            num_slots=2 if name == "llama" else 8,  # the others have slots for guesses
            max_sequence_length=48,
            eos_id=1,
            kv_cache_tokens=64 if name == "llama" else None,  # long sequences lose their memory, on all ranks alike
            prefill_chunk_tokens=8,
            tensor_parallel=TensorParallel(rank, size, neighbour_group(size)),
            step="native" if name == "gemma" else "torch",
            lookup_decoding=True,
            trainer_weights=functools.partial(lendable_weights, model, rank, size) if lends else None,
        )
        engine.build()
        viewed = engine.viewed_weights
        if lends and size == layout.tp_size and layout.pp_size == 1:
            copied = {key.split(".")[-2] for key in engine._step.weights.shapes}
            more_ranks_than_groups = {"q_proj", "k_proj", "v_proj"} if size > architecture.num_query_groups else set()
            others = more_ranks_than_groups | ({"q_norm", "k_norm"} if architecture.qk_norm_over_heads else set())
            others |= set() if architecture.tied_embeddings else {"lm_head"}
            check(copied == {"embed_tokens"} | others, f"{name}: copies {copied}")
        else:
            check(not viewed, f"{name}: views {viewed}")
        engine.refit(export_weights(model, 4096, without=viewed, transient=True), version=0)
        what = f"{name}: responses over {size} ranks differ"
        for turn in range(2):  # which has the first one's responses as guesses
            results = sorted(engine.generate(requests, params), key=lambda result: result.request_id)
            check(bool(engine.statistics.preemptions) == (name == "llama"), f"{name}: {engine.statistics}")
            guessed = turn == 1 and name != "llama"
            check(bool(engine.statistics.guesses_held) == guessed, f"{name}: {engine.statistics}")
            for result, other in zip(results, expected.setdefault(name, results), strict=True):
                check(result.token_ids == other.token_ids, what)
                difference = max(abs(a - b) for a, b in zip(result.logprobs, other.logprobs, strict=True))
                check(difference < 2e-5, f"{what} by {difference}")
        engine.refit(
            ((key, tensor * torch.nan) for key, tensor in export_weights(model, 4096, without=viewed)), version=1
        )
        try:
            list(engine.generate(requests, params))
        except FloatingPointError as error:
            check("request 0" in str(error), f"{name}: {error}")
        else:
            check(False, f"{name}: a diverged model went unnoticed")


def gradients(name: str, sequence_parallel: bool, expected: dict[str, dict[str, torch.Tensor]]) -> None:
    """Of the same batch on every data-parallel rank: the same in every layout."""
    config = {**MODEL_CFG, "optim": {"name": "adam"}, "sequence_parallel": sequence_parallel}
    model = build_model(ARCHITECTURES[name], config, torch.float32)
    import_weights(model, TensorSource(random_weights(ARCHITECTURES[name])))
    wanted = torch.ones(len(TOKENS), TOKENS.shape[1] - 1, dtype=torch.bool)
    train_step(
        model,
        Tokens(TOKENS),
        wanted,
        MicroBatching(1),
        lambda out, _: (-out.sum(), torch.tensor(out.numel()), {}),
        scoring=Scoring(),
    )
    for parameter in model.gpt.parameters():
        parameter.data.copy_(parameter.main_grad)
    found = {key: tensor.clone() for key, tensor in export_weights(model)}
    for key, exact in expected.setdefault(name, found).items():
        difference = ((found[key] - exact).abs().max() / exact.abs().max()).item()
        check(difference < 1e-5, f"{name}: the gradient of {key} differs by {difference}")


def nothing_to_bring(size: int) -> None:
    """An engine that views every tensor, whose first refit exchanges nothing; one that packs every matrix in place."""
    architecture = dataclasses.replace(ARCHITECTURES["llama"], vocab_size=96)  # a multiple of what rows are padded to
    model = build_model(architecture, MODEL_CFG, torch.float32, trainable=False)
    rank = dist.get_rank() % size
    found = {}
    for step in ("torch", "native"):
        found[step] = _response_of_shared_weights(architecture, model, rank, size, step)
    check(found["torch"] == found["native"], f"responses differ: {found}")


def _response_of_shared_weights(
    architecture: ModelArchitecture, model: MegatronModel, rank: int, size: int, step: StepChoice
) -> list[int]:
    engine = EmbeddedEngine(
        architecture,
        dtype=torch.float32,
        num_slots=1,
        max_sequence_length=16,
        eos_id=1,
        tensor_parallel=TensorParallel(rank, size, neighbour_group(size)),
        step=step,
        trainer_weights=functools.partial(lendable_weights, model, rank, size),
    )
    engine.build()
    brought = {key for key in engine._step.weights.shapes if not key.endswith("norm.weight")}
    expected = {"model.embed_tokens.weight"} if step == "native" else set()
    check(brought == expected, f"{step}: {brought} are brought")
    engine.refit(export_weights(model, without=engine.viewed_weights, transient=True), version=0)
    (result,) = engine.generate([GenerationRequest(0, [3, 4])], SamplingParams(max_new_tokens=2, min_new_tokens=2))
    check(len(result.token_ids) == 2, f"responded {result}")
    return result.token_ids


def shared_memory() -> None:
    """It is kept and grows; where a rank runs on another host, or has no room to map it, nobody uses it."""
    everybody = dist.new_group(list(range(dist.get_world_size())))
    buckets = shared_buckets(everybody, 1000)
    check(buckets is not None and shared_buckets(everybody, 500) is buckets, "shared memory is not kept")
    buckets = shared_buckets(everybody, 100_000)
    check(buckets is not None and buckets.num_bytes >= 100_000, "shared memory does not grow")
    for turn in range(20):
        bucket = buckets.next()
        bucket[dist.get_rank()] = turn + dist.get_rank()
        buckets.publish()
        expected = [turn + rank for rank in range(dist.get_world_size())]
        check(bucket[: dist.get_world_size()].tolist() == expected, "a rank reads what another did not write")
    elsewhere = (("_BOOT_ID", Path(__file__)), ("_find", lambda address: None), ("_map", lambda file, num_bytes: None))
    for name, value in elsewhere:
        kept = getattr(shared_buckets_module, name)
        if dist.get_rank() == 1:
            setattr(shared_buckets_module, name, value)
        group = dist.new_group(list(range(dist.get_world_size())))
        check(shared_buckets(group, 1000) is None, "memory is shared with another host")
        check(shared_buckets(group, 1000) is None, "the second answer is another")
        setattr(shared_buckets_module, name, kept)


def engine_group_speaks(layout: ParallelLayout) -> None:
    """The leader's word reaches the ranks of its group and no others, over gloo, with a limit above a sidecar's."""
    cfg = load_defaults("gpt_ppo_actor")
    cfg.trainer.ppo.trt_llm.timeouts.start_seconds = 7200
    group = training_group(PPOActor.read(cfg), layout)
    leader = dist.get_rank() - layout.tp_rank
    ranks = group.tensor_parallel
    check(group.control is not ranks.group and dist.get_backend(group.control) == "gloo", "the wrong group")
    check(group.share(dist.get_rank()) == leader, "another leader's word")
    check(group.gather(dist.get_rank()) == list(range(leader, leader + layout.tp_size)), "other ranks are gathered")
    limit = group.control._get_backend(torch.device("cpu")).options._timeout  # type: ignore[union-attr]
    check(limit > timedelta(seconds=7200), f"gives up after {limit}")


def reward_round_trip(dtype: torch.dtype) -> None:
    architecture = ARCHITECTURES["tied"]
    head = RewardHeadConfig(num_attributes=3)
    weights = random_weights(architecture, num_attributes=3)
    model = build_model(architecture, MODEL_CFG, dtype, head=head, trainable=False)
    import_weights(model, TensorSource(weights))
    streamed = dict(export_weights(model, 4096))
    check(list(streamed) == list(weights), "reward: names or order differ")
    check(all(torch.equal(streamed[key].float(), weights[key]) for key in weights), "reward: values differ")
    check(streamed["score.weight"].dtype == torch.float32, "reward: the head's dtype is not kept")


def errors_are_heard() -> None:
    """By ranks that wait for another's result, however it ends."""
    rank = dist.get_rank()
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        heard = ""
        try:
            result_on_every_rank(thread.submit(int, "seven") if rank == 0 else None)
        except ValueError as error:
            heard = str(error) if rank == 0 else ""
        except OtherRankError as error:
            heard = str(error) if "rank 0: " in str(error) else ""
        check("'seven'" in heard, f"another rank's error is not heard: {heard!r}")
        check(result_on_every_rank(thread.submit(int, "7") if rank == 0 else None) == 7, "nor its result")


def streams_of_stages(layout: ParallelLayout) -> None:
    """Dropout, in regions that are split over tensor-parallel ranks and in those that are not."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    own = torch.rand(8)
    with get_cuda_rng_tracker().fork():
        split = torch.rand(8)
    drawn = all_gather_rows(torch.stack([own, split])[None])
    places = all_gather_rows(torch.tensor([[layout.tp_rank, layout.pp_rank]])).tolist()
    for i, (tp_rank, pp_rank) in enumerate(places):
        same_stage, same_shard = pp_rank == layout.pp_rank, tp_rank == layout.tp_rank
        check(torch.equal(drawn[i, 0], own) == same_stage, f"rank {i}: dropout's stream is not that of its stage")
        check(torch.equal(drawn[i, 1], split) == (same_stage and same_shard), f"rank {i}: the stream is not its own")


def scenarios(layouts: list[tuple[int, ...]]) -> None:
    from megatron.core import parallel_state  # after nemo_style_aligner, which prepares it for the CPU

    shared_memory()
    expected: dict[str, torch.Tensor] = {}
    responses: dict[str, list[GenerationResult]] = {}
    found: dict[str, dict[str, torch.Tensor]] = {}
    errors_are_heard()
    for tp_size, pp_size in layouts:
        layout = initialize_model_parallel(tp_size, pp_size, seed=1)
        streams_of_stages(layout)
        if (tp_size, pp_size) == (2, 1):
            nothing_to_bring(tp_size)
        if tp_size == 2:
            engine_group_speaks(layout)
        for name in ARCHITECTURES:
            round_trip(name, torch.float32, 10_000, expected)
            if sizes := ENGINE_SIZES.get((tp_size, pp_size), {}).get(name):
                generation(name, sizes, responses)
        for name in ("olmo", "gemma"):
            gradients(name, tp_size == 2, found)
        round_trip("tied", torch.bfloat16, 2**20, expected)
        for dtype in (torch.float32, torch.bfloat16):
            reward_round_trip(dtype)
        if dist.get_rank() == 0:
            print(f"ok tp{tp_size} pp{pp_size} dp{layout.dp_size}", flush=True)
        parallel_state.destroy_model_parallel()


def main() -> None:
    layouts = [tuple(map(int, argument.split("x"))) for argument in sys.argv[1:]]
    fork_ranks(RANKS, lambda: scenarios(layouts))


if __name__ == "__main__":
    main()
