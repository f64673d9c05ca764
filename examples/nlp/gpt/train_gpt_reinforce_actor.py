"""The REINFORCE actor: python train_gpt_reinforce_actor.py pretrained_checkpoint.restore_from_path=sft.nemo ...

The reward service (serve_reward_model.py or serve_reward_function.py) must be running or starting,
unless trainer.reinforce.rewards names other sources; there is no critic.
"""

try:
    import nemo_style_aligner  # noqa: F401
except ModuleNotFoundError as error:
    raise SystemExit(f"error: {error}: start this with the environment's python, .venv/bin/python {__file__}") from None

from nemo_style_aligner.trainer.config.schema import PPOActor
from nemo_style_aligner.trainer.launch.start import job


@job("gpt_reinforce_actor", check="nemo_style_aligner.trainer.jobs.config_checks.check_job")
def main(config: PPOActor) -> int:
    # Imported here: the process that only starts and watches the ranks does without these, which take seconds.
    from nemo_style_aligner.trainer.jobs.rl_setup import run_actor

    return run_actor(config)


if __name__ == "__main__":
    main()
