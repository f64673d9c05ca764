"""Reward model training: python train_reward_model.py pretrained_checkpoint.restore_from_path=sft.nemo ..."""

try:
    import nemo_style_aligner  # noqa: F401
except ModuleNotFoundError as error:
    raise SystemExit(f"error: {error}: start this with the environment's python, .venv/bin/python {__file__}") from None

from omegaconf import DictConfig

from nemo_style_aligner.launch.start import job


@job("training_rm", check="nemo_style_aligner.jobs.config_checks.check_job")
def main(cfg: DictConfig) -> int:
    # Imported here: the process that only starts and watches the ranks does without these, which take seconds.
    from nemo_style_aligner.jobs.job_setup import register_model, start_run
    from nemo_style_aligner.jobs.supervised_setup import (
        build_supervised_trainer,
        reward_objective,
        reward_task,
        training_sampler,
    )
    from nemo_style_aligner.models.heads import RewardHeadConfig
    from nemo_style_aligner.models.restore import open_base_model

    run = start_run(cfg)
    base = open_base_model(cfg.pretrained_checkpoint.restore_from_path, cfg)
    register_model(cfg, run, base)
    head = RewardHeadConfig.from_model_config(cfg.model)
    task = reward_task(cfg, base.tokenizer, head)
    training_sampler(cfg, task)  # too few examples are an error before any weight is read
    model = base.load(head=head)
    trainer = build_supervised_trainer(cfg, cfg.trainer.rm, run, model, task, reward_objective(cfg, head))
    trainer.fit()
    return run.close()


if __name__ == "__main__":
    main()
