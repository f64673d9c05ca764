"""Supervised fine-tuning: python train_gpt_sft.py model.restore_from_path=base.nemo model.data.train_ds..."""

try:
    import nemo_style_aligner  # noqa: F401
except ModuleNotFoundError as error:
    raise SystemExit(f"error: {error}: start this with the environment's python, .venv/bin/python {__file__}") from None

from omegaconf import DictConfig

from nemo_style_aligner.launch.start import job


@job("gpt_sft", check="nemo_style_aligner.jobs.config_checks.check_job")
def main(cfg: DictConfig) -> int:
    # Imported here: the process that only starts and watches the ranks does without these, which take seconds.
    from nemo_style_aligner.jobs.job_setup import register_model, start_run
    from nemo_style_aligner.jobs.supervised_setup import build_supervised_trainer, sft_task, training_sampler
    from nemo_style_aligner.models.restore import open_base_model
    from nemo_style_aligner.models.supervised_losses import language_model_objective

    run = start_run(cfg)
    base = open_base_model(cfg.model.restore_from_path, cfg, key="model.restore_from_path")
    register_model(cfg, run, base)
    task = sft_task(cfg, base.tokenizer)
    training_sampler(cfg, task)  # too few examples are an error before any weight is read
    model = base.load()
    trainer = build_supervised_trainer(cfg, cfg.trainer.sft, run, model, task, language_model_objective())
    trainer.fit()
    return run.close()


if __name__ == "__main__":
    main()
