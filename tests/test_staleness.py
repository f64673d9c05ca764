"""Generation on ranks of its own: in its step it changes nothing, a step ahead it is what is written on it."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from job_processes import ROOT, run
from multirank_staleness import NUM_SAMPLES, STEPS, UPDATES_PER_STEP
from safetensors.torch import load_file

from nemo_style_aligner.engine.contract import GenerationResult
from nemo_style_aligner.engine.parallel.groups import single_process
from nemo_style_aligner.trainer.config.loading import load_defaults
from nemo_style_aligner.trainer.config.schema import PPOActor
from nemo_style_aligner.trainer.launch import roles
from nemo_style_aligner.trainer.launch.roles import Channel, Wait
from nemo_style_aligner.trainer.launch.stop_signals import StopEarlyError
from nemo_style_aligner.trainer.rl.episodes.runner import Episode
from nemo_style_aligner.trainer.rl.rollouts import disaggregated
from nemo_style_aligner.trainer.rl.rollouts.disaggregated import (
    KeptRound,
    RemoteGenerator,
    RemoteRound,
    pack_request,
    pack_response,
    pack_results,
    unpack_request,
    unpack_results,
)
from nemo_style_aligner.trainer.rl.rollouts.in_flight import Carried, EngineShare
from nemo_style_aligner.trainer.rl.rollouts.schedule import GenerationSchedule
from nemo_style_aligner.trainer.rl.sample import Prompt
from nemo_style_aligner.trainer.telemetry.metrics import read_metrics
from nemo_style_aligner.trainer.telemetry.timers import ScopedTimer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

Tensors = dict[str, torch.Tensor]
UNTIMED = re.compile(r"(?!timers/|generation/)")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("staleness")
    run([sys.executable, str(ROOT / "tests" / "multirank_staleness.py"), str(folder)], folder / "ways.log", 400)
    return folder


@pytest.fixture(scope="module")
def trained(folder: Path) -> Callable[[str], Tensors]:
    return lambda way: load_file(folder / f"{way}.safetensors")


@pytest.fixture(scope="module")
def curves(folder: Path) -> Callable[[str], dict[str, list[tuple[int, float]]]]:
    def load(way: str) -> dict[str, list[tuple[int, float]]]:
        found = read_metrics(folder / "logs" / way)
        return {name: points for name, points in found.items() if UNTIMED.match(name)}

    return load


def test_the_runs_are_ones_that_could_differ(trained: Callable[[str], Tensors]) -> None:
    together, still = trained("together"), trained("together_lr0")
    assert (together["policy.model.norm.weight"] != still["policy.model.norm.weight"]).any()
    assert torch.equal(together["0.tokens"], still["0.tokens"])
    for step in range(1, STEPS):
        assert not torch.equal(together[f"{step}.tokens"], still[f"{step}.tokens"]), step
        assert together[f"{step}.advantages"].std() > 0.1
        assert together[f"{step}.learns"].sum() > 1


@pytest.mark.parametrize("way", ["apart", pytest.param("apart_pp2_to_tp2", marks=pytest.mark.long)])
def test_generating_on_other_ranks_changes_nothing(
    trained: Callable[[str], Tensors], curves: Callable[[str], dict[str, list[tuple[int, float]]]], way: str
) -> None:
    """On-policy: bit for bit with the training ranks' layout as it was; up to rounding with others."""
    expected, tensors = trained("together"), trained(way)
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        if way == "apart" or not tensor.is_floating_point():
            assert torch.equal(tensors[name], tensor), name
        else:
            torch.testing.assert_close(tensors[name], tensor, atol=1e-4, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")
    for name in ("together", way):
        assert [value for _, value in curves(name)["train_rollouts/staleness_max"]] == [0.0] * STEPS


def test_curves_are_those_of_ranks_that_do_both(curves: Callable[[str], dict[str, list[tuple[int, float]]]]) -> None:
    """Validation, too: it generates with the newest weights."""
    assert curves("apart") == curves("together")
    assert [step for step, _ in curves("apart")["val_rollouts/rewards"]] == [0, 2, 4, 5]


def test_the_engines_log_probs_serve_as_the_policys(
    trained: Callable[[str], Tensors], curves: Callable[[str], dict[str, list[tuple[int, float]]]]
) -> None:
    """policy_logprobs=engine: the same run up to rounding, without the pass."""
    assert all(dict(curves("together")["train_rollouts/engine_logprob_gap_max"]).values())
    assert not [name for name in curves("engine_logprobs") if "engine_" in name]  # nothing to compare with
    for name, tensor in trained("together").items():
        other = trained("engine_logprobs")[name]
        torch.testing.assert_close(other, tensor, atol=1e-4, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")


def test_a_step_ahead_with_weights_that_stay_is_on_policy(
    trained: Callable[[str], Tensors], curves: Callable[[str], dict[str, list[tuple[int, float]]]]
) -> None:
    """The same prompts, random streams and, up to rounding, numbers; only that updates, without effect, were made in
    between."""
    expected, tensors = trained("together_lr0"), trained("stale_lr0")
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        if name.endswith(".versions"):
            continue
        if tensor.is_floating_point():
            torch.testing.assert_close(tensors[name], tensor, atol=1e-4, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")
        else:
            assert torch.equal(tensors[name], tensor), name
    updates_behind = [value for _, value in curves("stale_lr0")["train_rollouts/staleness_max"]]
    assert updates_behind == [0.0] + [UPDATES_PER_STEP] * (STEPS - 1)


def test_a_step_ahead_the_weights_are_those_of_the_step_before(
    trained: Callable[[str], Tensors], curves: Callable[[str], dict[str, list[tuple[int, float]]]]
) -> None:
    """The run itself has seen (`Critic`) that a step's responses are there before the step before has trained."""
    stale, still, together = trained("stale"), trained("stale_lr0"), trained("together")
    # Two steps have the initial weights: the first, and the second, whose rollouts were made while the first trained.
    for step in (0, 1):
        assert torch.equal(stale[f"{step}.tokens"], still[f"{step}.tokens"]), step
    assert not torch.equal(stale["2.tokens"], still["2.tokens"])
    assert not torch.equal(stale["1.tokens"], together["1.tokens"])
    # With the same weights the engine's log-probs are the trainer's; a step ahead the weights say how they differ.
    weights = [stale[f"{step}.importance_weights"][stale[f"{step}.mask"] != 0] for step in range(STEPS)]
    assert (weights[0] - 1).abs().max() < 1e-4
    assert all((w - 1).abs().max() > 0.05 and w.max() <= 2.0 for w in weights[1:])
    assert torch.equal(stale["1.importance_weights"].isfinite(), torch.ones_like(stale["1.mask"], dtype=torch.bool))
    # The engine's log-probs of step 1 are those of the initial weights, which the other run's trainer computes.
    ratio = (stale["1.old_logprobs"] - still["1.old_logprobs"]).exp().clamp(max=2.0) * stale["1.mask"]
    torch.testing.assert_close(stale["1.importance_weights"], ratio, atol=1e-3, rtol=1e-3)

    logged = curves("stale")
    for name in ("staleness_mean", "staleness_max"):  # both: it is that of every response
        values = [value for _, value in logged[f"train_rollouts/{name}"]]
        assert values == [0.0] + [UPDATES_PER_STEP] * (STEPS - 1), name
    assert [value for _, value in logged["val_rollouts/staleness_max"]] == [0.0] * 4
    for name in ("importance_weights", "importance_truncated", "importance_effective_share"):
        assert len(logged[f"train_rollouts/{name}"]) == STEPS
    assert all(0 < value <= 1 for _, value in logged["train_rollouts/importance_effective_share"])


def test_sequences_beyond_the_bounds_give_no_gradient(
    trained: Callable[[str], Tensors], curves: Callable[[str], dict[str, list[tuple[int, float]]]]
) -> None:
    stale, still = trained("stale"), trained("stale_lr0")
    mask = stale["1.mask"]
    means = ((stale["1.old_logprobs"] - still["1.old_logprobs"]).double() * mask).sum(1) / mask.sum(1)
    inside = (means.exp() >= 0.9) & (means.exp() <= 1.1)
    assert torch.equal(stale["1.learns"] != 0, inside)
    masked = [value for _, value in curves("stale")["train_rollouts/importance_masked_sequences"]]
    assert masked[1] == pytest.approx(1 - inside.double().mean().item())
    assert masked[0] == 0 < max(masked)


def test_waiting_is_named(folder: Path) -> None:
    logged = read_metrics(folder / "logs" / "stale")
    assert [step for step, _ in logged["timers/step/rollout_time/generate"]] == [1]
    assert [step for step, _ in logged["timers/step/rollout_time/rollout_wait"]] == [2, 3, 4, 5]
    for name in ("generation/seconds", "generation/idle_seconds"):
        assert len(logged[name]) == STEPS and all(value > 0 for _, value in logged[name])


LONG = pytest.mark.long


@pytest.mark.parametrize(
    "way",
    [
        *("stale", "two", "keep", "redrawn"),
        *(pytest.param(name, marks=LONG) for name in ("redrawn_wait", "keep_two", "restart", "keep_four")),
    ],
)
def test_stopped_and_resumed_is_as_if_never_stopped(
    folder: Path,
    trained: Callable[[str], Tensors],
    curves: Callable[[str], dict[str, list[tuple[int, float]]]],
    way: str,
) -> None:
    """While a step trains and the next one's responses are under way; between a step's responses and its training; by a
    signal that only the rollout rank got; in the last validation. The responses are in the checkpoint: the weights that
    made them are gone. So is what had begun, without being part of a step."""
    expected, tensors = trained(way), trained(f"{way}_stopped")
    assert tensors.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(tensors[name], expected[name])] == []
    assert curves(f"{way}_stopped") == curves(way)
    state, undisturbed = (_last_state(folder / "logs" / name) for name in (f"{way}_stopped", way))
    assert state == undisturbed
    assert (state["step"], state["is_validation_due"]) == (STEPS, False) and "val_rewards" in state["metrics"]


def test_two_steps_ahead_the_weights_are_those_of_two_steps_before(
    trained: Callable[[str], Tensors], curves: Callable[[str], dict[str, list[tuple[int, float]]]]
) -> None:
    """The run itself has seen (`Critic`) that both are generated while a step trains."""
    two, still = trained("two"), trained("stale_lr0")
    for step in (0, 1, 2):
        assert torch.equal(two[f"{step}.tokens"], still[f"{step}.tokens"]), step
    assert not torch.equal(two["3.tokens"], still["3.tokens"])
    assert torch.equal(
        two["1.importance_weights"], trained("stale")["1.importance_weights"]
    )  # until then nothing differs
    ages = [value for _, value in curves("two")["train_rollouts/staleness_mean"]]
    assert ages == [UPDATES_PER_STEP * age for age in (0, 1, 2, 2, 2)]


def test_responses_go_on_with_new_weights(trained: Callable[[str], Tensors], folder: Path) -> None:
    """Some tokens of a response are of other weights than the rest; a step's groups are the first to finish."""
    kept = trained("keep")
    ids = [kept[f"{step}.prompt_ids"] for step in range(STEPS)]
    assert all(torch.equal(of[::2], of[1::2]) for of in ids)  # groups stay together
    everything, in_order = torch.cat(ids), torch.cat([trained("stale")[f"{step}.prompt_ids"] for step in range(STEPS)])
    # Half as many prompts as there: the first ones, each once, though not in their order.
    assert sorted(everything[::2].tolist()) == sorted(in_order[: len(everything) // 2].tolist())
    assert everything[::2].tolist() != in_order[: len(everything) // 2].tolist()
    mixed = 0
    for step in range(STEPS):
        lengths = kept[f"{step}.mask"].sum(1).int().tolist()
        for versions in kept[f"{step}.versions"].split(lengths):
            assert versions.diff().ge(0).all()
            mixed += len(versions.unique()) > 1
            assert versions.max() <= UPDATES_PER_STEP * max(0, step - 1)
    assert mixed > 3
    logged = read_metrics(folder / "logs" / "keep")
    ages = [dict(logged[f"train_rollouts/staleness_{name}"]) for name in ("mean", "max")]
    assert all(ages[0][step] <= ages[1][step] for step in ages[0])
    assert any(ages[0][step] < ages[1][step] for step in ages[0])
    assert max(value for _, value in logged["generation/carried_tokens"]) > 0


@pytest.mark.parametrize("way", ["redrawn", pytest.param("redrawn_wait", marks=LONG)])
def test_a_step_takes_more_rounds_in_place_of_groups_that_teach_nothing(
    trained: Callable[[str], Tensors], curves: Callable[[str], dict[str, list[tuple[int, float]]]], way: str
) -> None:
    """As many as it needs of those that were begun ahead, whose prompts follow each other."""
    logged = curves(way)
    rounds = [int(value) for _, value in logged["train_rollouts/sampling_rounds"]]
    assert max(rounds) > 1 and sum(rounds) > STEPS
    consumed = [int(value) for _, value in logged["train_rollouts/consumed_samples"]]
    prompts = NUM_SAMPLES // 2
    assert consumed == [prompts * sum(rounds[: step + 1]) for step in range(STEPS)]
    assert all(value > 0 for _, value in logged["train_rollouts/dropped_samples"])
    tensors = trained(way)
    first, second = (set(tensors[f"{step}.prompt_ids"].tolist()) for step in (0, 1))
    assert not first & second  # of one epoch


def test_a_response_that_goes_on_has_the_log_probs_of_its_weights(trained: Callable[[str], Tensors]) -> None:
    """With weights that stay the trainer's are the engine's, whatever was computed again."""
    still = trained("keep_lr0")
    for step in range(STEPS):
        weights = still[f"{step}.importance_weights"][still[f"{step}.mask"] != 0]
        assert (weights - 1).abs().max() < 1e-4, step
        assert len(still[f"{step}.versions"].unique()) > 1 or step < 2  # they only count as others


def test_every_round_has_random_numbers_of_its_own_and_a_step_ahead_its_steps() -> None:
    seeds: list[int] = []
    trained: list[bool] = []

    class Generator(RemoteGenerator):
        weight_version = 0
        is_ahead = False

        def __init__(self) -> None:
            pass

        def start(self, prompts: Any, seed: int) -> Any:
            seeds.append(seed)
            return SimpleNamespace(run=lambda take: {}, prompts=[], is_complete=lambda: True)

    def collect(prompts: Any, group_size: int, generate: Any, *, are_trained: bool, step: int) -> Any:
        trained.append(are_trained)
        return None, generate(None)

    collector: Any = SimpleNamespace(generator=Generator(), collect=collect)
    prompts: Any = SimpleNamespace(batch=lambda start: [], samples_per_prompt=1, after=lambda start: start)
    with single_process():
        schedule = _schedule(1, collector)
        for step in range(3):
            for stream in (0, -1, 1):
                for draw in (0, 1):
                    schedule.generate(prompts, 0, step, version=0, stream=stream, draw=draw)
            schedule.drop(step)
        assert len(set(seeds)) == 18 and trained == [True, True, False, False, True, True] * 3  # validations are not
        schedule.begin_ahead(prompts, 0, step=0, version=0)
    assert seeds[18:] == [seeds[12]]  # round 4: three were drawn beside those of the steps


def _schedule(staleness: int, collector: Any = None) -> GenerationSchedule:
    cfg = load_defaults("gpt_ppo_actor")
    cfg.trainer.ppo.staleness, cfg.trainer.ppo.in_flight = staleness, "wait"
    nothing: Any = None
    ppo = PPOActor.read(cfg).trainer.ppo
    return GenerationSchedule(collector, nothing, ScopedTimer(), 7, ppo, last_step=lambda: 9)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_what_is_under_way_is_dealt_to_any_number_of_engines(count: int) -> None:
    """As it was dealt if there are as many; else each has what its part of the steps to come takes, in whole groups."""
    nothing: Any = None
    groups = [1, 4, 6, 7, 9, 10]  # of two samples each; the steps to come are those of groups 8 to 13
    samples = [Carried(2 * group + sample, [5], 0) for group in groups for sample in (0, 1)]
    dealt = []
    for index in range(count):
        (share := EngineShare(nothing, nothing, index, count)).restore(samples, 2, [(16, 12)])
        dealt.append(sorted({number // 2 for number in share.carried}))
        assert len(share.carried) == 2 * len(dealt[-1]) == 2 * len([g for g in range(8, 14) if g % count == index])
    assert sorted(group for part in dealt for group in part) == groups
    if count == 2:  # they are as even as those to come: nothing moves
        assert dealt == [[4, 6, 10], [1, 7, 9]]


def test_kept_groups_are_those_of_the_settings() -> None:
    facts = {"prompt_token_ids": [9], "token_ids": [4], "logprobs": [-1.0], "finish_reason": "stop"}
    results = [GenerationResult(request_id=number, weight_version=3, **facts) for number in range(4)]
    with single_process():
        (old := _schedule(1, SimpleNamespace(generator=None)))._rounds[5] = KeptRound(
            [Prompt(number // 2, [number // 2]) for number in range(4)], results
        )
        old._versions[5] = 3
        state = json.loads(json.dumps(old.state_dict(version=4)))
        for prompts, group, kept in ((2, 2, 1), (1, 4, 0), (4, 1, 1), (3, 2, 0)):
            source: Any = SimpleNamespace(
                batch_size=prompts,
                samples_per_prompt=group,
                prompt=lambda i: Prompt(i, [i]),
                known=lambda ids: [Prompt(i, [i]) for i in ids],
            )
            (new := _schedule(1, SimpleNamespace(generator=None))).load_state_dict(state, source)
            assert len(new._rounds) == kept, (prompts, group)


def test_kept_episodes_are_those_of_their_prompts_whatever_was_asked_first() -> None:
    """An environment may put a prompt of its own into the line's place."""
    asked = {"line": [1, 2], "edited": [1, 3]}
    facts = {"prompt_token_ids": [9, 9], "token_ids": [4], "logprobs": [-1.0], "finish_reason": "stop"}
    episode = Episode(request_id=0, weight_version=3, mask=[True], outcome={"won": 1.0}, **facts)

    def source(ids: list[int]) -> Any:
        prompt = Prompt(0, ids)
        return SimpleNamespace(known=lambda _: [prompt], prompt=lambda _: prompt, batch_size=1, samples_per_prompt=1)

    with single_process():
        (old := _schedule(1, SimpleNamespace(generator=None)))._rounds[5] = KeptRound(
            [Prompt(0, asked["line"])], [episode]
        )
        old._versions[5] = 3
        assert old.state_dict(version=3)["rounds"] == []  # can be made again
        state = json.loads(json.dumps(old.state_dict(version=4)))
        for name, ids in asked.items():
            (new := _schedule(1, SimpleNamespace(generator=None))).load_state_dict(state, source(ids))
            assert [round_.wait() for round_ in new._rounds.values()] == ([[episode]] if name == "line" else [])
        (less := _schedule(0, SimpleNamespace(generator=None))).load_state_dict(state, source([1, 2]))
        assert not less._rounds


def _last_state(log_dir: Path) -> dict[str, Any]:
    """What the trainer has in its newest checkpoint."""
    (newest,) = (log_dir / "checkpoints").glob("*-last")
    return json.loads((newest / "trainer_state.json").read_text())["trainer"]


# ---- between the roles --------------------------------------------------------------------------


@pytest.fixture
def channel() -> Channel:
    return Channel(0, 2, roles.TRAINING, {roles.ROLLOUT: 1}, dist.HashStore(), weights=None)


def test_messages_of_any_length(channel: Channel) -> None:
    for content in (b"", b"short", bytes(range(256)) * (9 * 2**12)):  # the store itself takes 8 MiB
        assert not channel.has("message")
        channel.put("message", content)
        assert channel.has("message") and channel.read("message") == content
        channel.drop("message")
        assert channel.store.num_keys() == 0
    channel.drop("message")


def test_commands_come_in_order_and_do_not_stay(channel: Channel) -> None:
    channel.post({"kind": "refit", "version": 3})
    channel.post({"kind": "end", "status": 75})
    assert channel.command(0) == {"kind": "refit", "version": 3}
    assert channel.command(1) == {"kind": "end", "status": 75}
    assert channel.store.num_keys() == 1  # how many there were


def test_a_wait_ends_when_the_other_side_does_nothing(channel: Channel) -> None:
    seen = iter([0, 1, 2, 2, 2, 2, 2])
    with pytest.raises(TimeoutError, match=r"nothing came for 0\.05 s .*wait_seconds.* that generate: \[1\]"):
        Wait(channel, 0.05, lambda: next(seen), "waiting for responses").until_there("never")
    assert next(seen) == 2  # it went on for as long as there was progress


def test_a_wait_in_parts_has_one_limit(channel: Channel) -> None:
    wait = Wait(channel, 0.05, lambda: 0, "waiting for responses")
    with pytest.raises(TimeoutError):
        while True:
            assert not wait.until_there("never", time.monotonic() + 0.02)


@pytest.fixture
def remote_round(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> RemoteRound:
    """Of two responses."""
    monkeypatch.setattr(disaggregated, "PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 1)
    monkeypatch.setattr(disaggregated, "broadcast_object", lambda value: value)
    monkeypatch.setattr(disaggregated.stops, "check", lambda: None)
    return RemoteRound(channel, "round/1", [Prompt(0, [1]), Prompt(1, [2])], wait_seconds=60.0)


RESULTS = [GenerationResult(0, [1], [4], [-1.0], "stop", 0), GenerationResult(1, [2], [5], [-1.0], "stop", 0)]


def test_a_rank_that_has_its_share_hears_of_the_others(
    channel: Channel, remote_round: RemoteRound, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No collective waits for a response: here another rank's come late."""
    others = iter([1, 1, 0])
    monkeypatch.setattr(disaggregated, "all_reduce_max", lambda own: max(own, next(others)))
    checks: list[int] = []
    monkeypatch.setattr(disaggregated.stops, "check", lambda: checks.append(1))
    for number, result in enumerate(RESULTS):
        channel.put(f"round/1/{number}", pack_response(9, result))
    channel.put("round/1/metrics", b"{}")
    taken: list[GenerationResult] = []
    remote_round.run(taken.append)
    assert (taken, len(checks)) == (RESULTS, 3)


def test_a_stop_of_another_rank_ends_the_wait_and_loses_nothing(
    channel: Channel, remote_round: RemoteRound, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[GenerationResult] = []

    def check() -> None:
        if len(taken) == 1:
            raise StopEarlyError("received SIGUSR1")
        channel.put("round/1/0", pack_response(0, RESULTS[0]))  # while the others look for signals

    monkeypatch.setattr(disaggregated.stops, "check", check)
    with pytest.raises(StopEarlyError):
        remote_round.run(taken.append)
    channel.put("round/1/1", pack_response(1, RESULTS[1]))
    assert remote_round.wait() == RESULTS  # to be kept in a checkpoint


def test_nothing_of_a_round_stays_in_the_store(
    channel: Channel, remote_round: RemoteRound, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor when a refit waits for the round again, which is known until its step ends."""
    channel.put("round/1", b"the request")
    for number, result in enumerate(RESULTS):
        assert channel.add("round/1/count", 1) == channel.count("round/1/count") == number + 1
        channel.put(f"round/1/{number}", pack_response(9, result))
    channel.put("round/1/metrics", b'{"seconds": 1.0}')
    taken: list[GenerationResult] = []
    assert remote_round.wait() == RESULTS and remote_round.run(taken.append) == {"seconds": 1.0}
    assert remote_round.wait() == taken == RESULTS
    assert channel.store.num_keys() == 0


def test_prompts_and_responses_come_out_as_they_went_in() -> None:
    logprobs = torch.tensor([-0.1, -3.0e-7, -12.5], dtype=torch.float32).tolist()
    results = [
        GenerationResult(7, [1, 2, 3], [4, 5, 6], logprobs, "stop", 12),
        GenerationResult(0, [9], [8], [-1.0], "length", 0),
    ]
    assert unpack_results(pack_results(results)) == results
    assert unpack_results(pack_results([])) == []  # a rank without a share
    prompts, seed = [Prompt(3, [1, 2], 7.3), Prompt(3, [1, 2], 7.3), Prompt(0, [5])], 2**63 - 1
    assert unpack_request(pack_request(prompts, seed)) == (prompts, seed)
