"""The actor job, as each of its ranks runs it: the same for every algorithm."""

from __future__ import annotations

from omegaconf import DictConfig

from nemo_style_aligner.algorithms import rl_setup
from nemo_style_aligner.algorithms.job_setup import register_model, start_run
from nemo_style_aligner.models.restore import open_base_model
from nemo_style_aligner.parallel.worlds import is_rollout_rank


def run_actor(cfg: DictConfig) -> int:
    """Train a policy, or generate for the ranks that do; return the job's exit status. Collective.

    For errors see `rl_setup.build_ppo_trainer`.
    """
    if is_rollout_rank():
        return rl_setup.serve_rollouts(cfg)
    run = start_run(cfg)
    base = open_base_model(cfg.pretrained_checkpoint.restore_from_path, cfg)
    register_model(cfg, run, base)
    trainer = rl_setup.build_ppo_trainer(cfg, run, base)
    trainer.fit()
    trainer.close()
    return run.close()
