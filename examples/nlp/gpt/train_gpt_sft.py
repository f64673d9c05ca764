"""Supervised fine-tuning: python train_gpt_sft.py model.restore_from_path=base.nemo model.data.train_ds..."""

try:
    import nemo_style_aligner  # noqa: F401
except ModuleNotFoundError as error:
    raise SystemExit(f"error: {error}: start this with the environment's python, .venv/bin/python {__file__}") from None

from nemo_style_aligner.trainer.config.schema import SFT
from nemo_style_aligner.trainer.launch.start import job


@job("gpt_sft", check="nemo_style_aligner.trainer.jobs.config_checks.check_job")
def main(config: SFT) -> int:
    # Imported here: the process that only starts and watches the ranks does without these, which take seconds.
    from nemo_style_aligner.trainer.jobs.supervised_setup import build_sft_trainer, run_supervised

    return run_supervised(config, build_sft_trainer, "model.restore_from_path")


if __name__ == "__main__":
    main()
