"""Direct preference optimization: python train_gpt_dpo.py pretrained_checkpoint.restore_from_path=sft.nemo ..."""

try:
    import nemo_style_aligner  # noqa: F401
except ModuleNotFoundError as error:
    raise SystemExit(f"error: {error}: start this with the environment's python, .venv/bin/python {__file__}") from None

from nemo_style_aligner.trainer.config.schema import DPOTraining
from nemo_style_aligner.trainer.launch.start import job


@job("gpt_dpo", check="nemo_style_aligner.trainer.jobs.config_checks.check_job")
def main(config: DPOTraining) -> int:
    # Imported here: the process that only starts and watches the ranks does without these, which take seconds.
    from nemo_style_aligner.trainer.jobs.preference_setup import build_dpo_trainer
    from nemo_style_aligner.trainer.jobs.supervised_setup import run_supervised

    return run_supervised(config, build_dpo_trainer)


if __name__ == "__main__":
    main()
