"""The critic and reward service: python serve_ppo_critic.py pretrained_checkpoint.restore_from_path=rm.nemo ..."""

try:
    import nemo_style_aligner  # noqa: F401
except ModuleNotFoundError as error:
    raise SystemExit(f"error: {error}: start this with the environment's python, .venv/bin/python {__file__}") from None

from nemo_style_aligner.trainer.config.schema import Critic
from nemo_style_aligner.trainer.launch.start import job


@job("gpt_ppo_critic", check="nemo_style_aligner.trainer.jobs.config_checks.check_job", is_service=True)
def main(config: Critic) -> int:
    # Imported here: the process that only starts and watches the ranks does without these, which take seconds.
    from nemo_style_aligner.trainer.jobs.service_setup import run_critic

    return run_critic(config)


if __name__ == "__main__":
    main()
