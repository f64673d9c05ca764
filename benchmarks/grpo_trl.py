"""TRL's GRPO trainer as a contender of `grpo_step.py`: one step at a time, its phases timed.

    python grpo_trl.py ADDRESS SETTINGS.json

Runs in any environment that has trl 1.16.0; imports nothing of this project. The trainer is TRL's own; around it are
the same additions as in `ppo_trl.py`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from grpo_reward import rewards
from ppo_turns import Turns
from trl import GRPOConfig, GRPOTrainer
from trl_turns import Phases, TakeTurns, common_options, force_lengths, load_policy, require_device


def main() -> None:
    turns, settings = Turns(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    torch.set_num_threads(settings["threads"])
    transformers.logging.set_verbosity_error()
    policy, tokenizer = load_policy(settings)
    counts: dict[str, int] = {}
    phases = Phases()
    force_lengths(policy, settings, counts)
    config = GRPOConfig(
        **common_options(settings),
        num_generations=settings["group"],
        max_completion_length=max(length for _, length in settings["prompts"]),
        beta=settings["kl_coef"],
        max_steps=settings["max_steps"],
        shuffle_dataset=False,
    )
    trainer = GRPOTrainer(
        model=policy,
        args=config,
        reward_funcs=rewards,
        processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_dict({"prompt": settings["texts"]}),
        callbacks=[TakeTurns(turns, phases, counts)],
    )
    require_device(trainer, settings["device"])
    compute_loss = trainer._compute_loss

    def training(*args: Any) -> Any:
        phases.begin_training()
        return compute_loss(*args)

    def forward_phase(model: Any, *_: Any) -> str:
        return "init_logprobs" if model is trainer.ref_model else ""

    trainer._compute_loss = training
    policy.generate = phases.timed(lambda *_: "generate", policy.generate)
    trainer._calculate_rewards = phases.timed(lambda *_: "score", trainer._calculate_rewards)
    scored = phases.timed(forward_phase, trainer._get_per_token_logps_and_entropies)
    trainer._get_per_token_logps_and_entropies = scored
    trainer.train()


if __name__ == "__main__":
    main()
