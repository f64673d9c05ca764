"""``nsa serve``: a checkpoint behind an OpenAI-compatible API."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from nemo_style_aligner.tools.cli.main import announce

_EXAMPLES = """\b
Examples:
  nsa serve policy.nemo
  nsa serve ./SmolLM2-135M-Instruct --port 8000 --precision 32
  NEMO_STYLE_ALIGNER_TOKEN=sk-mine nsa serve policy.nemo --name my-model

\b
Then, with the key that the log names:
  OpenAI(base_url="http://127.0.0.1:8000/v1", api_key=...).chat.completions.create(model="policy", messages=...)
"""


def _origins(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    for value in values:
        if value != "*" and not re.fullmatch(r"[a-z][a-z+.-]*://[^/\s]+", value):
            raise click.BadParameter(f"{value}: an origin is a scheme and a host, without a path: https://host[:port]")
    return values


@click.command(epilog=_EXAMPLES)
@click.argument("checkpoint", type=click.Path(exists=True, path_type=Path))
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, help="0: any free one.")
@click.option("--name", help="What requests call the model.  [default: the checkpoint's file name]")
@click.option("--api-key-file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Holds the API key.")
@click.option("--no-auth", is_flag=True, help="Answer whoever reaches the port.")
@click.option(
    "--allow-origin",
    "allowed_origins",
    multiple=True,
    callback=_origins,
    help="Whose web pages may ask, such as https://chat.example.org; * for any; may be given again.",
)
@click.option("--precision", type=click.Choice(["bf16", "32"]), default="bf16", help="Of weights and computation.")
@click.option("--max-length", type=click.IntRange(min=2), help="Tokens of prompt and response.  [default: the model's]")
@click.option("--num-slots", type=click.IntRange(min=1), default=32, help="Responses generated at the same time.")
@click.option(
    "--kv-cache-tokens", type=click.IntRange(min=16), help="Tokens of KV memory.  [default: all slots at full length]"
)
@click.option(
    "--tensor-parallel-size",
    type=click.IntRange(min=1),
    help="Ranks that share the model: as many as mpirun, srun or torchrun has started; else they are started here.",
)
@click.option("--special-tokens-as-text", is_flag=True, help="In messages, <|im_end|> and the like are letters.")
@click.option("--max-queued", type=click.IntRange(min=1), default=1024, help="Responses waiting or made; else 429.")
@click.option("--timeout", type=click.FloatRange(min=1), default=600, help="Seconds for a whole answer; else 504.")
@click.option("--drain-seconds", type=click.FloatRange(min=0), default=30, help="To finish answers when stopped.")
@click.option("--log-level", type=click.Choice(["debug", "info", "warning"]), default="info", help="debug: requests.")
def command(
    checkpoint: Path,
    host: str,
    port: int,
    name: str | None,
    api_key_file: Path | None,
    no_auth: bool,
    tensor_parallel_size: int | None,
    special_tokens_as_text: bool,
    allowed_origins: tuple[str, ...],
    max_queued: int,
    timeout: float,
    drain_seconds: float,
    log_level: str,
    **of_engine: Any,
) -> None:
    """Serve CHECKPOINT (a .nemo archive, a Hugging Face directory or a GGUF file) behind an OpenAI-compatible API.

    Clients send the API key: the secret that all jobs of a user share, unless --api-key-file or the environment
    (NEMO_STYLE_ALIGNER_TOKEN) has another. docs/serving.md says what is supported.
    """
    import logging
    import os
    import signal
    import sys
    import threading

    announce(f"torch, then {checkpoint}")
    from nemo_style_aligner.engine.lockstep import Lockstep
    from nemo_style_aligner.engine.parallel.detection import detect_launch
    from nemo_style_aligner.engine.serving.app import ServedModel
    from nemo_style_aligner.guard.http_client import server_url
    from nemo_style_aligner.guard.http_server import require_free
    from nemo_style_aligner.guard.secret import AUTO, NONE, read_secret, resolve_token
    from nemo_style_aligner.tools.serving.checkpoint import load_model
    from nemo_style_aligner.tools.serving.ranks import serving_ranks
    from nemo_style_aligner.trainer.launch.supervisor import supervise
    from nemo_style_aligner.trainer.telemetry.log_lines import configure_logging

    info = detect_launch(os.environ)
    configure_logging(info.rank, getattr(logging, log_level.upper()))
    logger = logging.getLogger("nemo_style_aligner.serve")
    if api_key_file is not None and no_auth:
        raise click.UsageError("--api-key-file and --no-auth contradict each other")
    key = read_secret(api_key_file).value if api_key_file else None
    token = key or resolve_token(NONE if no_auth else AUTO, "--no-auth")
    stopped, size = threading.Event(), tensor_parallel_size or info.world_size
    if info.world_size not in (1, size):
        raise click.UsageError(
            f"--tensor-parallel-size {size}, but {info.launcher} has started {info.world_size} ranks"
        )
    if info.rank == 0:
        require_free(host, port, "the API")
    if info.world_size < size:
        sys.exit(supervise(size))
    with serving_ranks() as group:
        engine, tokenizer = load_model(checkpoint, ranks=group.tensor_parallel, **of_engine)
        if not group.is_leader:
            for number in (signal.SIGTERM, signal.SIGINT):  # the leader says when it is over
                signal.signal(number, signal.SIG_IGN)
            Lockstep(engine, group).attend()
            return
        tokenizer.format = tokenizer.format.with_special_tokens(special_tokens_as_text or None)
        served = ServedModel(
            engine,
            tokenizer,
            name or model_name(checkpoint),
            host=host,
            port=port,
            token=token,
            allowed_origins=allowed_origins,
            request_seconds=timeout,
            max_outstanding=max_queued,
            group=group,
        )
        for number in (signal.SIGTERM, signal.SIGINT):  # before, they end the process: there is nothing to finish
            signal.signal(number, lambda *_: stopped.set())
        logger.info("ready: %s/v1", server_url(served.server.host, served.server.port))
        stopped.wait()
        logger.info("stopping: answers in progress have %g s", drain_seconds)
        served.close(drain_seconds)


def model_name(checkpoint: Path) -> str:
    """What requests call a checkpoint that is given no name."""
    return checkpoint.absolute().name.removesuffix(".nemo").removesuffix(".gguf")
