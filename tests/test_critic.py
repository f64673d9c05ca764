"""Reward heads, and the critic beside the reward model."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from trained_models import ADAM, ARCHITECTURES, OPTIM, saved_tokenizer, tokens

from nemo_style_aligner.engine.parallel.groups import current_layout
from nemo_style_aligner.errors import NonFiniteError
from nemo_style_aligner.trainer.checkpoints.nemo_archive import save_nemo
from nemo_style_aligner.trainer.checkpoints.settings import CheckpointSettings
from nemo_style_aligner.trainer.checkpoints.training import CheckpointManager
from nemo_style_aligner.trainer.config import schema
from nemo_style_aligner.trainer.config.loading import load_defaults
from nemo_style_aligner.trainer.config.schema import Updates
from nemo_style_aligner.trainer.jobs.job_setup import Run
from nemo_style_aligner.trainer.jobs.service_setup import build_critic_service
from nemo_style_aligner.trainer.models.critic import Critic, RewardModel, ValueBatch
from nemo_style_aligner.trainer.models.frozen import FrozenWeights
from nemo_style_aligner.trainer.models.gpt import MegatronModel, build_model
from nemo_style_aligner.trainer.models.heads import RewardHeadConfig, merge_attributes, pool_rewards
from nemo_style_aligner.trainer.models.nonfinite import STOP
from nemo_style_aligner.trainer.models.optimizer import Optimizer, Schedule
from nemo_style_aligner.trainer.models.packing import MicroBatching
from nemo_style_aligner.trainer.models.restore import lay_over, open_base_model
from nemo_style_aligner.trainer.models.supervised_losses import (
    LabelledBatch,
    PairBatch,
    attribute_regression_objective,
    ranking_objective,
    with_deviations,
)
from nemo_style_aligner.trainer.services.critic_service import CriticService
from nemo_style_aligner.trainer.services.exactly_once.ledger import TrainingLedger
from nemo_style_aligner.trainer.telemetry.metrics import MetricsLogger, read_metrics
from nemo_style_aligner.trainer.training.run_control import RunControl

pytestmark = pytest.mark.usefixtures("one_thread", "one_rank")


def test_pooling() -> None:
    outputs = torch.arange(24.0).reshape(2, 4, 3)
    lengths = torch.tensor([2, 4])
    last = pool_rewards(outputs, lengths, RewardHeadConfig(num_attributes=3))
    assert last.tolist() == [[3, 4, 5], [21, 22, 23]]
    average = pool_rewards(outputs, lengths, RewardHeadConfig(num_attributes=3, pooling="average"))
    assert average.tolist() == [[1.5, 2.5, 3.5], [16.5, 17.5, 18.5]]
    merged = RewardHeadConfig(num_attributes=3, merge_attributes=True, attribute_weights=(1.0, 0.0, -2.0))
    assert pool_rewards(outputs, lengths, merged).tolist() == [[3 - 10.0], [21 - 46.0]]
    equal = RewardHeadConfig(num_attributes=3, merge_attributes=True)
    torch.testing.assert_close(pool_rewards(outputs, lengths, equal), torch.tensor([[4.0], [22.0]]))
    assert merge_attributes(outputs, merged).shape == (2, 4)
    scaled = RewardHeadConfig(merge_attributes=True, attribute_weights=(2.0,))  # rewards as values are
    assert pool_rewards(outputs[..., :1], lengths, scaled).flatten().tolist() == [6, 42]
    assert merge_attributes(outputs[..., :1], scaled)[:, 3].tolist() == [18, 42]
    standardised = RewardHeadConfig(num_attributes=3, mean=1.0, std=2.0)
    assert pool_rewards(outputs, lengths, standardised).tolist() == [[1, 1.5, 2], [10, 10.5, 11]]


def test_head_config_reads_nemo_aligners_keys() -> None:
    config: dict[str, Any] = {
        "reward_model_type": "regression",
        "regression": {"num_attributes": 2, "merge_attributes": True, "attribute_weights": [0.25, 0.75]},
        "use_avg_pool": True,
        "force_head_dtype": "torch.bfloat16",
        "reward_standardization": {"enable": True, "mean": 0.5, "std": 2},
    }
    assert RewardHeadConfig.from_model_config(config) == RewardHeadConfig(
        2, "average", torch.bfloat16, True, (0.25, 0.75), 0.5, 2.0
    )
    config["regression"]["merge_attributes"] = False
    assert RewardHeadConfig.from_model_config(config, merge_attributes=True).merge_attributes
    # A ranking model has one output, whatever the regression section says.
    ranking = {"reward_model_type": "binary_ranking", "regression": {"num_attributes": 2}}
    assert RewardHeadConfig.from_model_config(ranking) == RewardHeadConfig()


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"reward_model_type": "pairwise"}, "binary_ranking or regression"),
        ({"reward_model_type": "regression", "regression": {"attribute_weights": [1, 2]}}, "2 entries"),
        ({"force_head_dtype": "float16"}, "float32 or bfloat16"),
        ({"reward_standardization": {"enable": True, "mean": 1.0, "std": 0}}, "needs both mean and std"),
    ],
)
def test_head_config_errors(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RewardHeadConfig.from_model_config(wrong)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rewards_ignore_what_follows_the_sequence(dtype: torch.dtype) -> None:
    """The reward at a sequence's end is that of the sequence alone, unpadded; the head keeps its own dtype."""
    head = RewardHeadConfig(num_attributes=2, dtype=torch.float32)
    model = build_model(ARCHITECTURES["llama"], {}, dtype, head=head, trainable=False)
    assert model.gpt.rm_head.weight.dtype == torch.float32
    reward_model = RewardModel(model, head, MicroBatching(2))
    ids, lengths = tokens(), torch.tensor([3, 12, 1, 7, 9])
    together = reward_model.rewards(ids, lengths)
    assert together.shape == (5, 2) and together.dtype == torch.float32
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    for row, length in enumerate(lengths.tolist()):
        alone = reward_model.rewards(ids[row : row + 1, :length], torch.tensor([length]))
        torch.testing.assert_close(together[row : row + 1], alone, atol=tolerance, rtol=0)


def test_the_critic_answers_a_request_whose_updates_were_skipped(tmp_path: Path) -> None:
    """With a number, and the next request is applied as if this one had not been; under `stop` it answers nothing."""
    head = RewardHeadConfig()
    model = build_model(ARCHITECTURES["llama"], {"optim": OPTIM}, torch.float32, head=head)
    optimizer = Optimizer(
        model, ADAM, Schedule(lr=1e-2, name="constant"), 1.0, Updates(on_nonfinite="skip", max_consecutive_skips=9)
    )
    batching = MicroBatching(2)
    critic = Critic(
        model,
        optimizer,
        head,
        training_batching=batching,
        global_batch_size=2,
        forward_batching=batching,
        loss_clip=0.2,
    )
    polls: list[int] = []
    checkpoints: Any = SimpleNamespace(poll=lambda: polls.append(service.step))
    service = CriticService(critic, None, TrainingLedger(), checkpoints, MetricsLogger(tmp_path, 0), reset=lambda: None)

    def train(first: float, second: float) -> float:
        """Two updates of two rows each."""
        returns = torch.tensor([first, first, second, second])[:, None].expand(4, 11).contiguous()
        return service.train(tokens(4), returns, torch.zeros(4, 11), torch.ones(4, 11))

    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    too_large = 1e30  # its square is infinite
    assert train(too_large, too_large) == 0.0
    assert service.step == 0 and all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    loss = train(too_large, 1.0)  # the mean of the updates that were applied, which is one
    assert service.step == 1 and optimizer.skips.total == 3
    optimizer.skips.policy = STOP
    with pytest.raises(NonFiniteError, match=r"rows 2 to 3 of training request 1 "):
        train(1.0, too_large)
    assert polls == [0, 0, 1]  # a checkpoint that has been written is noticed before the updates, not at the next save
    service.metrics.close()
    logged = read_metrics(tmp_path)
    assert logged["train/skipped_updates"][-1][1] == 3.0
    assert 0.0 < loss < 10.0 and [value for _, value in logged["train/loss"]] == pytest.approx([loss])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_critic_and_reward_model_exchange_weights_once_per_request(dtype: torch.dtype, tmp_path: Path) -> None:
    """The service's answers, training, saves and restores are those of two models that are there side by side."""
    head, batching, architecture = RewardHeadConfig(), MicroBatching(2), ARCHITECTURES["llama"]
    ids, lengths, ones = tokens(4), torch.tensor([12, 5, 9, 12]), torch.ones(4, 11)
    start: list[dict[str, torch.Tensor]] = []

    def serve(placement: Any) -> tuple[list[torch.Tensor], list[int]]:
        """Everything that can be seen of a service, and how many swaps there were after each inference."""
        model = build_model(architecture, {"optim": OPTIM}, dtype, head=head)
        if start:
            for name, parameter in model.named_parameters():
                parameter.data.copy_(start[0][name])
        else:
            start.append(weights(model))
        frozen = FrozenWeights(
            model, placement, lambda: build_model(architecture, {}, dtype, head=head, trainable=False)
        )
        optimizer = Optimizer(model, ADAM, Schedule(lr=1e-2, name="constant"), 1.0)
        critic = Critic(
            model, optimizer, head,
            training_batching=batching, global_batch_size=2, forward_batching=batching, loss_clip=0.2,
        )  # fmt: skip
        checkpoints = CheckpointManager(tmp_path / placement, CheckpointSettings())
        metrics = MetricsLogger(tmp_path, 1)

        def reset() -> None:
            for name, parameter in model.named_parameters():
                parameter.data.copy_(start[0][name])
            critic.optimizer = Optimizer(model, ADAM, Schedule(lr=1e-2, name="constant"), 1.0)

        ledger = TrainingLedger()
        service = CriticService(critic, RewardModel(frozen, head, batching), ledger, checkpoints, metrics, reset)
        seen: list[torch.Tensor] = []
        swaps = []

        def infer(times: int) -> None:
            for _ in range(times):
                answer = service.infer(ids, lengths)
                seen.extend([answer["rewards"], answer["values"]])
                swaps.append(service.reward_model.num_swaps)

        infer(3)
        for _ in range(2):
            service.train(ids, ones, 0 * ones, ones)
            seen.extend(weights(model).values())
            infer(2)
        infer(1)  # the reward model's weights are in place
        service.save("a run's").result()
        seen.extend(weights(model).values())
        (path,) = checkpoints.trainer_states()
        infer(1)
        service.train(ids, -ones, ones, ones)
        infer(1)
        service.ledger.history = "elsewhere"
        assert service.restore("a run", [checkpoints.trainer_states()[path]["ledger"]["history"]]) == 0
        seen.extend(weights(model).values())
        infer(3)
        service.train(ids, -ones, ones, ones)
        seen.extend(weights(model).values())
        return seen, swaps

    def weights(model: MegatronModel) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    (beside, none), (exchanged, swaps) = serve("resident"), serve("swap")
    assert len(beside) == len(exchanged) and all(map(torch.equal, beside, exchanged))
    assert set(none) == {0} and swaps[:3] == [1, 1, 2]


def test_an_error_while_weights_are_exchanged_leaves_the_model_right() -> None:
    model = build_model(ARCHITECTURES["tied"], {}, torch.float32, trainable=False)
    first = {name: p.detach().clone() for name, p in model.named_parameters()}
    frozen = FrozenWeights(model, "swap", lambda: model)
    own = {name: p.data.add_(1.0).clone() for name, p in model.named_parameters()}

    def has(expected: dict[str, torch.Tensor]) -> bool:
        return all(torch.equal(p, expected[name]) for name, p in model.named_parameters())

    broken = list(own)[3]  # some parameters are exchanged before it, some are not
    kept, frozen._frozen[broken] = frozen._frozen[broken], torch.ones(7, 7, 7)
    with pytest.raises(RuntimeError, match="size"), frozen.active():
        pytest.fail("these weights should not be in use")
    assert has(own) and not frozen.is_in_place
    frozen._frozen[broken] = kept
    with frozen.active():
        assert has(first)
    assert has(own)


def test_values_are_standardised_as_rewards_are() -> None:
    """The critic's, in answers and in its loss; NeMo-Aligner's critic does so. Reward models learn without."""
    plain = RewardHeadConfig()
    head = dataclasses.replace(plain, mean=5.0, std=2.0)
    torch.manual_seed(3)
    model = build_model(ARCHITECTURES["llama"], {"optim": OPTIM}, torch.float32, head=plain)
    optimizer = Optimizer(model, ADAM, Schedule(lr=0.0, name="constant"), 1.0, STOP)
    settings: dict[str, Any] = {"training_batching": MicroBatching(2), "forward_batching": MicroBatching(2)}
    critics = {
        h.std: Critic(model, optimizer, h, global_batch_size=4, loss_clip=0.2, **settings) for h in (plain, head)
    }
    ids, lengths = tokens(4), torch.tensor([12, 5, 9, 12])
    values = critics[None].values(ids, lengths)
    mask = torch.arange(11)[None, :] < lengths[:, None] - 1
    standardised = critics[2.0].values(ids, lengths)
    torch.testing.assert_close(standardised, (values - 5.0) / 2.0 * mask)
    batch = ValueBatch(ids, standardised + 0.5, standardised, mask.float())
    (report,) = critics[2.0].train(batch)
    assert report["loss"] == pytest.approx(0.5**2 / 2, rel=1e-4)  # nothing has moved, so nothing is clipped
    for objective, batch in (
        (ranking_objective, PairBatch(ids, lengths, torch.ones(4))),
        (lambda h: attribute_regression_objective(h, -100.0), LabelledBatch(ids, lengths, torch.ones(4, 1))),
    ):
        outputs = torch.randn(4, 12, 1)
        losses = [objective(h).loss(outputs, batch)[0] for h in (plain, head)]
        assert losses[0] == losses[1]


def test_a_critic_made_of_a_language_model_goes_back_to_its_first_head(tmp_path: Path) -> None:
    """The archive has no head; training from the start again, as the recovery of a run asks, gives the same weights."""
    save_nemo(
        tmp_path / "sft.nemo",
        build_model(ARCHITECTURES["llama"], {}, torch.float32, trainable=False),
        ARCHITECTURES["llama"].to_nemo_config(),
        saved_tokenizer(tmp_path / "tokenizer"),
    )
    changes = {
        "pretrained_checkpoint": {"restore_from_path": str(tmp_path / "sft.nemo")},
        "trainer": {"ppo": {"combine_rm_and_critic_server": False}},
        "model": {"global_batch_size": 4, "optim": {"lr": 1e-2, "sched": {"name": "constant", "warmup_steps": 0}}},
    }
    cfg = OmegaConf.merge(load_defaults("gpt_ppo_critic"), changes)
    assert isinstance(cfg, DictConfig)
    base, config = open_base_model(cfg.pretrained_checkpoint.restore_from_path, schema.Critic.read(cfg))
    checkpoints, metrics = CheckpointManager(tmp_path / "checkpoints", CheckpointSettings()), MetricsLogger(tmp_path, 0)
    run = Run(tmp_path, current_layout(), metrics, RunControl(), checkpoints)
    service = build_critic_service(config, run, base, TrainingLedger())

    def weights() -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in service.critic.model.named_parameters()}

    stages = [weights()]
    for _ in range(2):
        for seed in range(3):
            service.train(tokens(4, seed=seed), torch.ones(4, 11), torch.zeros(4, 11), torch.ones(4, 11))
        stages.append(weights())
        service.reset()
        stages.append(weights())
    first, trained, back, trained_again, back_again = stages
    assert "rm_head.weight" in first and not torch.equal(trained["rm_head.weight"], first["rm_head.weight"])
    for name, values in first.items():
        assert torch.equal(back[name], values) and torch.equal(back_again[name], values), name
        assert torch.equal(trained_again[name], trained[name]), name


def test_rewards_of_pairs_have_their_mean_and_deviation() -> None:
    head = RewardHeadConfig()
    outputs, lengths = torch.randn(6, 5, 1), torch.tensor([5, 2, 3, 4, 1, 1])
    batch = PairBatch(torch.zeros(6, 5, dtype=torch.long), lengths, torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 0.0]))
    _, count, sums = ranking_objective(head).loss(outputs, batch)
    metrics = with_deviations({name: float(value / count) for name, value in sums.items()})
    rewards = outputs[torch.arange(4), lengths[:4] - 1, 0]
    assert metrics["rewards_all_mean"] == pytest.approx(rewards.mean().item())
    assert metrics["rewards_all_std"] == pytest.approx(rewards.std(unbiased=False).item())
    assert with_deviations({"loss": 1.0, "x_mean": math.nan, "x_mean_square": math.nan}).keys() == {"loss", "x_mean"}


@pytest.mark.parametrize("job", ["gpt_ppo_critic", "inference_rm"])
def test_rewards_are_read_as_the_reward_model_was_trained(job: str) -> None:
    """What shapes the head comes with the archive, unless the job's config says otherwise."""
    archive = {
        "reward_model_type": "regression",
        "regression": {"num_attributes": 2, "attribute_weights": [0.25, 0.75]},
        "use_avg_pool": True,
    }
    cfg = load_defaults(job)
    head = RewardHeadConfig.from_model_config(lay_over(archive, OmegaConf.to_container(cfg.model)))
    assert (head.num_attributes, head.attribute_weights, head.pooling) == (2, (0.25, 0.75), "average")
    cfg.model.use_avg_pool = False
    head = RewardHeadConfig.from_model_config(lay_over(archive, OmegaConf.to_container(cfg.model)))
    assert head.pooling == "last"
