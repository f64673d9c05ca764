"""Knowledge distillation: python train_gpt_knowledge_distillation.py pretrained_checkpoint.restore_from_path=..."""

try:
    import nemo_style_aligner  # noqa: F401
except ModuleNotFoundError as error:
    raise SystemExit(f"error: {error}: start this with the environment's python, .venv/bin/python {__file__}") from None

from nemo_style_aligner.trainer.config.schema import DistillationTraining
from nemo_style_aligner.trainer.launch.start import job


@job("gpt_knowledge_distillation", check="nemo_style_aligner.trainer.jobs.config_checks.check_job")
def main(config: DistillationTraining) -> int:
    # Imported here: the process that only starts and watches the ranks does without these, which take seconds.
    from nemo_style_aligner.trainer.jobs.distillation_setup import build_distillation_trainer
    from nemo_style_aligner.trainer.jobs.supervised_setup import run_supervised

    return run_supervised(config, build_distillation_trainer)


if __name__ == "__main__":
    main()
