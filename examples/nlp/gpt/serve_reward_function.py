"""Serve a Python function as the reward model of a PPO run: rewards by rules, tests or a judge instead of a model.

    python serve_reward_function.py --function my_rewards.py:reward --tokenizer policy.nemo --port 5555

The function gets the texts of prompt and response and the prompt's line with all its keys, and returns a number:

    def reward(prompt: str, response: str, line: dict) -> float:
        return float(is_right(response, line))  # nemo_style_aligner.trainer.data.answers

docs/service.md says how to start the actor and the critic with it.
"""

try:
    import nemo_style_aligner  # noqa: F401
except ModuleNotFoundError as error:
    raise SystemExit(f"error: {error}: start this with the environment's python, .venv/bin/python {__file__}") from None

import argparse
import logging
from pathlib import Path

from nemo_style_aligner.arguments import HelpFormatter
from nemo_style_aligner.errors import UserError
from nemo_style_aligner.guard.secret import resolve_token
from nemo_style_aligner.trainer.launch.ending import install_excepthook
from nemo_style_aligner.trainer.launch.initialization import bind_address
from nemo_style_aligner.trainer.launch.supervisor import end_with_supervisor
from nemo_style_aligner.trainer.telemetry.log_lines import LOG_FORMATS, LOG_LEVELS, configure_logging
from nemo_style_aligner.wording import unescaped

CALL_SECONDS = 600.0  # of one call of the function, as long as a request may wait


def main() -> None:
    install_excepthook()
    end_with_supervisor()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument(
        "--function", required=True, metavar="FILE.py:NAME", help="the reward function; the file is executed"
    )
    parser.add_argument("--tokenizer", type=Path, required=True, help="the policy's: .nemo, or a tokenizer directory")
    parser.add_argument(
        "--end-strings",
        nargs="*",
        default=[],
        help="the actor's end_strings: responses are cut before the first of them, as before what the model has learnt",
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=None,
        help="calls at once; above 1 a function must be thread-safe (default: 1, or 64 if it is an `async def`)",
    )
    parser.add_argument("--port", type=int, default=5555, help="0: any free one")
    parser.add_argument(
        "--host", default=None, help="address to listen on; default: as for inference.host of a reward model"
    )
    parser.add_argument("--token", default="auto", help="the shared secret: auto, none or a word; see docs/service.md")
    parser.add_argument("--known-as", nargs="*", default=[], help="as inference.known_as of a reward model")
    parser.add_argument("--log-format", choices=LOG_FORMATS, default="text")
    parser.add_argument("--log-level", choices=LOG_LEVELS, default="info", help="debug: also each request")
    args = parser.parse_args()
    if args.threads is not None and args.threads < 1:
        parser.error(f"--threads {args.threads}: give at least 1")

    # Imported here: they take seconds, in which Ctrl-C should end the script as later on.
    from nemo_style_aligner.trainer.jobs.reward_function import FunctionEndpoint
    from nemo_style_aligner.trainer.models.files import tokenizer_of
    from nemo_style_aligner.trainer.rl.reward_functions import FunctionRewards, load_reward_function
    from nemo_style_aligner.trainer.services.model_server import DispatchSettings, ModelServer
    from nemo_style_aligner.trainer.services.routes import HttpSettings

    configure_logging(level=getattr(logging, args.log_level.upper()), log_format=args.log_format)
    try:
        tokenizer = tokenizer_of(args.tokenizer)
        function = load_reward_function(args.function, "--function")
        rewards = FunctionRewards(function, args.function, seconds=CALL_SECONDS, max_parallel=args.threads)
        http = HttpSettings(
            port=args.port,
            host=bind_address(args.host),
            token=resolve_token(args.token, "--token"),
            known_as=tuple(args.known_as),
        )
        endpoint = FunctionEndpoint(rewards, tokenizer, [unescaped(string) for string in args.end_strings])
        service = ModelServer([endpoint], http, DispatchSettings(1, 0))  # one row: an error fails one request only
    except (UserError, OSError) as error:
        parser.error(str(error))
    service.run(None)
    rewards.close()


if __name__ == "__main__":
    main()
