"""A reward model as a service of its own: python serve_reward_model.py rm_model_file=rm.nemo inference.port=5555 ..."""

try:
    import nemo_style_aligner  # noqa: F401
except ModuleNotFoundError as error:
    raise SystemExit(f"error: {error}: start this with the environment's python, .venv/bin/python {__file__}") from None

from omegaconf import DictConfig

from nemo_style_aligner.launch.start import job


@job("inference_rm", check="nemo_style_aligner.jobs.config_checks.check_job", is_service=True)
def main(cfg: DictConfig) -> int:
    # Imported here: the process that only starts and watches the ranks does without these, which take seconds.
    from nemo_style_aligner.jobs.job_setup import start_service_watchdog
    from nemo_style_aligner.jobs.service_setup import build_reward_service, listen_as_reward_model, serve
    from nemo_style_aligner.models.restore import open_base_model
    from nemo_style_aligner.parallel.groups import initialize_model_parallel
    from nemo_style_aligner.training.run_control import RunControl, parse_duration

    layout = initialize_model_parallel(
        cfg.model.tensor_model_parallel_size,
        cfg.model.pipeline_model_parallel_size,
        cfg.model.seed,
        cfg.trainer.distributed_timeout_minutes,
    )
    control = RunControl(parse_duration(cfg.exp_manager.max_time_per_run))
    watchdog = start_service_watchdog(cfg.exp_manager)
    base = open_base_model(cfg.rm_model_file, cfg, key="rm_model_file")
    status = serve(listen_as_reward_model(cfg, layout, base), build_reward_service(cfg, base), control)
    if watchdog is not None:
        watchdog.stop()
    return status


if __name__ == "__main__":
    main()
