"""A PPO job put together: what its keys set, what a step makes of rollouts, what is trained on them in which order."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from small_models import SHAPE
from test_nonfinite import SETTINGS, settings_with, step

from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.contract import GenerationStatistics
from nemo_style_aligner.trainer.config.loading import load_defaults
from nemo_style_aligner.trainer.config.schema import PPOActor
from nemo_style_aligner.trainer.data.datasets import PromptItem
from nemo_style_aligner.trainer.jobs.rl_setup import build_actor
from nemo_style_aligner.trainer.models.gpt import MegatronModel, build_model
from nemo_style_aligner.trainer.models.optimizer import Schedule
from nemo_style_aligner.trainer.rl.estimators import ESTIMATORS
from nemo_style_aligner.trainer.rl.experience import kl_estimator, make_experience
from nemo_style_aligner.trainer.rl.loop import RLTrainer
from nemo_style_aligner.trainer.rl.remote_critic import RemoteCritic
from nemo_style_aligner.trainer.rl.reward_config import LAYOUT
from nemo_style_aligner.trainer.rl.rollouts.collector import RolloutCollector
from nemo_style_aligner.trainer.rl.rollouts.generator import generation_metrics
from nemo_style_aligner.trainer.rl.rollouts.prompts import PromptSource
from nemo_style_aligner.trainer.rl.rollouts.setup import sampling_params
from nemo_style_aligner.trainer.rl.settings import RLSettings

pytestmark = pytest.mark.usefixtures("one_thread", "one_rank")

# ---- what the keys set --------------------------------------------------------------------------

# Another value than the default, and the settings that change with it, to what.
KEYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "trainer.ppo.max_epochs": (2, {"ppo.max_epochs": 2, "ppo.max_steps": 8, "schedule.max_steps": 16}),
    "trainer.ppo.max_steps": (3, {"ppo.step_limit": 3, "ppo.max_steps": 3, "schedule.max_steps": 6}),
    "trainer.ppo.val_check_at_start": (False, {"ppo.val_check_at_start": False}),
    "trainer.ppo.val_check_interval": (5, {"ppo.val_check_interval": 5, "ppo.save_interval": 5}),
    "trainer.ppo.save_interval": (3, {"ppo.save_interval": 3}),
    "trainer.ppo.gradient_clip_val": (0.5, {"optimizer.clip_grad": 0.5}),
    "trainer.ppo.on_nonfinite": ("skip", {"nonfinite.action": "skip"}),
    "trainer.ppo.max_consecutive_skips": (3, {"nonfinite.max_consecutive_skips": 3}),
    "trainer.ppo.critic_warmup_steps": (2, {"ppo.critic_warmup_steps": 2}),
    "trainer.ppo.num_ppo_epochs": (3, {"ppo.num_ppo_epochs": 3, "schedule.max_steps": 24}),
    "trainer.ppo.initial_policy_kl_penalty": (0.3, {"advantages.kl_coef": 0.3}),
    "trainer.ppo.kl_in": ("loss", {"advantages.kl_coef": 0.0, "loss.kl_coef": 0.01}),
    "trainer.ppo.use_absolute_kl": (False, {"advantages.kl_estimator": "k1", "loss.kl_estimator": "k1"}),
    "trainer.ppo.kl_estimator": ("k3", {"advantages.kl_estimator": "k3", "loss.kl_estimator": "k3"}),
    "trainer.ppo.kl_clamp": (3.0, {"advantages.kl_clamp": 3.0, "loss.kl_clamp": 3.0}),
    "trainer.ppo.teacher.weight": (0.5, {"advantages.teacher_weight": 0.5}),
    "trainer.ppo.discount_factor": (0.9, {"advantages.discount_factor": 0.9}),
    "trainer.ppo.gae_lambda": (0.8, {"advantages.gae_lambda": 0.8}),
    "trainer.ppo.estimator": (
        "rloo",
        {"advantages.estimator": ESTIMATORS["rloo"], "advantages.whitens": False},
    ),
    "trainer.ppo.num_rollouts_per_prompt": (3, {"schedule.max_steps": 24}),
    "trainer.ppo.top_n_rollouts": (2, {"ppo.top_n_rollouts": 2, "schedule.max_steps": 16}),
    "trainer.ppo.save_samples": (True, {"ppo.save_samples": True}),
    "trainer.ppo.policy_loss": ("gspo", {"loss.policy_loss": "gspo"}),
    "trainer.ppo.loss_aggregation": ("sequence_mean", {"loss.aggregation": "sequence_mean"}),
    "trainer.ppo.loss_constant_length": (77, {"loss.constant_length": 77}),
    "trainer.ppo.dual_clip": (3.0, {"loss.dual_clip": 3.0}),
    "trainer.ppo.dynamic_sampling.enable": (True, {}),
    "trainer.ppo.overlong.buffer_tokens": (5, {"advantages.overlong_buffer_tokens": 5}),
    "trainer.ppo.overlong.penalty": (0.5, {"advantages.overlong_penalty": 0.5}),
    "trainer.ppo.normalize_advantages": (False, {"advantages.whitens": False}),
    "trainer.ppo.advantage_whitening_unbiased": (True, {"advantages.advantage_whitening_unbiased": True}),
    "trainer.ppo.mask_truncated": (False, {"advantages.mask_truncated": False}),
    "trainer.ppo.policy_logprobs": ("engine", {}),
    "trainer.ppo.replay_routes": (True, {"actor.replays_routes": True}),
    "trainer.ppo.importance_weight_cap": (2.5, {"advantages.importance_weight_cap": 2.5}),
    "trainer.ppo.importance_sequence_bounds": ([0.5, 1.5], {"advantages.importance_sequence_bounds": [0.5, 1.5]}),
    "trainer.ppo.importance_token_bounds": ([0.5, 1.5], {"advantages.importance_token_bounds": [0.5, 1.5]}),
    "trainer.ppo.trust_region": ("both", {"loss.trust_region": "both"}),
    "trainer.ppo.sampling_kl": (0.3, {"loss.sampling_kl": 0.3}),
    "trainer.ppo.in_flight": ("keep", {"ppo.in_flight": "keep"}),
    "trainer.ppo.staleness": (
        1,
        {"ppo.staleness": 1, "advantages.importance_weight_cap": 2.0, "loss.trust_region": "both"},
    ),
    "trainer.ppo.reference_policy_placement": ("swap", {"actor.has_both_policies": False, "actor.keeps_passes": False}),
    "trainer.ppo.num_table_rows": (3, {"ppo.num_table_rows": 3}),
    "trainer.ppo.trt_llm.seed": (11, {"sampling.seed": 11}),
    "trainer.ppo.trt_llm.unload_engine_train": (True, {}),
    "model.seed": (5, {"ppo.seed": 5, "sampling.seed": 5}),
    "model.global_batch_size": (8, {"ppo.global_batch_size": 8, "schedule.max_steps": 4}),
    "model.micro_batch_size": (2, {"training.num_rows": 2}),
    "model.max_tokens_per_micro_batch": (99, {"training.max_tokens": 99, "forward.max_tokens": 99}),
    "model.share_prompts": (False, {"training.shares_prompts": False, "forward.shares_prompts": False}),
    "model.ppo.num_rollout_samples": (16, {"schedule.max_steps": 16}),
    "model.ppo.rollout_micro_batch_size": (2, {"forward.num_rows": 2}),
    "model.ppo.forward_micro_batch_size": (3, {"forward.num_rows": 3}),
    "model.ppo.forward_max_tokens_per_micro_batch": (88, {"forward.max_tokens": 88}),
    "model.ppo.keep_activations": ("never", {"actor.keeps_passes": False}),
    "model.ppo.entropy_bonus": (0.02, {"loss.entropy_bonus": 0.02}),
    "model.ppo.ratio_eps": (0.3, {"loss.clip_low": 0.3, "loss.clip_high": 0.3}),
    "model.ppo.ratio_eps_high": (0.4, {"loss.clip_high": 0.4}),
    "model.ppo.cispo_ratio_max": (7.0, {"loss.ratio_cap": 7.0}),
    "model.ppo.sampling_params.use_greedy": (True, {"sampling.use_greedy": True}),
    "model.ppo.sampling_params.temperature": (0.7, {"sampling.temperature": 0.7, "actor.temperature": 0.7}),
    "model.ppo.sampling_params.top_k": (5, {"sampling.top_k": 5}),
    "model.ppo.sampling_params.top_p": (0.9, {"sampling.top_p": 0.9}),
    "model.ppo.sampling_params.repetition_penalty": (1.1, {"sampling.repetition_penalty": 1.1}),
    "model.ppo.sampling_params.end_strings": (
        ["x", r"\x11", 4],  # as typed on a command line
        {"sampling.stop_strings": ("x", "\x11", "4")},
    ),
    "model.ppo.length_params.max_length": (
        9,
        {"sampling.max_new_tokens": 9, "advantages.max_length": 9, "loss.constant_length": 9},
    ),
    "model.ppo.length_params.min_length": (3, {"sampling.min_new_tokens": 3}),
    "model.optim.lr": (1.0, {"schedule.lr": 1.0}),
    # Of the groups of parameters; norms and biases never decay.
    "model.optim.weight_decay": (0.2, {"optimizer.weight_decay": {0.0, 0.2}}),
    "model.optim.betas": ([0.8, 0.9], {"optimizer.betas": {(0.8, 0.9)}}),
    "model.optim.eps": (1e-3, {"optimizer.eps": {1e-3}}),
    "model.optim.sched.name": ("constant", {"schedule.name": "constant"}),
    "model.optim.sched.max_steps": (70, {"schedule.max_steps": 70, "schedule.is_given_length": True}),
    "model.optim.sched.warmup_steps": (7, {"schedule.warmup_steps": 7}),
    "model.optim.sched.constant_steps": (8, {"schedule.constant_steps": 8}),
    "model.optim.sched.min_lr": (0.0, {"schedule.min_lr": 0.0}),
}
SECTIONS = ("trainer.ppo", "model.ppo", "model.optim")
OF_ADVANTAGES = ("estimator", "kl_coef", "whitens", "max_length")
OF_FORMULAS = (
    *("kl_clamp", "discount_factor", "gae_lambda", "advantage_whitening_unbiased", "mask_truncated"),
    *("importance_weight_cap", "importance_sequence_bounds", "importance_token_bounds"),
)
OF_A_STEP = (
    "critic_warmup_steps",
    "num_ppo_epochs",
    "top_n_rollouts",
    "save_samples",
    "num_table_rows",
    "staleness",
    "in_flight",
)
# Keys of these sections that others read: the launcher, the engines, the prompts, the model, the optimizer on a GPU.
ELSEWHERE = (
    "trainer.ppo.rewards",
    "trainer.ppo.reward_functions.",
    "trainer.ppo.environment",
    "trainer.ppo.episodes.",
    "trainer.ppo.dynamic_sampling.max_rounds",
    "trainer.ppo.rollout_devices",
    "trainer.ppo.critic_devices",
    *(f"trainer.ppo.reference.{name}" for name in LAYOUT),
    *(f"trainer.ppo.teacher.{name}" for name in (*LAYOUT, "restore_from_path")),
    "trainer.ppo.generation.",
    "trainer.ppo.trt_llm.",
    "trainer.ppo.batch_iterator.",
    "trainer.ppo.serve_policy.",
    "model.ppo.num_val_samples",
    "model.ppo.offload_adam_states",
    "model.ppo.sampling_params.add_BOS",
    "model.optim.name",
    "model.optim.overlap_grad_sync",
)


def small_job() -> DictConfig:
    """The defaults, with two updates in a step."""
    cfg = load_defaults("gpt_ppo_actor")
    cfg.model.global_batch_size, cfg.model.ppo.num_rollout_samples = 4, 8
    return cfg


def small_model(is_trainable: bool = True) -> MegatronModel:
    optim = {"name": "distributed_fused_adam"}
    return build_model(ModelArchitecture(**SHAPE), {"optim": optim}, torch.float32, trainable=is_trainable)


@pytest.fixture(scope="module")
def model(one_rank: None) -> MegatronModel:
    return small_model()


def settings_of(config: PPOActor, model: MegatronModel) -> dict[str, Any]:
    """Everything that a job's keys set of its loop, its formulas, its sampling and its policy."""
    settings = RLSettings.from_config(config, steps_per_epoch=4)
    base: Any = SimpleNamespace(build=lambda trainable: small_model(trainable))
    actor = build_actor(config, base, model, settings)
    groups = actor.optimizer.megatron.param_groups
    ppo, advantages, loop = settings.ppo, settings.advantages, dict(vars(settings))
    del loop["ppo"], loop["advantages"]
    parts: dict[str, Mapping[str, Any]] = {
        "advantages": {name: getattr(advantages, name) for name in OF_ADVANTAGES}
        | {name: getattr(ppo, name) for name in OF_FORMULAS}
        | {f"overlong_{name}": value for name, value in vars(ppo.overlong).items()}
        | {"teacher_weight": ppo.teacher.weight, "kl_estimator": kl_estimator(ppo)},
        "nonfinite": {"action": ppo.on_nonfinite, "max_consecutive_skips": ppo.max_consecutive_skips},
        "ppo": loop | {name: getattr(ppo, name) for name in OF_A_STEP},
        "sampling": dataclasses.asdict(sampling_params(config.model.ppo, config.trainer.ppo.trt_llm.seed)),
        "training": dataclasses.asdict(actor.training_batching),
        "forward": dataclasses.asdict(actor.forward_batching),
        "schedule": dataclasses.asdict(actor.optimizer.schedule),
        "actor": {
            "temperature": actor.temperature,
            "has_both_policies": actor.reference is not None and actor.reference._second is not None,
            "keeps_passes": actor.model.kept_passes is not None,
            "replays_routes": actor.replays_routes,
        },
        "loss": dataclasses.asdict(actor.loss),
        "optimizer": {name: {group[name] for group in groups} for name in ("weight_decay", "betas", "eps")}
        | {"clip_grad": actor.optimizer.clip_grad},
    }
    assert actor.optimizer.skips.policy is ppo
    return {f"{part}.{name}": value for part, values in parts.items() for name, value in values.items()}


@pytest.fixture(scope="module")
def default_settings(model: MegatronModel) -> dict[str, Any]:
    return settings_of(PPOActor.read(small_job()), model)


@pytest.mark.parametrize("key", KEYS)
def test_a_key_changes_its_settings_and_no_other(
    key: str, model: MegatronModel, default_settings: dict[str, Any]
) -> None:
    value, changes = KEYS[key]
    cfg = small_job()
    OmegaConf.update(cfg, key, value)
    assert all(default_settings[name] != changes[name] for name in changes)
    assert settings_of(PPOActor.read(cfg), model) == default_settings | changes


def test_no_key_and_no_setting_is_left_out(default_settings: dict[str, Any]) -> None:
    cfg = small_job()
    keys = {key for section in SECTIONS for key in leaves(OmegaConf.select(cfg, section), section)}
    assert {key for key in keys if not key.startswith(ELSEWHERE)} <= KEYS.keys()
    fixed = {"sampling.ignore_eos", "training.group", "forward.group"}  # of benchmarks, and of other trainers
    served = ("min_p", "presence_penalty", "frequency_penalty", "logit_bias", "stop_token_ids", "grammar")
    fixed |= {f"sampling.{name}" for name in served}
    assert default_settings.keys() - fixed == {name for _, changes in KEYS.values() for name in changes}


def leaves(section: DictConfig, path: str) -> Iterator[str]:
    """The keys beneath a section that are no sections themselves."""
    for name in section:
        key, node = f"{path}.{name}", section._get_node(name)
        yield from leaves(node, key) if isinstance(node, DictConfig) else [key]


def test_without_a_penalty_there_is_no_initial_policy(model: MegatronModel) -> None:
    cfg = small_job()
    cfg.trainer.ppo.initial_policy_kl_penalty = 0.0
    config, missing = PPOActor.read(cfg), cast(Any, None)
    assert build_actor(config, missing, model, RLSettings.from_config(config, 4)).reference is None


# ---- what a step makes of its rollouts ----------------------------------------------------------


def test_experience_is_what_the_formulas_say() -> None:
    """Each with its own settings and masks: the critic's targets are of all responses, the policy's loss of some."""
    made = step()
    versions = made.rollouts.weight_versions
    versions[:] = 5
    versions[:6] = torch.tensor([2, 2, 3, 3, 4, 5])  # of the first response's tokens
    settings = settings_with(
        advantage_whitening_unbiased=True,
        kl_clamp=0.3,
        importance_weight_cap=1.2,
        importance_sequence_bounds=[0.9, 1.2],
        importance_token_bounds=[0.6, 1.8],
    )
    batch, columns = made.rollouts, made.columns
    experience, metrics = make_experience(batch, made.scores, columns, settings, version=5)

    lengths, responses = batch.sampled_lengths.tolist(), range(len(batch))
    kl = (columns["old_logprobs"] - columns["reference_logprobs"]).clamp(-0.3, 0.3)
    log_ratios = columns["old_logprobs"] - batch.engine_logprobs
    rewards = -0.1 * kl
    for i, end in enumerate(batch.sampled_lengths.cumsum(0).tolist()):
        rewards[end - 1] += made.scores.rewards[i].float()
    advantages = torch.zeros_like(rewards)
    end = 0
    for length in lengths:  # backwards through each response, with V = 0 behind its end
        begin, end = end, end + length
        running, next_value = 0.0, 0.0
        for t in reversed(range(begin, end)):
            value = float(columns["values"][t])
            running = float(rewards[t]) + 0.9 * next_value - value + 0.9 * 0.8 * running
            advantages[t], next_value = running, value
    returns = advantages + columns["values"]

    def of_sequences(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([part.mean() for part in x.split(lengths)])

    ratios = of_sequences(log_ratios).exp()
    assert (ratios > 1.2).any() and (ratios < 0.9).any()
    learns = batch.ended & (ratios >= 0.9) & (ratios <= 1.2)
    kept = torch.cat([torch.full((lengths[i],), bool(learns[i])) for i in responses])
    in_loss = advantages[kept]
    assert 1 < len(in_loss) < sum(lengths[i] for i in responses if batch.ended[i])
    torch.testing.assert_close(experience.columns["returns"], returns)
    outside = (log_ratios.exp() < 0.6) | (log_ratios.exp() > 1.8)
    assert (log_ratios.exp()[outside] < 1).any() and (log_ratios.exp()[outside] > 1).any()
    weights = log_ratios.exp().clamp(max=1.2).masked_fill(outside, 0)
    torch.testing.assert_close(experience.columns["importance_weights"], weights)
    whitened = (in_loss - in_loss.mean()) / in_loss.std()
    torch.testing.assert_close(experience.columns["advantages"][kept], whitened)
    assert torch.equal(experience.learns, learns)

    used = weights[kept]
    expected = {
        "init_policy_kl": of_sequences(kl).mean().item(),
        "rewards_with_kl": of_sequences(rewards).mean().item(),
        "generation_length": batch.sampled_lengths.float().mean().item(),
        "staleness_mean": (3 + 3 + 2 + 2 + 1) / sum(lengths),
        "staleness_max": 3.0,
        "importance_truncated": (log_ratios.exp() > 1.2)[kept].float().mean().item(),
        "importance_weights": used.mean().item(),
        "importance_effective_share": (used.sum() ** 2 / (len(used) * used.square().sum())).item(),
        "importance_masked_tokens": outside[kept].float().mean().item(),
        "importance_masked_sequences": ((ratios > 1.2) | (ratios < 0.9)).float().mean().item(),
        "engine_kl": (log_ratios.exp() - 1 - log_ratios).mean().item(),
        "engine_logprob_gap_mean": log_ratios.abs().mean().item(),
        "engine_logprob_gap_max": log_ratios.abs().max().item(),
        "rewards": made.scores.rewards.mean().item(),
        "prompt_lengths": batch.prompt_lengths.float().mean().item(),
        "response_lengths": batch.lengths.float().mean().item(),
        "fraction_of_samples_properly_ended": batch.ended.float().mean().item(),
    }
    for name, values in {"advantages": advantages, "returns": returns, "values": columns["values"]}.items():
        expected[f"{name}_mean"] = values.mean().item()
        expected[f"{name}_std"] = values.std(unbiased=False).item()
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert metrics.keys() - expected.keys() == {"rollout_size", "nonfinite_samples"}

    settings = dataclasses.replace(
        settings,
        ppo=settings.ppo.replaced(
            normalize_advantages=False,
            importance_weight_cap=None,
            importance_sequence_bounds=None,
            importance_token_bounds=None,
            trust_region="both",
        ),
    )
    experience, metrics = make_experience(batch, made.scores, columns, settings, version=5)
    torch.testing.assert_close(experience.columns["advantages"], advantages)
    weights = experience.columns["importance_weights"]
    assert torch.all(weights == 1) and not any("importance" in name for name in metrics)
    assert torch.equal(experience.columns["engine_logprobs"], batch.engine_logprobs)


def test_a_rank_may_have_none_of_a_steps_samples() -> None:
    """Of fewer samples than data-parallel ranks."""
    made, none = step(), torch.empty(0)
    flat = {"tokens": none.int(), "engine_logprobs": none, "weight_versions": none.int()}
    batch = dataclasses.replace(made.rollouts, own=none.long(), **flat)
    columns = dict.fromkeys(made.columns, none)
    experience, metrics = make_experience(batch, made.scores, columns, SETTINGS, version=5)
    assert all(torch.equal(column, none) for column in experience.columns.values())
    assert metrics["engine_logprob_gap_max"] == 0.0


def test_samples_are_shown_without_what_pads_them() -> None:
    made = step()
    missing: Any = None
    tokenizer: Any = SimpleNamespace(ids_to_text=str)
    collector = RolloutCollector(missing, missing, tokenizer, str, scoring_batch_size=1)
    shown = collector.sample_table(made.rollouts, made.scores, num_rows=3)
    tokens = [part.tolist() for part in made.rollouts.tokens.split(made.rollouts.lengths.tolist())]
    assert len(shown) == 3
    assert shown[2] == (str(tokens[2][:1]), str(tokens[2][1:5]), made.scores.rewards[2].item())


def test_active_slots_are_the_mean_of_a_pass() -> None:
    statistics = GenerationStatistics(steps=4, active_slot_steps=10)
    engine: Any = SimpleNamespace(statistics=statistics, num_compilations=0)
    assert generation_metrics(engine, seconds=2.0, is_leader=True)["active_slots"] == 2.5


def test_policy_and_critic_are_trained_on_what_is_theirs() -> None:
    experience, _ = step().experience()
    batch = experience.minibatch([2, 0, 5])
    rollouts, lengths = experience.rollouts, experience.rollouts.sampled_lengths.tolist()
    assert batch.lengths.tolist() == rollouts.lengths[[0, 2, 5]].tolist()
    assert batch.wanted.tolist() == experience.learns[[0, 2, 5]].tolist() == [True, False, True]
    for name in ("old_logprobs", "advantages", "importance_weights"):
        parts = experience.columns[name].split(lengths)
        assert torch.equal(batch.columns[name], torch.cat([parts[0], parts[2], parts[5]])), name

    sent: list[torch.Tensor] = []
    client: Any = SimpleNamespace(train_async=lambda *tensors: sent.extend(tensors))
    journal: Any = object()
    RemoteCritic(client, journal, "refuse").start_training(experience)
    tokens, returns, values, mask = sent
    assert mask.sum(1).tolist() == lengths  # also of the response that was cut off
    of_samples = rollouts.tokens.split(rollouts.lengths.tolist())
    for i in range(len(rollouts)):
        assert (
            tokens[i, : rollouts.lengths[i]].tolist() == of_samples[i].tolist()
            and not tokens[i, rollouts.lengths[i] :].any()
        )
        begin = int(rollouts.prompt_lengths[i]) - 1
        assert mask[i].nonzero()[:, 0].tolist() == list(range(begin, begin + lengths[i]))
        for sent_column, name in ((returns, "returns"), (values, "values")):
            assert torch.equal(sent_column[i][mask[i] == 1], experience.columns[name].split(lengths)[i]), name


# ---- the trainer --------------------------------------------------------------------------------


def trainer(metrics: Any = None, **ppo: Any) -> RLTrainer:
    """With 100 prompts, of which a step takes 40, and without what generates and learns."""
    missing: Any = None
    cfg = small_job()
    cfg.trainer.ppo.update(save_interval=0, **ppo)
    optimizer = SimpleNamespace(schedule=Schedule(lr=1.0, max_steps=9))
    actor: Any = SimpleNamespace(model=None, optimizer=optimizer, routing={})
    prompts = PromptSource([PromptItem([i], {}) for i in range(100)], 40, 7, True)
    collector: Any = SimpleNamespace(sample_table=lambda *_: [], scorer=SimpleNamespace(values=None, columns=[]))
    nothing: Any = SimpleNamespace(
        start_training=lambda experience: None, poll=lambda: None, check=lambda ahead=None: None,
        section=lambda name: contextlib.nullcontext(),
    )  # fmt: skip
    timer: Any = lambda name: contextlib.nullcontext()  # noqa: E731
    return RLTrainer(
        RLSettings.from_config(PPOActor.read(cfg), 2),
        actor,
        collector,
        prompts,
        missing,
        nothing,
        metrics,
        nothing,
        timer,
    )


def test_training_starts_over_with_the_prompts_of_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round has others, and random numbers of its own."""
    ppo, asked = trainer(critic_warmup_steps=2), []

    def generate(offset: int, stream: int) -> tuple[None, None]:
        asked.append((offset, stream))
        ppo.consumed_samples = offset + 40
        return None, None

    monkeypatch.setattr(ppo, "generate_experience", generate)
    monkeypatch.setattr(ppo, "start_critic", lambda experience: None)
    ppo.warm_up()
    assert asked == [(0, 1), (40, 2)] and ppo.consumed_samples == 0


def test_every_pass_over_the_rollouts_has_an_order_of_its_own() -> None:
    ppo, orders = trainer(), set()
    for ppo.step in (0, 1):
        for epoch in (0, 1):
            orders.add(tuple(torch.cat(list(ppo._minibatches(torch.arange(8), epoch))).tolist()))
    assert len(orders) == 4 and all(sorted(order) == list(range(8)) for order in orders)


def test_a_group_is_in_one_minibatch_as_far_as_there_is_room() -> None:
    """In an order that groups of one have, too."""
    ppo = trainer()
    groups = torch.arange(12) // 3
    order = torch.cat(list(ppo._minibatches(groups, 0)))
    assert sorted(order.tolist()) == list(range(12))
    assert groups[order].unique_consecutive().tolist() == torch.cat(list(ppo._minibatches(torch.arange(4), 0))).tolist()


def test_a_step_takes_no_more_prompts_than_its_epoch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as are left, where the batch size was another one before; the epoch after it begins with its first."""
    ppo, starts = trainer(SimpleNamespace(log_metrics=lambda *_: None)), []
    monkeypatch.setattr(ppo, "make_room", lambda: None)
    schedule: Any = SimpleNamespace(
        generate=lambda _, start, *__, **___: (starts.append(start), {}),
        unload=lambda: None, begin_ahead=lambda _, start, *__: starts.append(start),
    )  # fmt: skip
    monkeypatch.setattr(ppo, "schedule", schedule)
    end = 10
    for _ in range(3):
        _, end, _ = ppo.collect(end, 0)
    assert starts == [10, 50, 50, 80, 80, 120]


def test_epochs_are_counted_from_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's is that of its first prompt, though another may begin with the next one."""
    metrics: Any = SimpleNamespace(rank=1, log_metrics=lambda *_: None, log_table=lambda *_: None)
    ppo, made = trainer(metrics), step()
    collected: Any = SimpleNamespace(wait_for_rewards=lambda: made.scores)
    monkeypatch.setattr(ppo, "collect", lambda start, _: (collected, start + 6, {}))
    monkeypatch.setattr(ppo, "deal", lambda _: made.rollouts)
    monkeypatch.setattr(ppo, "logprobs", lambda *_, **__: dict(made.columns))
    found = []
    for ppo.consumed_samples in (0, 74, 80):
        _, logged = ppo.generate_experience()
        found.append((logged["epoch"], logged["consumed_samples"]))
    assert found == [(1, 6), (1, 80), (2, 86)]
