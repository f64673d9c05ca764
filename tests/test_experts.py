"""Mixtures of experts: numbers that no layout changes, and what cannot be had is refused by name."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Artefacts
from generation_models import have_graphs
from job_processes import ROOT, critic_service, run, script
from multirank_experts import JOB_LAYOUTS, KINDS, LAYOUTS, Layout, architecture, first_weights, kinds_of, routed_somehow
from multirank_preferences import BUILD
from multirank_ragged import LOSSES, LR, global_batch
from small_models import SHAPE, TensorSource
from test_preferences import assert_same

from nemo_style_aligner.engine.architecture import Experts, ModelArchitecture
from nemo_style_aligner.engine.contract import GenerationRequest, GenerationResult, SamplingParams
from nemo_style_aligner.engine.embedded.engine import EmbeddedEngine
from nemo_style_aligner.engine.embedded.route_memory import unpacked
from nemo_style_aligner.engine.embedded.routing import routed
from nemo_style_aligner.engine.text.jsonl import write_jsonl
from nemo_style_aligner.engine.weights.stream import import_weights
from nemo_style_aligner.trainer.models.gpt import build_model
from nemo_style_aligner.trainer.models.heads import RewardHeadConfig
from nemo_style_aligner.trainer.models.lora import LoraSettings
from nemo_style_aligner.trainer.models.packing import MicroBatching
from nemo_style_aligner.trainer.models.pipeline import Scoring, forward
from nemo_style_aligner.trainer.models.ragged import RaggedBatch, after_prompts
from nemo_style_aligner.trainer.models.routes import (
    Balance,
    LayerTokens,
    RowExperts,
    disagreement,
    seen_by_all,
)
from nemo_style_aligner.trainer.telemetry.metrics import read_metrics

Result = dict[str, Any]
CASES = [
    (layout, kind)
    for layout in LAYOUTS
    if not layout.is_long or os.environ.get("TEST_LONG")
    for kind in kinds_of(layout)
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    script = Path(__file__).with_name("multirank_experts.py")
    run([sys.executable, str(script), str(folder)], ROOT / "results" / "test-logs" / "experts.log", 500.0)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("layout", "kind"), CASES, ids=[f"{layout.name}, {kind}" for layout, kind in CASES])
def test_experts_give_the_same_numbers_in_any_layout(layout: Layout, kind: str, results: Path) -> None:
    """Log-probs, losses, gradients, weights after three updates, and responses of engines with the first weights.

    The last update's experts are given, and others than its routers choose. The ranks themselves compare exported
    weights, and checkpoints that they and another layout wrote.
    """
    expected: Result = torch.load(results / f"{kind}, reference.pt")
    found: Result = torch.load(results / f"{kind}, {layout.name}.pt")
    for (ids, logprobs, *routes), (same_ids, same, *same_routes) in zip(
        found["responses"], expected["responses"], strict=True
    ):
        assert (ids, routes) == (same_ids, same_routes) and logprobs == pytest.approx(same, abs=1e-5)
    for number in range(len(LOSSES)):
        assert torch.allclose(found[f"logprobs {number}"], expected[f"logprobs {number}"], atol=1e-5, rtol=0)
        metrics = expected[f"metrics {number}"]
        for name in metrics.keys() - {"padding_efficiency", "dp_balance"}:
            assert found[f"metrics {number}"][name] == pytest.approx(metrics[name], rel=1e-5, abs=1e-8), name
    assert expected["metrics 0"]["routing_disagreement"] > 0.5
    for name, tensor in expected["weights"].items():
        assert torch.allclose(found["weights"][name], tensor, atol=0.02 * LR, rtol=0), name


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", JOB_LAYOUTS[1:])
def test_jobs_give_the_same_numbers_however_many_passes_each_rank_would_make(layout: str, results: Path) -> None:
    """DPO, KTO, distillation, with an auxiliary loss and moves of the biases; a critic beside its reward model."""
    found, expected = (torch.load(results / f"jobs, {name}.pt") for name in (layout, "reference"))
    for method in BUILD:
        assert_same(found[method], expected[method])
    reports = [[report["loss"] for report in result["critic"].pop("reports")] for result in (found, expected)]
    assert reports[0] == pytest.approx(reports[1], rel=1e-4) and len(reports[0]) == 2
    for name, tensor in expected["critic"].items():
        assert torch.allclose(found["critic"][name], tensor, atol=2e-5), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_of_nemo_describes_the_experts(kind: str) -> None:
    a = architecture(kind)
    assert ModelArchitecture.from_nemo_config(a.to_nemo_config()) == a
    every_third = a.to_nemo_config() | {"moe_layer_freq": 3}
    assert ModelArchitecture.from_nemo_config(every_third).dense_layers == (1, 2)
    unnamed = {key: value for key, value in a.to_nemo_config().items() if key != "moe_ffn_hidden_size"}
    experts = ModelArchitecture.from_nemo_config(unnamed).experts
    assert experts is not None and experts.ffn_hidden_size == a.ffn_hidden_size  # as megatron-core takes it


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_counted(kind: str) -> None:
    a = architecture(kind)
    assert a.num_parameters == sum(tensor.numel() for tensor in first_weights(a).values())
    every = dataclasses.replace(KINDS[kind], per_token=4)
    assert dataclasses.replace(a, experts=every).active_layer_parameters == a.layer_parameters
    none_read = a.layer_parameters_read(0)
    assert a.layer_parameters_read(1) == pytest.approx(a.active_layer_parameters) and none_read > 0


def test_models_with_experts_that_cannot_be_built_are_refused() -> None:
    with pytest.raises(ValueError, match="a shared expert in a model with biases on all"):
        dataclasses.replace(architecture("sigmoid"), bias=True)
    with pytest.raises(ValueError, match="experts in a model without gates"):
        dataclasses.replace(architecture("softmax"), gated=False)
    with pytest.raises(ValueError, match="clamped_swiglu with activation='gelu'"):
        dataclasses.replace(architecture("biased"), activation="gelu")


def test_active_parameters_are_those_that_a_token_has() -> None:
    dense = ModelArchitecture(**SHAPE | {"ffn_hidden_size": 2 * 24})
    experts = dataclasses.replace(dense, experts=KINDS["softmax"])
    router, one = SHAPE["hidden_size"] * 4, 3 * SHAPE["hidden_size"] * 24
    assert experts.active_layer_parameters - dense.active_layer_parameters == dense.num_layers * router
    assert experts.num_parameters - dense.num_parameters == dense.num_layers * (router + 2 * one)
    assert experts.forward_operations(7, 0) - dense.forward_operations(7, 0) == 2 * 7 * dense.num_layers * router


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"per_token": 5}, "5 of 4 experts"),
        ({"per_token": 1}, "its router could not learn"),
        ({"scores": "sigmoid", "normalized": False}, "sigmoid scores that are not normalized"),
        ({"has_bias": True}, "a bias and softmax"),
        ({"number": 10**6}, "number must be in"),
        ({"scaling": 0.0}, "scaling must be above 0"),
        ({"scores": "max"}, "scores='max'"),
    ],
)
def test_experts_that_cannot_be_built_are_refused(change: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        Experts(**{"number": 4, "per_token": 2, "ffn_hidden_size": 8, **change})


@pytest.mark.parametrize(
    "key",
    ["moe_router_num_groups", "moe_shared_expert_gate", "moe_expert_capacity_factor", "moe_apply_probs_on_input"]
    + ["activation_func_clamp_value", "glu_linear_offset"],
)
def test_other_kinds_of_experts_are_refused_by_name(key: str) -> None:
    config = architecture("softmax").to_nemo_config() | {key: 4}
    with pytest.raises(ValueError, match=f"model.{key}=4.*not supported"):
        ModelArchitecture.from_nemo_config(config)


def test_what_experts_cannot_be_divided_by_is_named() -> None:
    a = architecture("sigmoid")
    assert not a.expert_layout_problems(2, 2)
    problems = a.expert_layout_problems(3, 5)
    assert [problem.split(":")[0] for problem in problems] == [
        "model.expert_model_parallel_size=3",
        "model.expert_tensor_parallel_size=5",
    ]
    assert not ModelArchitecture(**SHAPE).expert_layout_problems(3, 5)
    assert not architecture("biased").expert_layout_problems(2, 1)
    (problem,) = architecture("biased").expert_layout_problems(2, 2)
    assert "ranks cannot share experts with biases; set it to 1" in problem
    assert any("moe_ffn_hidden_size=16" in line for line in a.layout_problems(32, engine_key="tensor_parallel_size"))


def test_adapters_of_experts_are_refused_by_name() -> None:
    a = architecture("softmax")
    (problem,) = LoraSettings(("all",), rank=2, alpha=2).problems(a, 1)
    assert "experts have no adapters" in problem
    assert not list(LoraSettings(("attention",), rank=2, alpha=2).problems(a, 1))


def test_a_bias_changes_the_choice_of_experts_and_not_their_weights() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, -4.0]])
    chosen, weights = routed(logits, KINDS["sigmoid"], torch.tensor([0.0, 0.0, 0.0, 5.0]))
    scores = logits[0, [3, 2]].sigmoid()
    assert chosen.tolist() == [[3, 2]]
    assert torch.allclose(weights[0], 1.5 * scores / scores.sum())


# ---- routes -------------------------------------------------------------------------------------


def engine_of(kind: str, **options: Any) -> EmbeddedEngine:
    engine = EmbeddedEngine(
        architecture(kind), dtype=torch.float32, max_sequence_length=64, eos_id=1, records_routes=True, **options
    )
    engine.build()
    engine.refit(iter(first_weights(engine._shape.architecture).items()), version=0)
    return engine


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_routes_of_engines_are_the_trainers_however_tokens_come_to_be_computed(
    one_rank: None, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks, from pages of others, again after preemptions, guessed; in C++ and in torch, padded as for graphs."""
    prompt = [(3 * j) % 50 for j in range(40)]
    requests = [GenerationRequest(i, prompt[: 20 + 4 * i] + [i], i) for i in range(4)]
    sampled, greedy = (
        SamplingParams(max_new_tokens=30, min_new_tokens=30, seed=5, use_greedy=g) for g in (False, True)
    )

    def generated(engine: EmbeddedEngine, params: SamplingParams) -> list[GenerationResult]:
        return sorted(engine.generate(requests, params), key=lambda result: result.request_id)

    found, preempted = [], []
    for step, room in (("native", None), ("native", 96), ("torch", 96), ("padded", 96)):
        if step == "padded":
            have_graphs(monkeypatch, True)
        engine = engine_of(kind, step=step, num_slots=3, prefill_chunk_tokens=8, kv_cache_tokens=room)
        found.append(generated(engine, sampled))
        preempted.append(engine.statistics.preemptions)
        guessing = engine_of(kind, step=step, num_slots=3, lookup_decoding=True)
        guessed = generated(guessing, greedy)
        assert guessing.statistics.guesses_held
        assert [(r.token_ids, r.routes) for r in guessed] == [
            (r.token_ids, r.routes) for r in generated(engine, greedy)
        ]
    assert preempted[0] == 0 and preempted[1] and engine.statistics.shared_prefix_tokens
    assert found[0] == found[1] and all(
        [r.routes for r in other] == [r.routes for r in found[0]] for other in found[2:]
    )
    assert disagreement_of(kind, found[0]) == {"routing_disagreement": 0.0}
    assert disagreement_of(kind, found[0], first=0)["routing_disagreement"] > 0.1


def disagreement_of(kind: str, results: list[GenerationResult], first: int | None = None) -> dict[str, float]:
    """With a model of the same weights; ``first``: instead, tokens have the routes of this one."""
    model = build_model(architecture(kind), {}, torch.float32, trainable=False)
    import_weights(model, TensorSource(first_weights(model.architecture)))
    lengths = torch.tensor([len(r.prompt_token_ids) + len(r.token_ids) for r in results])
    routes = [torch.from_numpy(unpacked(r.routes, int(n))) for r, n in zip(results, lengths, strict=True)]
    if first is not None:
        routes = [routes[0][:1].expand(len(row), -1) for row in routes]
    batch = RaggedBatch(
        torch.tensor([token for r in results for token in r.prompt_token_ids + r.token_ids], dtype=torch.int32),
        lengths,
        after_prompts(lengths, torch.tensor([len(r.prompt_token_ids) for r in results])),
        {},
        torch.ones(len(results), dtype=torch.bool),
        torch.cat(routes),
    )
    seen: list[Any] = []
    forward(model, batch, None, MicroBatching(3), lambda x, _: x, scoring=Scoring(), experts=seen)
    return disagreement(seen_by_all(seen, model.architecture))


def test_given_routes_are_as_if_the_router_had_chosen_them(one_rank: None) -> None:
    """A bias makes it choose experts 1 and 3 everywhere, which leaves their weights as they are."""
    batch = global_batch()
    found = []
    for bias in (0.0, 100.0):
        weights = first_weights(architecture("sigmoid"))
        for name in weights:
            if name.endswith("e_score_correction_bias"):
                weights[name] = torch.tensor([0.0, bias, 0.0, bias])
        model = build_model(architecture("sigmoid"), {}, torch.float32, trainable=False)
        import_weights(model, TensorSource(weights))
        batch.routes = torch.tensor([1, 3] * 3, dtype=torch.uint8).expand(len(batch.tokens), -1)
        scoring = Scoring(replays=bias == 0)
        found.append(forward(model, batch, None, MicroBatching(3), lambda x, _: x, scoring=scoring))
    assert torch.allclose(*found, atol=1e-6)


def test_a_critic_does_not_mind_the_routes_of_a_policy_of_another_shape(one_rank: None) -> None:
    batch, experts = global_batch(), Experts(number=8, per_token=3, ffn_hidden_size=8)
    a = dataclasses.replace(architecture("softmax"), dense_layers=(), experts=experts)
    model = build_model(a, {}, torch.float32, head=RewardHeadConfig(), trainable=False)
    found = []
    for routes in (None, routed_somehow(batch.tokens, batch.lengths)):
        batch.routes = routes
        found.append(forward(model, batch, None, MicroBatching(3), lambda x, _: x[..., 0]))
    assert torch.equal(*found)


def test_the_balance_of_experts_is_a_loss_and_moves_of_biases(one_rank: None) -> None:
    a = architecture("sigmoid")
    balance = Balance.of(a, coefficient=0.3, bias_step=0.01)
    assert balance is not None and Balance.of(a, 0.0, 0.0) is None
    model = build_model(a, {}, torch.float32)
    router = model.gpt.decoder.layers[1].mlp.router
    balance.learn(torch.tensor([[6.0, 2.0, 0.0, 0.0, 0.0, 0.0], *[[2.0, 2.0, 2.0, 2.0, 0.0, 0.0]] * 2]))
    row = RowExperts(torch.tensor([1.0, 0.0, 2.0]), balance=balance)
    router.tokens = LayerTokens(row, 0, None)
    logits = torch.randn(3, 1, 4, requires_grad=True)
    probs, _ = router.routing(logits)
    (found,) = torch.autograd.grad(probs.sum() * 0, logits)
    scores = logits[:, 0].sigmoid()
    mean = (row.weights[:, None] * scores / scores.sum(-1, keepdim=True)).sum(0)
    (expected,) = torch.autograd.grad(0.3 * 4 * (torch.tensor([0.75, 0.25, 0, 0]) * mean).sum(), logits)
    assert torch.allclose(found, expected, atol=1e-6) and expected.abs().max() > 0
    before = router.expert_bias.clone()
    balance.move_biases(model.gpt.decoder.layers)
    assert torch.allclose(router.expert_bias - before, torch.tensor([-0.01, 0.0, 0.01, 0.01]), atol=1e-7)
    other = Balance.of(a, 0.3, 0.0)
    assert other is not None
    other.load_state_dict(json.loads(json.dumps(balance.state_dict())))
    assert torch.equal(other.fractions, balance.fractions)


# ---- jobs, as users start them --------------------------------------------------------------------

SHARED = ("trainer.precision=32", "model.encoder_seq_length=64", "model.sequence_parallel=True")
WARM = ("model.optim.sched.warmup_steps=2",)
FOUR = ("trainer.devices=4", "model.tensor_model_parallel_size=2", "model.expert_model_parallel_size=2")
FOUR += ("model.expert_tensor_parallel_size=1",)
REWARD = "def ones(prompt, response, line):\n    return response.count('1') / max(len(response), 4)\n"


def base_model(artefacts: Artefacts, folder: Path, *options: str) -> Path:
    path = folder / "base.nemo"
    sizes = ("--max-length", "64", "--num-layers", "2", "--hidden-size", "32", "--num-heads", "4", *options)
    run(
        script("init_gpt.py", "--tokenizer", str(artefacts.folder / "tokenizer"), "--output", str(path), *sizes),
        folder / "init.log",
    )
    return path


def job(name: str, folder: Path, *flags: str) -> tuple[Path, dict[str, list[tuple[int, float]]]]:
    """Run a script; the archive that it leaves, and what it has logged."""
    folder.mkdir(parents=True, exist_ok=True)
    run(script(name, *SHARED, *flags, f"exp_manager.explicit_log_dir={folder / 'log'}"), folder / "job.log", 300.0)
    return next((folder / "log" / "checkpoints").glob("*.nemo")), read_metrics(folder / "log")


def sft(artefacts: Artefacts, base: Path, folder: Path, *flags: str) -> tuple[Path, Any]:
    files = (f"model.data.train_ds.file_path={artefacts.data('train_sft')}", f"model.restore_from_path={base}")
    sizes = ("model.data.train_ds.global_batch_size=16", "model.data.train_ds.micro_batch_size=8")
    return job("train_gpt_sft.py", folder, *files, *sizes, "model.optim.lr=1e-2", *WARM, *flags)


def grpo(artefacts: Artefacts, policy: Path, folder: Path, *flags: str) -> tuple[Path, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rewards.py").write_text(REWARD)
    sizes = ("model.global_batch_size=32", "model.micro_batch_size=8", "model.ppo.num_rollout_samples=8")
    sizes += ("model.ppo.num_val_samples=4", "model.ppo.rollout_micro_batch_size=8", "trainer.ppo.save_interval=0")
    sizes += ("model.ppo.length_params.max_length=8", "trainer.ppo.num_rollouts_per_prompt=4")
    named = (f"trainer.ppo.rewards=[{{source: '{folder}/rewards.py:ones'}}]", "trainer.ppo.estimator=grpo")
    start = (f"pretrained_checkpoint.restore_from_path={policy}", artefacts.data_prefix("prompts"))
    return job("train_gpt_ppo_actor.py", folder, *start, *named, *sizes, *WARM, *flags)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_job_takes_a_mixture(artefacts: Artefacts, tmp_path: Path) -> None:
    """On two ranks that share experts, and whose last batches leave one of them without rows."""
    ranks = ("trainer.devices=2", "model.expert_model_parallel_size=2")
    (tmp_path / "start").mkdir()
    size = ("--num-experts", "4", "--expert-size", "24", "--family", "gpt_oss")
    base = base_model(artefacts, tmp_path / "start", *size)
    few = ("trainer.sft.max_steps=3", "trainer.sft.val_check_interval=2")
    lora = ("model.peft.peft_scheme=lora", "model.peft.lora_tuning.adapter_dim=4")
    validated = (f"model.data.validation_ds.file_path={artefacts.data('test_sft')}",)
    sft(artefacts, base, tmp_path / "lora", *ranks, *few, *validated, *lora)
    tuned, _ = sft(artefacts, base, tmp_path / "sft", *ranks, *few, *validated)
    start = (f"pretrained_checkpoint.restore_from_path={tuned}", *ranks, "model.global_batch_size=5")
    judged = tmp_path / "judged.jsonl"
    pairs = [json.loads(line)["text"] for line in artefacts.data("train_comparisons").read_text().splitlines()[:33]]
    lines = [text.partition("Assistant:") for text in pairs]
    write_jsonl(judged, [{"prompt": a + b, "completion": c, "label": not n % 2} for n, (a, b, c) in enumerate(lines)])
    logits = tmp_path / "logits.jsonl"
    teacher = script("compute_topk_logits.py").pop()
    run(
        [
            sys.executable, teacher.replace("gpt/", "synthetic_data_gen/"), *SHARED[:2], *start,
            f"output_path={logits}", f"data.data.file_path={artefacts.data('test_sft')}", "top_k=4",
            f"exp_manager.explicit_log_dir={tmp_path / 'logits'}",
        ],
        tmp_path / "logits.log", 200.0,
    )  # fmt: skip
    files = {"dpo": artefacts.data_prefix("comparisons")}
    files |= {
        method: f"model.data.data_prefix={{train: [{path}], validation: [{path}]}}"
        for method, path in (("kto", judged), ("knowledge_distillation", logits))
    }
    for method, data in files.items():
        ends = () if method == "knowledge_distillation" else ("model.data.append_eod=True",)
        keys = (f"trainer.{method}.max_steps=2", f"trainer.{method}.val_check_interval=2", *ends)
        _, found = job(f"train_gpt_{method}.py", tmp_path / method, *start, data, *keys)
        assert len(found["train/loss"]) == 2 and found["val/loss"], method
    keys = ("trainer.rm.max_steps=2", "trainer.rm.val_check_interval=2", artefacts.data_prefix("comparisons"))
    rewards, _ = job("train_reward_model.py", tmp_path / "rm", *start, *keys)
    critic = ("placement=flatten", f"critic.pretrained_checkpoint.restore_from_path={rewards}")
    critic += ("critic.model.global_batch_size=5",)
    sizes = ("model.ppo.num_rollout_samples=5", "model.ppo.num_val_samples=3", "model.ppo.rollout_micro_batch_size=3")
    sizes += ("model.ppo.length_params.max_length=8", "trainer.ppo.max_steps=2", "trainer.ppo.val_check_interval=2")
    policy, found = job(
        "train_gpt_ppo_actor.py", tmp_path / "ppo", *start, artefacts.data_prefix("prompts"), *critic, *sizes
    )
    assert [value for _, value in found["train_rollouts/routing_disagreement"]] == [0.0, 0.0]
    assert len(found["train_critic/critic_loss"]) == 2 and len(found["val_rollouts/rewards"]) == 2
    served = (*ranks, "model.global_batch_size=5", "trainer.ppo.combine_rm_and_critic_server=True")
    with critic_service(rewards, tmp_path / "critic", *served) as (_, port):
        remote = (f"remote_critic_rm.critic.port={port}", "remote_critic_rm.combine_rm_and_critic_server=True")
        _, found = job(
            "train_gpt_ppo_actor.py", tmp_path / "apart", *start, artefacts.data_prefix("prompts"), *remote, *sizes
        )
    assert len(found["train_critic/critic_loss"]) == 2 and len(found["val_rollouts/rewards"]) == 2
    evaluated = run(
        [sys.executable, "-m", "nemo_style_aligner", "eval", str(policy), "--against", str(base), "--prompts",
         str(artefacts.data("test_prompts"))],
        tmp_path / "eval.log",
    )  # fmt: skip
    assert "kl_per_token" in evaluated


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_mixture_learns_from_scratch_as_a_dense_model_does(artefacts: Artefacts, tmp_path: Path) -> None:
    """SFT and GRPO, of the mixture on four ranks, with an auxiliary loss and the engine's routes."""
    gains = {}
    for kind, options, ranks in (("dense", (), ()), ("mixture", ("--num-experts", "4", "--expert-size", "48"), FOUR)):
        folder = tmp_path / kind
        base = base_model(artefacts, folder, *options)
        of_sft = ("model.moe_aux_loss_coeff=0.01",) if options else ()
        tuned, losses = sft(artefacts, base, folder / "sft", *ranks, *of_sft, "trainer.sft.max_epochs=3")
        assert losses["train/loss"][-1][1] < 0.7 * losses["train/loss"][0][1]
        of_grpo = ("trainer.ppo.replay_routes=True",) if options else ()
        keys = ("trainer.ppo.max_steps=18", "trainer.ppo.val_check_interval=0", "model.optim.lr=2e-3")
        keys += ("trainer.ppo.initial_policy_kl_penalty=0",)
        _, curves = grpo(artefacts, tuned, folder / "grpo", *ranks, *of_grpo, *keys)
        rewards = [value for _, value in curves["train_rollouts/rewards"]]
        gains[kind] = (sum(rewards[-4:]) - sum(rewards[:4])) / 4
        if options:
            assert {value for _, value in curves["train_rollouts/routing_disagreement"]} == {0.0}
            assert max(value for _, value in losses["train/dead_experts"]) < 1
    assert gains["dense"] > 0.15 and gains["mixture"] > 0.15, gains
