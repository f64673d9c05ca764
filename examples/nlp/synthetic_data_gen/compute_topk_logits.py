"""A teacher's logits, for distillation: python compute_topk_logits.py pretrained_checkpoint.restore_from_path=..."""

try:
    import nemo_style_aligner  # noqa: F401
except ModuleNotFoundError as error:
    raise SystemExit(f"error: {error}: start this with the environment's python, .venv/bin/python {__file__}") from None

from nemo_style_aligner.trainer.config.schema import TeacherLogits
from nemo_style_aligner.trainer.launch.start import job


@job("compute_topk_logits", check="nemo_style_aligner.trainer.jobs.config_checks.check_job")
def main(config: TeacherLogits) -> int:
    # Imported here: the process that only starts and watches the ranks does without these, which take seconds.
    from nemo_style_aligner.trainer.jobs.distillation_setup import store_teacher_logits

    return store_teacher_logits(config)


if __name__ == "__main__":
    main()
