"""TRL's PPO trainer as a contender of `ppo_step.py`: one step at a time, its phases timed.

    python ppo_trl.py ADDRESS SETTINGS.json

Runs in any environment that has trl 1.12.0; imports nothing of this project. The trainer is TRL's own. Around it:
``generate`` gets a logits processor that forces each response's length (the stop token where the response must end and
nowhere before), and the functions of the rollout phase are timed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from ppo_turns import Turns
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer
from trl_turns import Phases, TakeTurns, common_options, force_lengths, load_model, load_policy, require_device


def main() -> None:
    turns, settings = Turns(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    torch.set_num_threads(settings["threads"])
    transformers.logging.set_verbosity_error()
    policy, tokenizer = load_policy(settings)
    reference = load_model(transformers.AutoModelForCausalLM, settings["policy"], settings)
    classifier, path = transformers.AutoModelForSequenceClassification, settings["reward_model"]
    reward, value = (load_model(classifier, path, settings, num_labels=1) for _ in range(2))
    for model in (reference, reward, value):
        model.config.use_cache = False

    counts: dict[str, int] = {}
    phases = Phases()
    force_lengths(policy, settings, counts)
    prompts = [prompt for prompt, _ in settings["prompts"]]
    config = PPOConfig(
        **common_options(settings),
        local_rollout_forward_batch_size=settings["rollout_batch"],
        num_mini_batches=1,
        num_ppo_epochs=1,
        response_length=max(length for _, length in settings["prompts"]),
        stop_token_id=settings["stop_id"],
        kl_coef=settings["kl_coef"],
        total_episodes=len(prompts) * settings["max_steps"],
        num_sample_generations=0,
    )
    trainer = PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=policy,
        ref_model=reference,
        reward_model=reward,
        value_model=value,
        train_dataset=datasets.Dataset.from_dict({"input_ids": prompts}),
        callbacks=[TakeTurns(turns, phases, counts)],
    )
    require_device(trainer, settings["device"])

    def forward_phase(model: Any, *_: Any) -> str:
        if model is reference:
            return "init_logprobs"
        phases.begin_training()
        return ""

    def softmax_phase(*_: Any) -> str:
        if torch.is_grad_enabled():
            return ""
        return "init_logprobs" if phases.last == "init_logprobs" else "logprobs"

    ppo_trainer.batch_generation = phases.timed(lambda *_: "generate", ppo_trainer.batch_generation)
    ppo_trainer.forward = phases.timed(forward_phase, ppo_trainer.forward)
    ppo_trainer.selective_log_softmax = phases.timed(softmax_phase, ppo_trainer.selective_log_softmax)
    ppo_trainer.get_reward = phases.timed(lambda *_: "score", ppo_trainer.get_reward)
    trainer.train()


if __name__ == "__main__":
    main()
