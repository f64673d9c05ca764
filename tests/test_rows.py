"""Episodes of several rows: what was rewritten goes on as a sequence of its own, and the episode stays one sample."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_models import CHATML, chatml_tokenizer
from test_episodes import Trial
from transformers import LlamaConfig, LlamaForCausalLM

from nemo_style_aligner.engine.parallel.groups import single_process
from nemo_style_aligner.engine.text.tokenizer import Tokenizer
from nemo_style_aligner.trainer.models.policy_losses import LossInput, LossSettings, policy_objective
from nemo_style_aligner.trainer.models.sharing import Costs
from nemo_style_aligner.trainer.rl.episodes.policy import Policy
from nemo_style_aligner.trainer.rl.episodes.runner import Episode
from nemo_style_aligner.trainer.rl.estimators import StepRewards, dr_grpo, gae
from nemo_style_aligner.trainer.rl.experience import Experience
from nemo_style_aligner.trainer.rl.rollouts.collector import Collected, ScoredResponses, _Part, as_sample
from nemo_style_aligner.trainer.rl.sample import Prompt, Rollouts, of_sampled

# Three episodes of one prompt of 2 tokens; the second has a further row: a prompt of 3, and 2 sampled tokens.
EPISODES = [
    Episode(0, [1, 2], [3, 4], [-0.1, -0.2], "stop", 0, mask=[True, True]),
    Episode(
        1,
        [1, 2],
        [3, 9, 5, 6, 7, 8, 4],
        [-0.3, -0.4, -0.5],
        "stop",
        0,
        mask=[True, False, False, False, False, True, True],
        further_rows=[5],
    ),
    Episode(2, [1, 2], [4], [-0.6], "length", 0, mask=[True]),
]


def collected(episodes: list[Episode]) -> Collected:
    prompts = [Prompt(0, [1, 2])] * len(episodes)
    responses = ScoredResponses.__new__(ScoredResponses)
    responses.results = list(episodes)
    places = {episode.request_id: place for place, episode in enumerate(episodes)}
    return Collected(prompts, torch.zeros(len(episodes), dtype=torch.int64), [_Part(responses, places)])


def rollouts(episodes: list[Episode] = EPISODES) -> Rollouts:
    with single_process():
        return collected(episodes).dealt([[*range(len(episodes))]], lambda sizes: Costs.apart(sizes.lengths.tolist()))


def test_an_episode_of_two_rows_is_one_sample_and_two_sequences() -> None:
    made = rollouts()
    assert len(made) == 3 and made.lengths.tolist() == [4, 9, 3] and made.sampled_lengths.tolist() == [2, 3, 1]
    batch = made.batch(torch.tensor([True, True, False]), {"x": torch.arange(6.0)})
    assert batch.lengths.tolist() == [4, 4, 5, 3] and batch.wanted.tolist() == [True, True, True, False]
    assert batch.tokens.split(batch.lengths.tolist())[2].tolist() == [5, 6, 7, 8, 4]
    assert batch.sampled_lengths.tolist() == [2, 1, 2, 1]
    assert batch.rows(torch.tensor([2])).columns["x"].tolist() == [3.0, 4.0]
    assert rollouts(EPISODES[::2]).num_rows is None


def test_it_counts_once_in_its_group() -> None:
    """By hand: the mean of rewards 1, 4, 1 is 2, whatever rows there are; both rows have the episode's advantage."""
    made = rollouts()
    step = StepRewards.of(torch.tensor([1.0, 4.0, 1.0]).double(), made.groups, made.sampled_lengths)
    advantages, _ = dr_grpo(step)
    assert advantages.tolist() == [-1.0, -1.0, 2.0, 2.0, 2.0, -1.0]


def test_values_pass_from_row_to_row() -> None:
    """By hand: gamma 0.5, lambda 1, values 1, 2, 4 of the three sampled tokens, the last two in a row of their own."""
    values = torch.tensor([0.0, 0.0, 1.0, 2.0, 4.0, 0.0])
    made = rollouts()
    rewards = torch.tensor([0.0, 8.0, 0.0]).double()
    step = StepRewards.of(rewards, made.groups, made.sampled_lengths, values=values, gamma=0.5, lam=1.0)
    _, returns = gae(step)
    assert returns is not None and returns[2:5].tolist() == [2.0, 4.0, 8.0]


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum"])
def test_a_mean_over_responses_is_over_episodes(aggregation: Any) -> None:
    """In one minibatch or in several, whatever row is where."""
    made = rollouts()
    advantages, logprobs = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), torch.arange(-6.0, 0.0)
    columns = {"advantages": advantages, "old_logprobs": logprobs}
    experience = Experience(made, made.counts, columns)
    settings = LossSettings(policy_loss="reinforce", aggregation=aggregation, constant_length=10)
    total = count = torch.zeros(())
    batch = experience.minibatch(range(3))
    for rows in ([0, 2], [1], [3]):
        part = batch.rows(torch.tensor(rows))
        given = LossInput(
            part.columns["old_logprobs"], part.columns["old_logprobs"], part.columns["advantages"], part.sampled_lengths
        )
        loss, num, _ = policy_objective(
            given, settings, responses=(part.columns["response_lengths"], part.columns["response_ends"])
        )
        total, count = total + loss, count + num
    of_tokens = (-advantages * logprobs).split([2, 3, 1])
    by_hand = {
        "token_mean": (-advantages * logprobs).mean(),
        "sequence_mean": torch.stack([part.mean() for part in of_tokens]).mean(),
        "sequence_sum": torch.stack([part.sum() / 10 for part in of_tokens]).mean(),
    }
    torch.testing.assert_close(total / count, by_hand[aggregation])


def test_a_critic_learns_rows() -> None:
    with single_process():
        made = collected(EPISODES).dealt([[0, 1, 2]], lambda sizes: Costs.apart(sizes.lengths.tolist()))
        columns = {"returns": torch.arange(6.0), "values": torch.arange(6.0) + 10}
        batch = Experience(made, made.counts, columns).value_batch()
    assert batch is not None
    assert [row[: int(row.nonzero().max()) + 1].tolist() for row in batch.tokens] == [
        [1, 2, 3, 4], [1, 2, 3, 9], [5, 6, 7, 8, 4], [1, 2, 4],
    ]  # fmt: skip
    assert batch.returns[2].tolist() == [0, 0, 3.0, 4.0] and batch.mask[2].tolist() == [0, 0, 1, 1]
    assert batch.mask.sum() == 6 and batch.values[1].tolist() == [0, 12.0, 0, 0]


def test_scores_of_tokens_are_put_together_from_rows() -> None:
    samples = [as_sample(episode, Prompt(0, [1, 2]), 0, str) for episode in EPISODES]
    assert [len(sample.rows) for sample in samples] == [1, 2, 1]
    second = samples[1].rows[1]
    assert second.token_ids == [5, 6, 7, 8, 4] and second.prompt_length == 3 and list(second.sampled or ()) == [1, 1]
    x = torch.arange(16.0).view(4, 4)  # of the four rows
    assert [part.tolist() for part in of_sampled(x, samples)] == [[1.0, 2.0], [5.0, 10.0, 11.0], [13.0]]


# ---- how rows come to be ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return chatml_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def trial(tokenizer: Tokenizer) -> Trial:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    size = {"num_key_value_heads": 2, "vocab_size": tokenizer.vocab_size, "initializer_range": 0.3}
    return Trial(tokenizer, LlamaForCausalLM(LlamaConfig(**shape, **size)))


def test_a_function_may_go_on_with_another_history(trial: Trial) -> None:
    async def forgets(policy: Policy, line: dict[str, Any]) -> float:
        first = await policy.reply(max_tokens=4)
        second = await policy.fork({"role": "user", "content": f"You said {len(first.text)} letters"}, max_tokens=4)
        await policy.reply({"role": "user", "content": "on"}, max_tokens=4)
        return float(len(second.text))

    done, sums = trial.run(forgets, range(3))
    assert sums["rows"] == 6 and sums["replies"] == 9
    for episode in done.values():
        first, second = episode.row_lengths
        whole = episode.prompt_token_ids + episode.token_ids
        assert first + second == len(whole) and episode.problem is None
        assert trial.tokenizer.ids_to_text(whole[first:], keep_special=True).startswith("<|im_start|>user\nYou said ")
        assert len(episode.logprobs) == sum(episode.mask)


def test_a_template_that_counts_turns_gives_each_reply_a_row(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the function has said what the messages are: then all can be rendered again."""
    counting = CHATML.replace("message['role'] + ", "message['role'] + loop.index | string + ")
    monkeypatch.setattr(trial.tokenizer, "chat_template", counting)
    texts: list[str] = []

    async def talks(policy: Policy, line: dict[str, Any]) -> float:
        texts.append((await policy.reply({"role": "user", "content": "one"}, max_tokens=4)).text)
        texts.append((await policy.reply({"role": "user", "content": "two"}, max_tokens=4)).text)
        return 1.0

    done, _ = trial.run(talks)
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": texts[0]}]
    prompt = trial.tokenizer.apply_chat_template([*messages, {"role": "user", "content": "two"}])
    first, second = done[0].row_lengths
    row = (done[0].prompt_token_ids + done[0].token_ids)[first:]
    assert trial.tokenizer.ids_to_text(row, keep_special=True).startswith(prompt) and second > len(prompt) // 4
