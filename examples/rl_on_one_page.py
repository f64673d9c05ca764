"""Reinforcement learning of a language model on one page: a model that knows nothing learns to add.

    python examples/rl_on_one_page.py

Nobody shows it an answer. It guesses, a function says which guesses were right, and what was right becomes likelier.
It takes a minute or two on a CPU. The parts are those of the training jobs, here used as a library; jobs add many
ranks, large models, checkpoints and services (examples/nlp/gpt/train_gpt_ppo_actor.py).
"""

import argparse
import random

import torch

from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.engine.contract import GenerationRequest, GenerationResult, SamplingParams
from nemo_style_aligner.engine.embedded.engine import EmbeddedEngine
from nemo_style_aligner.engine.parallel.groups import single_process
from nemo_style_aligner.engine.weights.stream import export_weights
from nemo_style_aligner.trainer.config import schema
from nemo_style_aligner.trainer.models.actor import Actor
from nemo_style_aligner.trainer.models.gpt import build_model
from nemo_style_aligner.trainer.models.optimizer import Optimizer, Schedule
from nemo_style_aligner.trainer.models.packing import MicroBatching
from nemo_style_aligner.trainer.models.policy_losses import LossSettings
from nemo_style_aligner.trainer.models.ragged import RaggedBatch
from nemo_style_aligner.trainer.rl.estimators import StepRewards, grpo

# ---- The task. A token is a character here; "." ends a response.

CHARACTERS = "0123456789+=."
END = CHARACTERS.index(".")
LINES = [{"text": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10) if a + b < 10]


def reward(prompt: str, response: str, line: dict[str, str]) -> float:
    """1 for the right answer, else 0. A job takes such a function as it is: trainer.ppo.rewards."""
    return float(response == line["answer"])


def encode(text: str) -> list[int]:
    return [CHARACTERS.index(character) for character in text]


def decode(token_ids: list[int]) -> str:
    return "".join(CHARACTERS[token_id] for token_id in token_ids)


# ---- The policy: a Llama of 80,000 parameters, with random weights, and what trains it.

ARCHITECTURE = ModelArchitecture(
    num_layers=2,
    hidden_size=64,
    ffn_hidden_size=128,
    num_attention_heads=4,
    num_query_groups=4,
    vocab_size=len(CHARACTERS),
    max_position_embeddings=16,
)


def build_actor() -> Actor:
    policy = build_model(ARCHITECTURE, {}, torch.float32)
    optimizer = Optimizer(policy, schema.Optimizer(weight_decay=0.0), Schedule(lr=1e-3, name="constant"), clip_grad=1.0)
    # PPO's clipped loss. The entropy bonus keeps the policy guessing until it knows.
    loss = LossSettings(policy_loss="ppo", clip_low=0.2, clip_high=0.2, entropy_bonus=0.01)
    batching = MicroBatching(num_rows=512)
    return Actor(
        policy, optimizer, None, training_batching=batching, forward_batching=batching, temperature=1.0, loss=loss
    )


# ---- The engine: it generates with the policy's weights, many responses at a time, and is built once.


def build_engine() -> EmbeddedEngine:
    engine = EmbeddedEngine(ARCHITECTURE, dtype=torch.float32, num_slots=64, max_sequence_length=16, eos_id=END)
    engine.build()
    return engine


def respond(engine: EmbeddedEngine, prompts: list[str], seed: int, **sampling: bool) -> list[GenerationResult]:
    """A response to each prompt. Its random numbers depend on its seed alone, not on what is generated beside it."""
    requests = (GenerationRequest(i, encode(prompt), seed=i) for i, prompt in enumerate(prompts))
    results = engine.generate(requests, SamplingParams(max_new_tokens=3, seed=seed, **sampling))
    return sorted(results, key=lambda result: result.request_id)  # they come as they end


def text_of(result: GenerationResult) -> str:
    """The response without its end; "" where it has none, so that it cannot be right."""
    return decode(result.token_ids).removesuffix(".") if result.finish_reason == "stop" else ""


# ---- One step of GRPO: generate, score, estimate, update.

GROUP = 16  # responses to each prompt, which are compared with each other


def make_step(actor: Actor, engine: EmbeddedEngine, lines: list[dict[str, str]], step: int) -> float:
    """Returns the mean reward."""
    # Generate, with the newest weights: several responses to each prompt.
    engine.refit(export_weights(actor.model), version=step)
    asked = [line for line in lines for _ in range(GROUP)]
    samples = respond(engine, [line["text"] for line in asked], seed=step)

    # Score.
    rewards = [reward(line["text"], text_of(sample), line) for line, sample in zip(asked, samples, strict=True)]

    # Estimate: by how much was a response better than its group's others? That is the advantage of each of its tokens.
    batch = RaggedBatch(  # prompts and responses of any lengths, without padding
        tokens=torch.tensor([t for s in samples for t in s.prompt_token_ids + s.token_ids], dtype=torch.int32),
        lengths=torch.tensor([len(s.prompt_token_ids) + len(s.token_ids) for s in samples]),
        sampled=torch.tensor([of for s in samples for of in [False] * len(s.prompt_token_ids) + s.sampled]),
        columns={},
        wanted=torch.ones(len(samples), dtype=torch.bool),
    )
    groups = torch.arange(len(samples)) // GROUP
    seen = StepRewards.of(torch.tensor(rewards, dtype=torch.float64), groups, batch.sampled_lengths)
    batch.columns["advantages"], _ = grpo(seen)

    # Update: what was better becomes likelier, what was worse less likely. PPO's loss ends the pull on a token once its
    # probability has moved far from what it was when it was generated: in jobs that make several updates in a step.
    batch.columns["old_logprobs"] = torch.tensor([logprob for sample in samples for logprob in sample.logprobs])
    actor.update(batch)
    return sum(rewards) / len(rewards)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=160)
    steps = parser.parse_args().steps
    random.seed(0)
    with single_process(seed=1):  # process groups of one rank; jobs have many
        actor, engine = build_actor(), build_engine()
        for step in range(1, steps + 1):
            mean_reward = make_step(actor, engine, random.sample(LINES, 32), step)
            if step == 1 or step % 10 == 0:
                print(f"step {step:3}  mean reward {mean_reward:.3f}", flush=True)

        engine.refit(export_weights(actor.model), version=steps + 1)
        answers = map(text_of, respond(engine, [line["text"] for line in LINES], seed=0, use_greedy=True))
        sums = [(line["text"] + answer, answer == line["answer"]) for line, answer in zip(LINES, answers, strict=True)]
        print(*(text for text, _ in sums))
        print(f"right: {sum(is_right for _, is_right in sums)} of {len(sums)}")


if __name__ == "__main__":
    main()
