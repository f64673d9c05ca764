"""A PPO job put together: what its keys set, what a step makes of rollouts, what is trained on them in which order."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from small_models import SHAPE
from test_nonfinite import SETTINGS, step

from nemo_style_aligner import functional
from nemo_style_aligner.algorithms.rl_setup import build_actor
from nemo_style_aligner.architecture import ModelArchitecture
from nemo_style_aligner.config import load_defaults
from nemo_style_aligner.data.datasets import PromptItem
from nemo_style_aligner.generation.engine import GenerationStatistics
from nemo_style_aligner.models.gpt import MegatronModel, build_model
from nemo_style_aligner.models.optimizer import Schedule
from nemo_style_aligner.rl.experience import make_experience
from nemo_style_aligner.rl.loop import PPOTrainer
from nemo_style_aligner.rl.remote_critic import RemoteCritic
from nemo_style_aligner.rl.rollouts.batch import Experience
from nemo_style_aligner.rl.rollouts.collector import RolloutCollector
from nemo_style_aligner.rl.rollouts.generation_totals import GenerationTotals
from nemo_style_aligner.rl.rollouts.prompts import PromptSource
from nemo_style_aligner.rl.rollouts.setup import sampling_params
from nemo_style_aligner.rl.settings import PPOSettings

pytestmark = pytest.mark.usefixtures("one_thread", "one_rank")

# ---- what the keys set --------------------------------------------------------------------------

# Another value than the default, and the settings that change with it, to what.
KEYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "trainer.ppo.max_epochs": (2, {"ppo.max_epochs": 2, "ppo.max_steps": 8, "schedule.max_steps": 16}),
    "trainer.ppo.max_steps": (3, {"ppo.step_limit": 3, "ppo.max_steps": 3, "schedule.max_steps": 6}),
    "trainer.ppo.val_check_interval": (5, {"ppo.val_check_interval": 5, "ppo.save_interval": 5}),
    "trainer.ppo.save_interval": (3, {"ppo.save_interval": 3}),
    "trainer.ppo.gradient_clip_val": (0.5, {"optimizer.clip_grad": 0.5}),
    "trainer.ppo.on_nonfinite": ("skip", {"nonfinite.action": "skip"}),
    "trainer.ppo.max_consecutive_skips": (3, {"nonfinite.max_consecutive_skips": 3}),
    "trainer.ppo.critic_warmup_steps": (2, {"ppo.critic_warmup_steps": 2}),
    "trainer.ppo.num_ppo_epochs": (3, {"ppo.num_ppo_epochs": 3, "schedule.max_steps": 24}),
    "trainer.ppo.initial_policy_kl_penalty": (0.3, {"advantages.kl_coef": 0.3}),
    "trainer.ppo.use_absolute_kl": (False, {"advantages.kl_estimator": "k1"}),
    "trainer.ppo.kl_estimator": ("k3", {"advantages.kl_estimator": "k3"}),
    "trainer.ppo.kl_clamp": (3.0, {"advantages.kl_clamp": 3.0}),
    "trainer.ppo.discount_factor": (0.9, {"advantages.gamma": 0.9}),
    "trainer.ppo.gae_lambda": (0.8, {"advantages.lam": 0.8}),
    "trainer.ppo.normalize_advantages": (False, {"advantages.normalize": False}),
    "trainer.ppo.advantage_whitening_unbiased": (True, {"advantages.unbiased": True}),
    "trainer.ppo.mask_truncated": (False, {"advantages.mask_truncated": False}),
    "trainer.ppo.policy_logprobs": ("engine", {"ppo.takes_engine_logprobs": True}),
    "trainer.ppo.importance_weight_cap": (2.5, {"advantages.importance_weight_cap": 2.5}),
    "trainer.ppo.importance_sequence_bounds": ([0.5, 1.5], {"advantages.importance_sequence_bounds": (0.5, 1.5)}),
    "trainer.ppo.staleness": (1, {"ppo.staleness": 1, "advantages.importance_weight_cap": 2.0}),
    "trainer.ppo.reference_policy_placement": ("swap", {"actor.has_both_policies": False, "actor.keeps_passes": False}),
    "trainer.ppo.num_table_rows": (3, {"ppo.num_table_rows": 3}),
    "trainer.ppo.trt_llm.seed": (11, {"sampling.seed": 11}),
    "trainer.ppo.trt_llm.unload_engine_train": (True, {"ppo.unload_engine": True}),
    "model.seed": (5, {"ppo.seed": 5, "sampling.seed": 5}),
    "model.global_batch_size": (8, {"ppo.global_batch_size": 8, "schedule.max_steps": 4}),
    "model.micro_batch_size": (2, {"training.num_rows": 2}),
    "model.max_tokens_per_micro_batch": (99, {"training.max_tokens": 99, "forward.max_tokens": 99}),
    "model.ppo.num_rollout_samples": (16, {"schedule.max_steps": 16}),
    "model.ppo.rollout_micro_batch_size": (2, {"forward.num_rows": 2}),
    "model.ppo.forward_micro_batch_size": (3, {"forward.num_rows": 3}),
    "model.ppo.forward_max_tokens_per_micro_batch": (88, {"forward.max_tokens": 88}),
    "model.ppo.keep_activations": ("never", {"actor.keeps_passes": False}),
    "model.ppo.entropy_bonus": (0.02, {"actor.entropy_bonus": 0.02}),
    "model.ppo.ratio_eps": (0.3, {"actor.ratio_eps": 0.3}),
    "model.ppo.sampling_params.use_greedy": (True, {"sampling.use_greedy": True}),
    "model.ppo.sampling_params.temperature": (0.7, {"sampling.temperature": 0.7, "actor.temperature": 0.7}),
    "model.ppo.sampling_params.top_k": (5, {"sampling.top_k": 5}),
    "model.ppo.sampling_params.top_p": (0.9, {"sampling.top_p": 0.9}),
    "model.ppo.sampling_params.repetition_penalty": (1.1, {"sampling.repetition_penalty": 1.1}),
    "model.ppo.sampling_params.end_strings": (
        ["x", r"\x11", 4],  # as typed on a command line
        {"sampling.stop_strings": ("x", "\x11", "4")},
    ),
    "model.ppo.length_params.max_length": (9, {"sampling.max_new_tokens": 9}),
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
# Keys of these sections that others read: the launcher, the engines, the prompts, the model, the optimizer on a GPU.
ELSEWHERE = (
    "trainer.ppo.rollout_devices",
    "trainer.ppo.generation.",
    "trainer.ppo.trt_llm.",
    "trainer.ppo.batch_iterator.",
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


def settings_of(cfg: DictConfig, model: MegatronModel) -> dict[str, Any]:
    """Everything that a job's keys set of its loop, its formulas, its sampling and its policy."""
    settings = PPOSettings.from_config(cfg, steps_per_epoch=4)
    base: Any = SimpleNamespace(build=lambda trainable: small_model(trainable))
    actor = build_actor(cfg, base, model, settings)
    groups = actor.optimizer.megatron.param_groups
    loop = dataclasses.asdict(settings)
    parts: dict[str, Mapping[str, Any]] = {
        "advantages": loop.pop("advantages"),
        "nonfinite": loop.pop("nonfinite"),
        "ppo": loop,
        "sampling": dataclasses.asdict(sampling_params(cfg)),
        "training": dataclasses.asdict(actor.training_batching),
        "forward": dataclasses.asdict(actor.forward_batching),
        "schedule": dataclasses.asdict(actor.optimizer.schedule),
        "actor": {name: getattr(actor, name) for name in ("temperature", "ratio_eps", "entropy_bonus")}
        | {"has_both_policies": actor.initial_policy is not None and actor.initial_policy._second is not None}
        | {"keeps_passes": actor.kept_passes is not None},
        "optimizer": {name: {group[name] for group in groups} for name in ("weight_decay", "betas", "eps")}
        | {"clip_grad": actor.optimizer.clip_grad},
    }
    assert actor.optimizer.skips.policy == settings.nonfinite
    return {f"{part}.{name}": value for part, values in parts.items() for name, value in values.items()}


@pytest.fixture(scope="module")
def default_settings(model: MegatronModel) -> dict[str, Any]:
    return settings_of(small_job(), model)


@pytest.mark.parametrize("key", KEYS)
def test_a_key_changes_its_settings_and_no_other(
    key: str, model: MegatronModel, default_settings: dict[str, Any]
) -> None:
    value, changes = KEYS[key]
    cfg = small_job()
    OmegaConf.update(cfg, key, value)
    assert all(default_settings[name] != changes[name] for name in changes)
    assert settings_of(cfg, model) == default_settings | changes


def test_no_key_and_no_setting_is_left_out(default_settings: dict[str, Any]) -> None:
    cfg = small_job()
    keys = {key for section in SECTIONS for key in leaves(OmegaConf.select(cfg, section), section)}
    assert {key for key in keys if not key.startswith(ELSEWHERE)} <= KEYS.keys()
    fixed = {"sampling.ignore_eos", "training.group", "forward.group"}  # of benchmarks, and of other trainers
    assert default_settings.keys() - fixed == {name for _, changes in KEYS.values() for name in changes}


def leaves(section: DictConfig, path: str) -> Iterator[str]:
    """The keys beneath a section that are no sections themselves."""
    for name in section:
        key, node = f"{path}.{name}", section._get_node(name)
        yield from leaves(node, key) if isinstance(node, DictConfig) else [key]


def test_without_a_penalty_there_is_no_initial_policy(model: MegatronModel) -> None:
    cfg = small_job()
    cfg.trainer.ppo.initial_policy_kl_penalty = 0.0
    missing: Any = None
    assert build_actor(cfg, missing, model, PPOSettings.from_config(cfg, 4)).initial_policy is None


# ---- what a step makes of its rollouts ----------------------------------------------------------


def test_experience_is_what_the_formulas_say() -> None:
    """Each with its own settings and masks: the critic's targets are of all responses, the policy's loss of some."""
    made = step()
    made.rollouts.weight_versions[:] = torch.tensor([3, 3, 5, 5, 4, 4])
    settings = dataclasses.replace(
        SETTINGS, unbiased=True, kl_clamp=0.3, importance_weight_cap=1.2, importance_sequence_bounds=(0.9, 1.2)
    )
    batch, mask, logprobs = made.rollouts, made.rollouts.response_mask(), made.logprobs
    experience, metrics = make_experience(batch, made.scores, logprobs, made.init_logprobs, settings, version=5)

    kl = (logprobs - made.init_logprobs).clamp(-0.3, 0.3) * mask
    rewards = functional.token_rewards(made.scores.rewards, kl, batch.lengths, 0.1)
    advantages, returns = functional.generalized_advantage_estimation(
        made.scores.values, rewards, mask, gamma=0.9, lam=0.8
    )
    log_ratios = logprobs - batch.engine_logprobs
    ratios = ((log_ratios * mask).sum(1) / mask.sum(1)).exp()
    assert (ratios > 1.2).any() and (ratios < 0.9).any()
    kept = mask * (batch.is_end & (ratios >= 0.9) & (ratios <= 1.2))[:, None]
    in_loss = advantages[kept == 1]
    assert 1 < len(in_loss) < (mask * batch.is_end[:, None]).sum()
    torch.testing.assert_close(experience.returns, returns)
    weights = log_ratios.exp().clamp(max=1.2)
    torch.testing.assert_close(experience.importance_weights, weights * mask)
    torch.testing.assert_close(experience.advantages[kept == 1], (in_loss - in_loss.mean()) / in_loss.std())
    assert torch.equal(experience.mask, mask) and torch.equal(experience.policy_mask, kept)

    def of_sequences(x: torch.Tensor) -> float:
        return ((x * mask).sum(1) / mask.sum(1)).mean().item()

    log_ratio, used = log_ratios[mask == 1], weights[kept == 1]
    expected = {
        "init_policy_kl": of_sequences(kl),
        "rewards_with_kl": of_sequences(rewards),
        "generation_length": (batch.lengths - batch.prompt_lengths).float().mean().item(),
        "staleness_mean": 1.0,
        "staleness_max": 2.0,
        "importance_truncated": (log_ratios.exp() > 1.2)[kept == 1].float().mean().item(),
        "importance_weights": used.mean().item(),
        "importance_effective_share": (used.sum() ** 2 / (len(used) * used.square().sum())).item(),
        "importance_masked_sequences": ((ratios > 1.2) | (ratios < 0.9)).float().mean().item(),
        "engine_kl": (log_ratio.exp() - 1 - log_ratio).mean().item(),
        "engine_logprob_gap_mean": log_ratio.abs().mean().item(),
        "engine_logprob_gap_max": log_ratio.abs().max().item(),
        "rewards": made.scores.rewards.mean().item(),
        "prompt_lengths": batch.prompt_lengths.float().mean().item(),
        "response_lengths": batch.lengths.float().mean().item(),
        "fraction_of_samples_properly_ended": batch.is_end.float().mean().item(),
    }
    moments = {"advantages": advantages, "returns": returns, "values": made.scores.values}
    for name, values in moments.items():
        expected[f"{name}_mean"] = values[mask == 1].mean().item()
        expected[f"{name}_std"] = values[mask == 1].std(unbiased=False).item()
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert metrics.keys() - expected.keys() == {"rollout_size", "nonfinite_samples"}

    settings = dataclasses.replace(
        settings, normalize=False, importance_weight_cap=None, importance_sequence_bounds=None
    )
    experience, metrics = make_experience(batch, made.scores, logprobs, made.init_logprobs, settings, version=5)
    torch.testing.assert_close(experience.advantages, advantages)
    assert torch.all(experience.importance_weights == 1) and not any("importance" in name for name in metrics)


def test_samples_are_shown_without_their_padding() -> None:
    made = step()
    missing: Any = None
    tokenizer: Any = SimpleNamespace(ids_to_text=str)
    collector = RolloutCollector(missing, missing, tokenizer, scoring_batch_size=1, scoring_seconds=1.0)
    shown = collector.sample_table(made.rollouts, made.scores, num_rows=3)
    tokens = made.rollouts.tokens.tolist()
    assert len(shown) == 3
    assert shown[2] == (str(tokens[2][:1]), str(tokens[2][1:5]), made.scores.rewards[2].item())


def test_active_slots_are_the_mean_of_a_pass() -> None:
    statistics = GenerationStatistics(steps=4, active_slot_steps=10)
    engine: Any = SimpleNamespace(statistics=statistics, num_compilations=0)
    totals = GenerationTotals()
    totals.add(engine, seconds=2.0)
    assert totals.metrics(engine, is_leader=True)["active_slots"] == 2.5


def test_policy_and_critic_are_trained_on_what_is_theirs() -> None:
    names = [field.name for field in dataclasses.fields(Experience)]
    numbers = torch.arange(len(names) * 6.0).view(len(names), 3, 2)  # all different
    experience = Experience(**dict(zip(names, numbers, strict=True)))
    batch = PPOTrainer._policy_batch(experience, torch.tensor([2, 0]))
    theirs = {"mask": "policy_mask", "old_logprobs": "logprobs"}
    for field in dataclasses.fields(batch):
        expected = getattr(experience, theirs.get(field.name, field.name))[[2, 0]]
        assert torch.equal(getattr(batch, field.name), expected), field.name
    sent: list[torch.Tensor] = []
    client: Any = SimpleNamespace(train_async=lambda *tensors: sent.extend(tensors))
    journal: Any = object()
    RemoteCritic(client, journal, "refuse").start_training(experience)
    assert list(map(id, sent)) == [id(getattr(experience, name)) for name in ("tokens", "returns", "values", "mask")]


# ---- the trainer --------------------------------------------------------------------------------


def trainer(metrics: Any = None, **ppo: Any) -> PPOTrainer:
    """With 100 prompts, of which a step takes 40, and without what generates and learns."""
    missing: Any = None
    cfg = small_job()
    cfg.trainer.ppo.update(save_interval=0, **ppo)
    actor: Any = SimpleNamespace(model=None, optimizer=SimpleNamespace(schedule=Schedule(lr=1.0, max_steps=9)))
    prompts = PromptSource([PromptItem([i], "", {}) for i in range(100)], 40, 7, True)
    collector: Any = SimpleNamespace(sample_table=lambda *_: [])
    nothing: Any = SimpleNamespace(
        start_training=lambda experience: None, poll=lambda: None, check=lambda ahead=None: None,
        section=lambda name: contextlib.nullcontext(),
    )  # fmt: skip
    timer: Any = lambda name: contextlib.nullcontext()  # noqa: E731
    return PPOTrainer(
        PPOSettings.from_config(cfg, 2), actor, collector, nothing, prompts, missing, nothing, metrics, nothing, timer
    )


def test_training_starts_over_with_the_prompts_of_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round has others, and random numbers of its own."""
    ppo, asked = trainer(critic_warmup_steps=2), []

    def generate(offset: int, stream: int) -> tuple[None, None]:
        asked.append((offset, stream))
        ppo.consumed_samples = offset + 40
        return None, None

    monkeypatch.setattr(ppo, "generate_experience", generate)
    monkeypatch.setattr(ppo, "wait_for_critic", lambda training: None)
    ppo.warm_up()
    assert asked == [(0, 1), (40, 2)] and ppo.consumed_samples == 0


def test_every_pass_over_the_rollouts_has_an_order_of_its_own() -> None:
    ppo, orders = trainer(), set()
    for ppo.step in (0, 1):
        for epoch in (0, 1):
            orders.add(tuple(torch.cat(list(ppo._minibatches(8, epoch))).tolist()))
    assert len(orders) == 4 and all(sorted(order) == list(range(8)) for order in orders)


def test_epochs_are_counted_from_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's is that of its first prompt, though another may begin with the next one."""
    metrics: Any = SimpleNamespace(rank=1, log_metrics=lambda *_: None, log_table=lambda *_: None)
    ppo, made = trainer(metrics), step()
    monkeypatch.setattr(ppo, "_rollouts", lambda *_: (made.rollouts, made.scores, made.logprobs, made.init_logprobs))
    found = []
    for ppo.consumed_samples in (0, 74, 80):
        _, logged = ppo.generate_experience()
        found.append((logged["epoch"], logged["consumed_samples"]))
    assert found == [(1, 6), (1, 80), (2, 86)]
