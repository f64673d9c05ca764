"""TRL's PPO trainer as a contender of `ppo_step.py`: one step at a time, its phases timed.

    python ppo_trl.py ADDRESS SETTINGS.json

Runs in any environment that has trl 1.12.0; imports nothing of this project. The trainer is TRL's own. Around it:
``generate`` gets a logits processor that forces each response's length (the stop token where the response must end and
nowhere before), and the functions of the rollout phase are timed.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from ppo_turns import Turns
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer


class ForcedLengths(transformers.LogitsProcessor):
    """Makes the stop token certain where a response must end, impossible before, and the pad token impossible always.

    Args:
        lengths: tokens of each row's response, the stop token included.
        start: width of the prompts.
    """

    def __init__(self, lengths: list[int], start: int, stop_id: int, pad_id: int) -> None:
        self._last = torch.tensor(lengths) + start - 1
        self._stop_id, self._pad_id = stop_id, pad_id

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, [self._stop_id, self._pad_id]] = -torch.inf
        self._last = self._last.to(scores.device)
        ends = (self._last == input_ids.shape[1]).nonzero()[:, 0]
        scores[ends] = -torch.inf
        scores[ends, self._stop_id] = 0.0
        return scores


def synchronize() -> None:
    """Wait for the GPU's work, which would otherwise count for a later phase."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Phases:
    """Seconds by phase since the last `take`."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._started = time.perf_counter()
        self._training_since: float | None = None
        self.last = ""

    def timed(self, name: Callable[..., str], function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``function`` to add its time to the phase that ``name`` gives for its arguments ("": none)."""

        def call(*args: Any, **kwargs: Any) -> Any:
            phase = name(*args)
            if not phase:
                return function(*args, **kwargs)
            synchronize()
            started = time.perf_counter()
            result = function(*args, **kwargs)
            synchronize()
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - started
            self.last = phase
            return result

        return call

    def begin_training(self) -> None:
        """Note the beginning of training: the first call in a step, after which everything is training."""
        if self._training_since is None:
            synchronize()
            self._training_since = time.perf_counter()

    def restart(self) -> None:
        """Begin a step."""
        self._seconds, self._training_since, self.last = {}, None, ""
        self._started = time.perf_counter()

    def take(self) -> dict[str, float]:
        """The step's phases, and the whole of it as ``step``."""
        synchronize()
        now = time.perf_counter()
        if self._training_since is not None:
            self._seconds["train"] = now - self._training_since
        return {"step": now - self._started, **self._seconds}


class TakeTurns(transformers.TrainerCallback):
    """After each step: report, and wait for the next turn."""

    def __init__(self, turns: Turns, phases: Phases, counts: dict[str, int]) -> None:
        self._turns, self._phases, self._counts = turns, phases, counts

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._turns.report(0)
        self._begin()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        self._turns.report({"phases": self._phases.take(), "device_peak_bytes": peak, **self._counts})
        self._begin()

    def _begin(self) -> None:
        self._turns.wait()
        self._counts.update(prompt_tokens=0, new_tokens=0)
        self._phases.restart()


def force_lengths(policy: Any, settings: dict[str, Any], counts: dict[str, int]) -> None:
    """Have ``policy.generate`` make responses of the forced lengths, and count their tokens."""
    lengths = {tuple(prompt): length for prompt, length in settings["prompts"]}
    stop_id, pad_id = settings["stop_id"], settings["pad_id"]
    generate = policy.generate

    def forced(input_ids: torch.Tensor, attention_mask: torch.Tensor, **kwargs: Any) -> Any:
        wanted = [lengths[tuple(row[mask].tolist())] for row, mask in zip(input_ids, attention_mask, strict=True)]
        processor = ForcedLengths(wanted, input_ids.shape[1], stop_id, pad_id)
        output = generate(input_ids=input_ids, attention_mask=attention_mask, logits_processor=[processor], **kwargs)
        responses = output.sequences[:, input_ids.shape[1] :]
        got = (responses != pad_id).sum(1).tolist()
        if got != wanted or not (responses == stop_id).sum(1).eq(1).all():
            raise RuntimeError(f"responses of {got} tokens instead of {wanted}")
        counts["prompt_tokens"] += int(attention_mask.sum())
        counts["new_tokens"] += sum(got)
        return output

    policy.generate = forced


def main() -> None:
    turns, settings = Turns(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    torch.set_num_threads(settings["threads"])
    transformers.logging.set_verbosity_error()
    dtype = getattr(torch, settings["dtype"])

    def load(kind: Any, path: str, **options: Any) -> Any:
        model = kind.from_pretrained(path, dtype=dtype, attn_implementation="sdpa", **options)
        model.config.pad_token_id = settings["pad_id"]
        return model

    policy, reference = (load(transformers.AutoModelForCausalLM, settings["policy"]) for _ in range(2))
    reward, value = (
        load(transformers.AutoModelForSequenceClassification, settings["reward_model"], num_labels=1) for _ in range(2)
    )
    for model in (reference, reward, value):
        model.config.use_cache = False
    tokenizer = transformers.AutoTokenizer.from_pretrained(settings["policy"], padding_side="left")
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(settings["pad_id"])
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(settings["stop_id"])

    # Otherwise rows that have ended would be filled with stop tokens, which TRL would not mask everywhere.
    policy.generation_config.pad_token_id = settings["pad_id"]

    counts: dict[str, int] = {}
    phases = Phases()
    force_lengths(policy, settings, counts)
    prompts = [prompt for prompt, _ in settings["prompts"]]
    config = PPOConfig(
        output_dir=settings["output"],
        use_cpu=settings["device"] == "cpu",
        bf16=False,  # no autocast: the weights themselves have the dtype
        gradient_checkpointing=False,
        per_device_train_batch_size=settings["micro_batch"],
        gradient_accumulation_steps=len(prompts) // settings["micro_batch"],
        local_rollout_forward_batch_size=settings["rollout_batch"],
        num_mini_batches=1,
        num_ppo_epochs=1,
        response_length=max(length for _, length in settings["prompts"]),
        stop_token_id=settings["stop_id"],
        temperature=1.0,
        kl_coef=settings["kl_coef"],
        learning_rate=settings["lr"],
        lr_scheduler_type="constant",
        total_episodes=len(prompts) * settings["max_steps"],
        num_sample_generations=0,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        seed=1,
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
    computes_on = trainer.accelerator.device.type
    if computes_on != settings["device"]:
        sys.exit(f"TRL would compute on {computes_on}, not on {settings['device']}")

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
