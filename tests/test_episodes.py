"""Samples of several replies: what the policy has sampled is learnt, what was inserted between is context."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Artefacts
from job_processes import Job, run, script
from small_models import CHATML, chatml_tokenizer
from test_group_jobs import require_same_end
from transformers import LlamaConfig, LlamaForCausalLM

from nemo_style_aligner.engine.contract import GenerationRequest, SamplingParams
from nemo_style_aligner.engine.embedded.engine import EmbeddedEngine
from nemo_style_aligner.engine.shard import EngineGroup
from nemo_style_aligner.engine.text.chats import Conversation
from nemo_style_aligner.engine.text.tokenizer import Tokenizer
from nemo_style_aligner.engine.vocabulary import vocabulary_options
from nemo_style_aligner.engine.weights.huggingface_config import architecture_from_config
from nemo_style_aligner.seeds import derive_seed
from nemo_style_aligner.trainer.models.ragged import RaggedBatch
from nemo_style_aligner.trainer.rl.episodes.policy import Policy, Reply
from nemo_style_aligner.trainer.rl.episodes.runner import (
    Environment,
    EnvironmentBlocksError,
    Episode,
    EpisodeFunction,
    EpisodeLimits,
)
from nemo_style_aligner.trainer.rl.episodes.turns import Turns, turns_of
from nemo_style_aligner.trainer.rl.estimators import StepRewards, gae
from nemo_style_aligner.trainer.rl.sample import Prompt
from nemo_style_aligner.trainer.telemetry.log_files import read_json_lines
from nemo_style_aligner.trainer.telemetry.metrics import read_metrics

TIMEOUT = 240.0

# ---- the mask -----------------------------------------------------------------------------------


def two_replies() -> RaggedBatch:
    """A prompt of 2 tokens, replies of 2 and 1 with 3 inserted tokens between them, 1 behind; and a single reply."""
    return RaggedBatch(
        tokens=torch.arange(1, 13, dtype=torch.int32),
        lengths=torch.tensor([9, 3]),
        sampled=torch.tensor([0, 0, 1, 1, 0, 0, 0, 1, 0] + [0, 1, 1]).bool(),
        columns={"x": torch.arange(5.0)},
        wanted=torch.ones(2, dtype=torch.bool),
    )


def test_a_column_has_a_number_for_each_sampled_token() -> None:
    batch = two_replies()
    assert batch.sampled_lengths.tolist() == [3, 2]
    wanted = [row.int().tolist() for row in batch.sequences().wanted]
    assert wanted == [[0, 1, 1, 0, 0, 0, 1], [1, 1]]  # predictions; nothing is computed behind the last sampled token
    turned = batch.rows(torch.tensor([1, 0]))
    assert turned.columns["x"].tolist() == [3.0, 4.0, 0.0, 1.0, 2.0]
    assert turned.sampled.int().tolist() == [0, 1, 1] + [0, 0, 1, 1, 0, 0, 0, 1, 0]


def test_advantages_pass_over_what_was_inserted() -> None:
    """By hand: of values 1, 2, 4 at the sampled tokens, whatever lies between; reward 10, gamma 0.5, lambda 0.5."""
    step = StepRewards.of(
        torch.tensor([10.0], dtype=torch.float64), torch.tensor([0]), two_replies().sampled_lengths[:1],
        values=torch.tensor([1.0, 2.0, 4.0]), gamma=0.5, lam=0.5,
    )  # fmt: skip
    deltas = [0.5 * 2 - 1, 0.5 * 4 - 2, 10 - 4]
    by_hand = [deltas[0] + 0.25 * (deltas[1] + 0.25 * deltas[2]), deltas[1] + 0.25 * deltas[2], deltas[2]]
    advantages, returns = gae(step)
    assert advantages.tolist() == pytest.approx(by_hand)
    assert returns is not None and returns.tolist() == pytest.approx(
        [a + v for a, v in zip(by_hand, (1, 2, 4), strict=True)]
    )


# ---- episodes beside an engine --------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Characters, and ChatML, whose end of a turn ends responses."""
    return chatml_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(
        LlamaConfig(**shape, num_key_value_heads=2, vocab_size=tokenizer.vocab_size, initializer_range=0.3)
    )


def asked(question: str) -> Conversation:
    return Conversation(turns_of([{"role": "user", "content": question}]))


class Trial:
    """Runs episodes of a function with a random model."""

    def __init__(
        self, tokenizer: Tokenizer, model: LlamaForCausalLM, *, slots: int = 4, pages: int | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.engine = EmbeddedEngine(
            architecture_from_config(model.config.to_dict()),
            dtype=torch.float32,
            num_slots=slots,
            max_sequence_length=256,
            kv_cache_tokens=pages and pages * 16,
            **vocabulary_options(architecture_from_config(model.config.to_dict()), tokenizer),
        )
        self.engine.build()
        self.engine.refit([(name, x.detach()) for name, x in model.state_dict().items()], 0)

    def run(
        self,
        function: EpisodeFunction,
        numbers: Sequence[int] = range(1),
        *,
        max_tokens: int = 150,
        seconds: float = 30.0,
        blocked: float = 30.0,
        max_replies: int = 8,
        limit_reward: float | None = 0.0,
    ) -> tuple[dict[int, Episode], dict[str, float]]:
        limits, done = EpisodeLimits(max_replies, seconds, blocked, limit_reward), dict[int, Episode]()
        environment = Environment(function, "my_env.py:episode", self.tokenizer, self.tokenizer.ids_to_text, limits)
        turns = Turns(self.tokenizer)
        prompts = [
            Prompt(n, turns.prompt(asked(f"{n} and {n * n}?")), line={"n": n}, place=f"a.jsonl:{n}")
            for n in range(max(numbers) + 1)
        ]
        requests = (GenerationRequest(n, prompts[n].token_ids, derive_seed(1, n)) for n in numbers)
        sampling = SamplingParams(max_new_tokens=max_tokens)
        sums = environment.generate(
            self.engine, EngineGroup(), requests, sampling, prompts, lambda e: done.update({e.request_id: e})
        )
        return done, sums


@pytest.fixture(scope="module")
def trial(tokenizer: Tokenizer, model: LlamaForCausalLM) -> Trial:
    return Trial(tokenizer, model)


async def three_replies(policy: Policy, line: dict[str, Any]) -> dict[str, float]:
    """What the tool says depends on what the policy has said, and comes in any order."""
    said = await policy.reply(max_tokens=20)
    for _ in range(2):
        await asyncio.sleep(0.003 * (line["n"] * 7 % 5))
        vowels = sum(map(said.text.lower().count, "aeiou"))
        said = await policy.reply({"role": "tool", "content": f"{vowels} vowels, {line['n']}"}, max_tokens=20)
    return {"length": len(said.text), "upper": sum(map(str.isupper, said.text))}


def told(episodes: dict[int, Episode]) -> dict[int, tuple[Any, ...]]:
    return {n: (e.token_ids, e.mask, e.logprobs, e.outcome, e.finish_reason) for n, e in episodes.items()}


def test_an_episode_is_the_same_alone_and_beside_others(
    tokenizer: Tokenizer, model: LlamaForCausalLM, trial: Trial
) -> None:
    """To the last bit, in any order, with room for the pages of one alone, and at once."""
    together, sums = trial.run(three_replies, [3, 0, 7, 1, 6, 2, 5, 4])
    alone, _ = Trial(tokenizer, model, slots=1, pages=16).run(three_replies, range(8))
    assert told(together) == told(alone)
    assert sums["replies"] == 24 and sums["failed_episodes"] == 0
    assert all(not e.mask[0] for e in ()) and {e.mask[0] for e in together.values()} == {True}
    assert all(len(e.logprobs) == sum(e.mask) for e in together.values())
    assert len({tuple(e.token_ids[:5]) for e in together.values()}) > 1


def test_a_reply_costs_its_new_tokens(trial: Trial) -> None:
    """Whatever was said before is in memory, but for what fills no page."""
    done, _ = trial.run(three_replies, [20, 21, 22, 23])
    new = sum(len(e.prompt_token_ids) + len(e.token_ids) for e in done.values())
    assert (
        trial.engine.statistics.prefill_tokens <= new - sum(map(len, (e.logprobs for e in done.values()))) + 3 * 4 * 16
    )


def test_episodes_that_wait_keep_their_pages(trial: Trial) -> None:
    """More of them than slots, as long as there is memory."""
    replied: list[int] = []

    async def together(policy: Policy, line: dict[str, Any]) -> None:
        await policy.reply(max_tokens=40)
        replied.append(line["n"])
        while len(replied) < 8:
            await asyncio.sleep(0.001)
        await policy.reply({"role": "tool", "content": "on"}, max_tokens=20)

    done, _ = trial.run(together, range(30, 38))
    new = sum(len(e.prompt_token_ids) + len(e.token_ids) - len(e.logprobs) for e in done.values())
    assert trial.engine.statistics.prefill_tokens <= new + 8 * 16


def test_one_reply_is_the_response_without_an_environment(trial: Trial) -> None:
    async def once(policy: Policy, line: dict[str, Any]) -> None:
        await policy.reply()

    done, _ = trial.run(once, range(4), max_tokens=40)
    requests = [GenerationRequest(n, done[n].prompt_token_ids, derive_seed(1, n)) for n in range(4)]
    for plain in trial.engine.generate(requests, SamplingParams(max_new_tokens=40)):
        episode = done[plain.request_id]
        assert (episode.token_ids, episode.logprobs, episode.finish_reason) == (
            plain.token_ids, plain.logprobs, plain.finish_reason,
        )  # fmt: skip
        assert episode.sampled == plain.sampled


def test_what_is_told_is_what_the_template_writes(tokenizer: Tokenizer, trial: Trial) -> None:
    """The ids of an episode are those of the whole conversation, rendered at once; a cut reply is ended."""
    texts: list[str] = []

    async def talk(policy: Policy, line: dict[str, Any]) -> float:
        for number in range(3):
            messages = [{"role": "user", "content": f"say {number}"}] if number else []
            said = await policy.reply(*messages, max_tokens=6)
            texts.append(said.text)
        return 1.0

    done, _ = trial.run(talk, [9])
    messages = [{"role": "user", "content": "9 and 81?"}]
    for number, text in enumerate(texts):
        messages += [{"role": "user", "content": f"say {number}"}] * bool(number) + [
            {"role": "assistant", "content": text}
        ]
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    ids = done[9].prompt_token_ids + done[9].token_ids
    spoken = tokenizer.ids_to_text(ids, keep_special=True)
    assert whole.startswith(spoken) and spoken.endswith(texts[-1] + "<|im_end|>" * (done[9].finish_reason == "stop"))


def test_a_prompt_may_be_the_environments_own(tokenizer: Tokenizer, trial: Trial) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]

    async def own(policy: Policy, line: dict[str, Any]) -> float:
        await policy.reply(*messages, max_tokens=5)
        said = await policy.sample(" So: ", max_tokens=5)
        return float(len(said.token_ids))

    done, _ = trial.run(own)
    assert done[0].prompt_token_ids == tokenizer.text_to_ids(tokenizer.apply_chat_template(messages))
    assert tokenizer.ids_to_text([t for t, s in zip(done[0].token_ids, done[0].mask, strict=True) if not s]) == " So: "


def failing(kind: str) -> EpisodeFunction:
    async def episode(policy: Policy, line: dict[str, Any]) -> float:
        if kind == "says nothing":
            return 1.0
        await policy.reply(max_tokens=4)
        if kind == "raises":
            raise KeyError("no such tool")
        if kind == "hangs":
            await asyncio.sleep(60)
        if kind == "talks at once":
            await asyncio.gather(*(policy.reply({"role": "user", "content": "?"}) for _ in range(2)))
        while True:
            await policy.reply(
                {"role": "user", "content": "more " * (10 if kind == "is too long" else 1)}, max_tokens=4
            )

    return episode


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("raises", r"my_env.py:episode, a.jsonl:0 raised KeyError: 'no such tool' \(.*test_episodes.py:\d+\)"),
        ("hangs", "took more than 0.5 s"),
        ("says nothing", "it ended before the policy had replied"),
        ("talks at once", "a reply is under way"),
    ],
)
def test_an_episode_that_fails_is_named_and_others_go_on(trial: Trial, kind: str, why: str) -> None:
    async def some(policy: Policy, line: dict[str, Any]) -> float:
        return await (failing(kind) if line["n"] == 0 else three_replies)(policy, line)

    done, sums = trial.run(some, range(3), seconds=0.5, max_tokens=220)
    problem = done[0].problem
    assert problem is not None and re.search(why, problem), problem
    assert done[0].token_ids and len(done[0].logprobs) == sum(done[0].mask)
    assert done[1].problem is None and done[2].problem is None and sums["failed_episodes"] == 1


@pytest.mark.parametrize(
    ("kind", "why"), [("is too long", "leave no room for a reply"), ("goes on", "it has had 8 replies")]
)
def test_an_episode_that_wants_more_than_there_may_be_is_cut_off(trial: Trial, kind: str, why: str) -> None:
    done, sums = trial.run(failing(kind), max_tokens=220)
    assert (done[0].problem, done[0].outcome, done[0].finish_reason) == (None, 0.0, "length")
    assert sums["cut_episodes"] == 1 and sums["failed_episodes"] == 0
    done, sums = trial.run(failing(kind), max_tokens=220, limit_reward=None)
    assert re.search(why, str(done[0].problem)) and sums["cut_episodes"] == 0 and sums["failed_episodes"] == 1


def test_an_environment_that_holds_the_loop_is_found(trial: Trial) -> None:
    async def blocks(policy: Policy, line: dict[str, Any]) -> float:
        await policy.reply(max_tokens=4)
        time.sleep(3)
        return 0.0

    with pytest.raises(
        EnvironmentBlocksError, match=r"held its event loop for more than 0.6 s.*test_episodes.py.*blocks"
    ):
        trial.run(blocks, range(2), blocked=0.6)


def test_a_template_that_counts_turns_is_refused(
    tokenizer: Tokenizer, trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = CHATML.replace("message['role'] + ", "message['role'] + loop.index | string + ")
    assert counting != CHATML
    monkeypatch.setattr(tokenizer, "chat_template", counting)
    done, _ = trial.run(three_replies)
    assert "depends on the conversation before" in str(done[0].problem)


def test_the_page_s_example_calls_its_tool(trial: Trial) -> None:
    page = (Path(__file__).parents[1] / "docs" / "environments.md").read_text()
    names: dict[str, Any] = {}
    example, _ = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    exec(example, names)
    told: list[dict[str, str]] = []

    class Calling:
        async def reply(self, *messages: dict[str, str]) -> Reply:
            told.extend(messages)
            return Reply("calc(17+25)" if not told else f"It is {told[-1]['content']}.", [], True)

    reward = asyncio.run(names["episode"](Calling(), {"answer": "42", "answer_extraction": "last number"}))
    assert told == [{"role": "tool", "content": "42"}] and reward == {"right": 1.0, "tool": 0.1}
    done, _ = trial.run(names["episode"])
    assert done[0].problem is not None and "answer" in done[0].problem  # a line without a right answer


# ---- jobs ---------------------------------------------------------------------------------------

EPISODE = """
import os, pathlib, signal

calls = 0

async def episode(policy, line):
    first = await policy.reply(max_tokens=4)
    digits = sum(map(str.isdigit, first.text))
    global calls
    calls += 1
    if (marker := pathlib.Path(__file__).parent / "kill_at").exists() and int(marker.read_text()) == calls:
        marker.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    last = await policy.sample(f"{digits} ", max_tokens=4)
    return {"digits": sum(map(str.isdigit, last.text)) / 4, "told": float(digits == 0)}
"""


PARTS = {"environment", "environment/digits", "environment/told"}


@pytest.fixture
def job(artefacts: Artefacts, tmp_path: Path) -> Callable[..., list[str]]:
    """A command of a GRPO job in a folder of its own, whose environment is the file beside its log."""
    lines = [json.loads(line) for line in artefacts.data("train_prompts").read_text().splitlines()][:12]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def made(folder: Path, *others: str) -> list[str]:
        folder.mkdir()
        (folder / "env.py").write_text(EPISODE)
        return [
            f"pretrained_checkpoint.restore_from_path={artefacts.sft}",
            f"model.data.data_prefix={{train: [{file}], validation: [{file}], test: [{file}]}}",
            f"exp_manager.explicit_log_dir={folder / 'log'}",
            *("trainer.precision=32", "trainer.ppo.max_steps=3", "trainer.ppo.val_check_interval=0"),
            *("trainer.ppo.save_interval=1", "trainer.ppo.estimator=grpo", "trainer.ppo.num_rollouts_per_prompt=4"),
            *("trainer.ppo.save_samples=True", "model.encoder_seq_length=64", "model.global_batch_size=8"),
            *("model.micro_batch_size=2", "model.ppo.num_rollout_samples=4", "model.ppo.rollout_micro_batch_size=4"),
            *("model.ppo.length_params.max_length=16", "model.optim.lr=1e-3", "model.optim.sched.warmup_steps=2"),
            *("trainer.ppo.rewards=[{source: environment}]", f"trainer.ppo.environment={folder / 'env.py'}:episode"),
            *others,
        ]

    return made


def test_a_job_learns_from_episodes_and_goes_on_where_it_was_killed(
    job: Callable[..., list[str]], tmp_path: Path
) -> None:
    """Killed in the middle of an episode, whichever it is."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(script("train_gpt_ppo_actor.py", *job(whole)), whole / "out.txt", TIMEOUT)
    command, at = script("train_gpt_ppo_actor.py", *job(killed)), random.randint(1, 48)
    (killed / "kill_at").write_text(str(at))
    victim = Job(command, killed / "out.txt")
    assert victim.wait(TIMEOUT), victim.describe()
    victim.kill()
    assert not (killed / "kill_at").exists(), victim.describe()
    run(command, killed / "again.txt", TIMEOUT)
    require_same_end(killed, whole)
    samples = read_json_lines(whole / "log" / "samples.jsonl")
    assert len(samples) == 3 * 16 and all(set(s["rewards"]) == PARTS for s in samples)
    of_two = [s for s in samples if 0 in s["sampled"]]
    assert of_two and all(len(s["sampled"]) == len(s["tokens"]) == len(s["advantages"]) for s in samples)
    assert all(s["advantages"][s["sampled"].index(0)] is None for s in of_two)
    metrics = read_metrics(whole / "log")
    assert [value for _, value in metrics["generation/replies"]] == [2.0] * 3
    assert metrics["generation/inserted_tokens"][0][1] == pytest.approx(2.0)


OWN_PROMPT = """
import numpy as np

async def episode(policy, line):
    first = await policy.sample("A: ", max_tokens=4)
    last = await policy.sample(" B ", max_tokens=4)
    return {"length": np.float32(len(first.text)), "same": np.bool_(first.text == last.text)}
"""
BESIDE = {
    "dynamic sampling": ("trainer.ppo.dynamic_sampling.enable=True",),
    "validation": ("trainer.ppo.val_check_interval=1", "model.ppo.num_val_samples=4"),
    "a step ahead": ("trainer.devices=2", "trainer.ppo.rollout_devices=1", "trainer.ppo.staleness=1"),
    "two steps ahead": ("trainer.devices=2", "trainer.ppo.rollout_devices=1", "trainer.ppo.staleness=2"),
    "adapters": ("model.peft.peft_scheme=lora", "model.peft.lora_tuning.adapter_dim=8", "model.optim.lr=1e-2"),
    "a teacher": ("trainer.ppo.teacher.restore_from_path=SFT", "trainer.ppo.teacher.weight=0.5"),
    "several engines": ("trainer.devices=2", "trainer.ppo.trt_llm.unload_engine_train=True"),
    "a limit": (
        *("trainer.ppo.episodes.max_replies=1", "trainer.ppo.episodes.limit_reward=null"),
        "trainer.ppo.on_nonfinite=skip",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("beside", BESIDE)
def test_episodes_work_beside(job: Callable[..., list[str]], tmp_path: Path, artefacts: Artefacts, beside: str) -> None:
    """What an environment returns may be a number of numpy's; the job is stopped in between, and goes on."""
    options = [option.replace("SFT", str(artefacts.sft)) for option in BESIDE[beside]]
    command = job(tmp_path / "run", *options)
    (tmp_path / "run" / "env.py").write_text(OWN_PROMPT)
    first = [word.replace("max_steps=3", "max_steps=2") for word in command]
    status = Job(script("train_gpt_ppo_actor.py", *first), tmp_path / "run" / "first.txt").wait(TIMEOUT)
    if beside == "a limit":
        assert status == 1 and "max_replies" in (tmp_path / "run" / "first.txt").read_text()
        return
    assert status == 0, (tmp_path / "run" / "first.txt").read_text()
    run(script("train_gpt_ppo_actor.py", *command), tmp_path / "run" / "out.txt", TIMEOUT)
    assert "are discarded" not in (tmp_path / "run" / "out.txt").read_text()
    samples = read_json_lines(tmp_path / "run" / "log" / "samples.jsonl")
    assert len(samples) >= 3 * 16 and {sample["step"] for sample in samples} == {1, 2, 3}
    assert all(set(s["rewards"]) == {"environment", "environment/length", "environment/same"} for s in samples)
    assert all(sum(s["sampled"]) < len(s["tokens"]) and s["sampled"][0] == 0 for s in samples)


@pytest.mark.long
def test_two_ranks_that_share_an_engine_have_the_same_episodes(job: Callable[..., list[str]], tmp_path: Path) -> None:
    """And two that take them from the queue, or that only generate."""
    ways = {
        "one": (),
        "shared": ("trainer.devices=2", "trainer.ppo.generation.tensor_parallel_size=2"),
        "queue": ("trainer.devices=2", "trainer.ppo.batch_iterator.use_flask=True"),
        "apart": ("trainer.devices=2", "trainer.ppo.rollout_devices=1"),
    }
    rewards = {}
    for name, others in ways.items():
        run(script("train_gpt_ppo_actor.py", *job(tmp_path / name, *others)), tmp_path / name / "out.txt", TIMEOUT)
        samples = read_json_lines(tmp_path / name / "log" / "samples.jsonl")
        rewards[name] = {(s["step"], s["sample"]): (s["tokens"], s["sampled"], s["rewards"]) for s in samples}
    first = [key for key in rewards["one"] if key[0] == 1]
    for name, found in rewards.items():
        assert [found[key] for key in first] == [rewards["one"][key] for key in first], name
