"""The PPO actor: python train_gpt_ppo_actor.py pretrained_checkpoint.restore_from_path=sft.nemo ...

The critic and reward service (serve_ppo_critic.py) must be running or starting.
"""

try:
    import nemo_style_aligner  # noqa: F401
except ModuleNotFoundError as error:
    raise SystemExit(f"error: {error}: start this with the environment's python, .venv/bin/python {__file__}") from None

from omegaconf import DictConfig

from nemo_style_aligner.parallel.launch import job


@job("gpt_ppo_actor", check="nemo_style_aligner.algorithms.config_checks.check_job")
def main(cfg: DictConfig) -> int:
    # Imported here: the process that only starts and watches the ranks does without these, which take seconds.
    from nemo_style_aligner.algorithms.job_setup import register_model, start_run
    from nemo_style_aligner.algorithms.rl_setup import build_ppo_trainer, serve_rollouts
    from nemo_style_aligner.models.restore import open_base_model
    from nemo_style_aligner.parallel.worlds import is_rollout_rank

    if is_rollout_rank():
        return serve_rollouts(cfg)
    run = start_run(cfg)
    base = open_base_model(cfg.pretrained_checkpoint.restore_from_path, cfg)
    register_model(cfg, run, base)
    trainer = build_ppo_trainer(cfg, run, base)
    trainer.fit()
    trainer.close()
    return run.close()


if __name__ == "__main__":
    main()
