"""A reward model as a service of its own: python serve_reward_model.py rm_model_file=rm.nemo inference.port=5555 ..."""

try:
    import nemo_style_aligner  # noqa: F401
except ModuleNotFoundError as error:
    raise SystemExit(f"error: {error}: start this with the environment's python, .venv/bin/python {__file__}") from None

from nemo_style_aligner.trainer.config.schema import RewardService
from nemo_style_aligner.trainer.launch.start import job


@job("inference_rm", check="nemo_style_aligner.trainer.jobs.config_checks.check_job", is_service=True)
def main(config: RewardService) -> int:
    # Imported here: the process that only starts and watches the ranks does without these, which take seconds.
    from nemo_style_aligner.trainer.jobs.service_setup import run_frozen_model

    return run_frozen_model(config)


if __name__ == "__main__":
    main()
