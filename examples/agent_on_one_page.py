"""Reinforcement learning of an agent on one page: a model that knows nothing learns to look before it answers.

    python examples/agent_on_one_page.py

A card lies face down. The policy may say its number, 1 to 4, at once: it is right one time in four at best. Or it says
`?`, is told the number, and answers then. Nobody shows it that: it acts, and what was right becomes likelier. What it
was told is context; what it has said itself is learnt. It takes a minute or two on a CPU. rl_on_one_page.py is the same
without tools; jobs take the function `episode` as it is (docs/environments.md).
"""

import argparse
import random
import tempfile
from typing import Any

import torch

from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.contract import GenerationRequest, SamplingParams
from nemo_style_aligner.engine.embedded.engine import EmbeddedEngine
from nemo_style_aligner.engine.parallel.groups import single_process
from nemo_style_aligner.engine.shard import EngineGroup
from nemo_style_aligner.engine.text.tokenizer import Tokenizer
from nemo_style_aligner.engine.text.tokenizer_training import train_character_tokenizer
from nemo_style_aligner.engine.vocabulary import vocabulary_options
from nemo_style_aligner.engine.weights.stream import export_weights
from nemo_style_aligner.seeds import derive_seed
from nemo_style_aligner.trainer.config import schema
from nemo_style_aligner.trainer.models.actor import Actor
from nemo_style_aligner.trainer.models.gpt import build_model
from nemo_style_aligner.trainer.models.optimizer import Optimizer, Schedule
from nemo_style_aligner.trainer.models.packing import MicroBatching
from nemo_style_aligner.trainer.models.policy_losses import LossSettings
from nemo_style_aligner.trainer.models.ragged import RaggedBatch
from nemo_style_aligner.trainer.rl.episodes.policy import Policy
from nemo_style_aligner.trainer.rl.episodes.runner import Environment, Episode, EpisodeLimits
from nemo_style_aligner.trainer.rl.estimators import StepRewards, grpo
from nemo_style_aligner.trainer.rl.sample import Prompt

# ---- The environment. A token is a character here.


async def episode(policy: Policy, line: dict[str, Any]) -> dict[str, float]:
    """Runs once for each sample, hundreds at a time. A job takes such a function as it is: trainer.ppo.environment."""
    said = await policy.sample(max_tokens=1)  # to the prompt, "="
    looked = said.text == "?"
    if looked:
        said = await policy.sample(f"{line['card']}=", max_tokens=1)  # inserted: told, not learnt
    return {"right": float(said.text == line["card"]), "looked": float(looked)}


# ---- The policy: a Llama of 80,000 parameters, with random weights, what trains it, and what generates with it.


def build_actor(architecture: ModelArchitecture) -> Actor:
    policy = build_model(architecture, {}, torch.float32)
    optimizer = Optimizer(policy, schema.Optimizer(weight_decay=0.0), Schedule(lr=2e-3, name="constant"), clip_grad=1.0)
    # PPO's clipped loss. The entropy bonus keeps the policy trying until it knows.
    loss = LossSettings(policy_loss="ppo", clip_low=0.2, clip_high=0.2, entropy_bonus=0.06)
    batching = MicroBatching(num_rows=512)
    return Actor(
        policy, optimizer, None, training_batching=batching, forward_batching=batching, temperature=1.0, loss=loss
    )


def build_engine(architecture: ModelArchitecture, tokenizer: Tokenizer) -> EmbeddedEngine:
    vocabulary = vocabulary_options(architecture, tokenizer)
    engine = EmbeddedEngine(architecture, dtype=torch.float32, num_slots=64, max_sequence_length=32, **vocabulary)
    engine.build()
    return engine


# ---- Episodes: an event loop beside the engine. Where one waits for its environment, others generate.


def act(
    engine: EmbeddedEngine, environment: Environment, prompt_ids: list[int], cards: list[str], seed: int
) -> list[Episode]:
    """An episode about each card. Its random numbers depend on its seed alone, not on what runs beside it."""
    prompts = [Prompt(i, prompt_ids, line={"card": card}) for i, card in enumerate(cards)]
    requests = (GenerationRequest(i, prompt_ids, derive_seed(seed, i)) for i in range(len(cards)))
    done: list[Episode] = []
    environment.generate(engine, EngineGroup(), requests, SamplingParams(max_new_tokens=20), prompts, done.append)
    return sorted(done, key=lambda of: of.request_id)  # they come as they end


# ---- One step of GRPO.

GROUP = 16  # episodes about each card, which are compared with each other


def learn(actor: Actor, episodes: list[Episode]) -> None:
    # By how much was an episode better than its group's others? The advantage of each token that it has sampled.
    batch = RaggedBatch(  # of any lengths, without padding
        tokens=torch.tensor([t for e in episodes for t in e.prompt_token_ids + e.token_ids], dtype=torch.int32),
        lengths=torch.tensor([len(e.prompt_token_ids) + len(e.token_ids) for e in episodes]),
        sampled=torch.tensor([of for e in episodes for of in [False] * len(e.prompt_token_ids) + e.sampled]),
        columns={},
        wanted=torch.ones(len(episodes), dtype=torch.bool),
    )
    rewards = torch.tensor([e.outcome["right"] for e in episodes], dtype=torch.float64)
    seen = StepRewards.of(rewards, torch.arange(len(episodes)) // GROUP, batch.sampled_lengths)
    batch.columns["advantages"], _ = grpo(seen)
    batch.columns["old_logprobs"] = torch.tensor([logprob for e in episodes for logprob in e.logprobs])
    actor.update(batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=80)
    steps = parser.parse_args().steps
    random.seed(0)
    with single_process(seed=1), tempfile.TemporaryDirectory() as folder:  # process groups of one rank; jobs have many
        tokenizer = train_character_tokenizer("1234?=", folder)
        architecture = ModelArchitecture(
            num_layers=2,
            hidden_size=64,
            ffn_hidden_size=128,
            num_attention_heads=4,
            num_query_groups=4,
            vocab_size=tokenizer.vocab_size,
            max_position_embeddings=32,
        )
        environment = Environment(episode, "episode", tokenizer, tokenizer.ids_to_text, EpisodeLimits())
        actor, engine = build_actor(architecture), build_engine(architecture, tokenizer)
        for step in range(1, steps + 1):
            engine.refit(export_weights(actor.model), version=step)  # generate with the newest weights
            cards = [card for card in random.choices("1234", k=32) for _ in range(GROUP)]
            episodes = act(engine, environment, tokenizer.text_to_ids("="), cards, seed=step)
            learn(actor, episodes)
            if step == 1 or step % 10 == 0:
                right, looked = (sum(e.outcome[of] for e in episodes) / len(episodes) for of in ("right", "looked"))
                print(f"step {step:3}  right {right:.3f}  looked {looked:.3f}", flush=True)
        for e in episodes[::GROUP][:5]:
            print(repr(tokenizer.ids_to_text(e.prompt_token_ids + e.token_ids)))


if __name__ == "__main__":
    main()
