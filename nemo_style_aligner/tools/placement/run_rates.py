"""The rates that passes reached in a run, from its log directory."""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from nemo_style_aligner.engine.architecture import ModelArchitecture
from nemo_style_aligner.errors import UserError
from nemo_style_aligner.guard.parsing import parse_yaml
from nemo_style_aligner.tools.placement.costs import Model, Sample
from nemo_style_aligner.tools.placement.rates import Device
from nemo_style_aligner.trainer.config.schema import PPOActor
from nemo_style_aligner.trainer.models.sizes import Layout
from nemo_style_aligner.trainer.telemetry.log_files import HYPERPARAMETERS_FILE
from nemo_style_aligner.trainer.telemetry.metrics import read_metrics

_KNOWN = {
    "trainer.ppo.teacher.restore_from_path": None,
    "trainer.ppo.policy_logprobs": "trainer",
    "trainer.ppo.dynamic_sampling.enable": False,
    "trainer.ppo.top_n_rollouts": None,
    "trainer.ppo.trt_llm.enable": False,
    "model.peft.peft_scheme": "none",
    "model.context_parallel_size": 1,
}
"""Keys of an actor's config, and the only values with which the planner knows what a step does."""


def as_in_run(device: Device, log_dir: Path, policy: ModelArchitecture, itemsize: int) -> Device:
    """The device with the rates that passes reached in a run of the policy: an actor's log directory.

    Every rate is set so that what the planner says of such a run is what the run took.

    Raises:
        UserError: the folder has no metrics of two steps or more, or no config, or the run did what the planner does
            not know.
    """
    from nemo_style_aligner.trainer.launch.roles import ROLLOUT, ranks_apart  # which loads torch

    config, curves = _config_of(log_dir), read_metrics(log_dir)

    def typical(name: str) -> float:
        points = [value for _, value in curves.get(name, ())][1:]  # the first step compiles
        if not points:
            raise UserError(f"{log_dir}: no metric {name} of a second step: give the log directory of an actor's run")
        return statistics.median(points)

    apart = ranks_apart(config.trainer.ppo)
    ranks = config.trainer.devices * config.trainer.num_nodes - sum(apart.values())
    tp, pp = config.model.tensor_model_parallel_size, config.model.pipeline_model_parallel_size
    layout, timer = Layout(tp, pp, ranks // (tp * pp)), "timers/step/rollout_time/"
    prompt, response = typical("train_rollouts/prompt_lengths"), typical("train_rollouts/generation_length")
    samples = [Sample(round(prompt), round(response))] * round(typical("train_rollouts/rollout_size"))
    group = config.trainer.ppo.num_rollouts_per_prompt if config.model.share_prompts else 1
    model, update = Model(policy, itemsize, device=device, group=group), config.model.global_batch_size
    tokens = config.model.max_tokens_per_micro_batch or config.model.micro_batch_size * samples[0].tokens

    passed = model.forward(layout, samples, tokens)
    trained = model.training(layout, samples, tokens, update)
    took, updates = typical("timers/step/train_time"), len(samples) // update * model.update(layout)
    work, took = trained - updates, max(took - updates, took / 2)  # this machine may read more slowly than that one
    if update == len(samples) and config.model.ppo.keep_activations != "never":
        work *= 2 / 3  # with one update, log-probs were training's forward pass
    found = dataclasses.replace(
        device,
        source=f"{device.source}; shares as in {log_dir}",
        forward_share=device.forward_share * passed / typical(f"{timer}logprobs"),
        training_share=device.training_share * work / took,
    )
    generation = config.trainer.ppo.generation.tensor_parallel_size or tp
    engines = (apart.get(ROLLOUT) or ranks) // generation
    passes, slots = typical("generation/passes") / engines, typical("generation/active_slots")

    def generated(factor: float) -> float:
        as_there = Model(policy, itemsize, device=dataclasses.replace(found, decoding_factor=factor))
        prompts = as_there.prefill(generation, typical("generation/prompt_tokens_computed") / engines)
        return prompts + passes * as_there.decode(generation, slots, slots * (prompt + response / 2))

    beside = generated(0.0)  # on which the factor has no influence
    factor = (typical(f"{timer}generate") - beside) / (generated(1.0) - beside)
    return dataclasses.replace(found, decoding_factor=max(0.0, factor))


def _config_of(log_dir: Path) -> PPOActor:
    """The config of an actor's run, if the planner knows all that such a run does."""
    file = log_dir / HYPERPARAMETERS_FILE
    if not file.is_file():
        raise UserError(f"{log_dir}: no {HYPERPARAMETERS_FILE}: give the log directory of an actor's run")
    try:
        given: Any = OmegaConf.create(parse_yaml(file.read_text(encoding="utf-8")))
    except ValueError as error:
        raise UserError(f"{file} cannot be read: {error}") from error
    config = PPOActor.read(given)
    unknown = {key: config.get(key) for key in _KNOWN}
    if said := [f"{key}={value}" for key, value in unknown.items() if value not in (None, _KNOWN[key])]:
        raise UserError(f"{log_dir}: the planner does not know runs with {', '.join(said)}: give another run's folder")
    return config
