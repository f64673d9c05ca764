"""Generate responses to prompts and measure them: right answers, rewards, lengths.

    python evaluate_gpt.py --model policy.nemo --prompts test_prompts.jsonl --output results.json \\
        [--reward-model rm.nemo] [--greedy] [--max-length 32] [--end-strings "User:"] [--add-bos]

Prompts are JSONL lines {"text": ..., "answer": ..., "answer_extraction": ...}; docs/data.md (Right answers) says how
responses are compared with "answer", without which there is no accuracy. docs/jobs.md says what the results mean.
"""

try:
    import nemo_style_aligner  # noqa: F401
except ModuleNotFoundError as error:
    raise SystemExit(f"error: {error}: start this with the environment's python, .venv/bin/python {__file__}") from None

import argparse
import json
import logging
import sys
from pathlib import Path

from nemo_style_aligner.arguments import HelpFormatter, output_argument, seed_argument
from nemo_style_aligner.errors import UserError
from nemo_style_aligner.launch.ending import install_excepthook
from nemo_style_aligner.wording import download_hint, unescaped


def main() -> None:
    install_excepthook()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="the .nemo file or directory of the policy")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL file of the prompts")
    parser.add_argument(
        "--output", type=output_argument, required=True, help="JSON file to write: summary and responses"
    )
    parser.add_argument(
        "--reward-model",
        type=Path,
        default=None,
        help="the .nemo file or directory of a reward model to score the responses",
    )
    parser.add_argument("--precision", default="bf16", choices=("bf16", "32"), help="precision of the weights")
    parser.add_argument("--limit", type=int, default=None, help="use the first prompts only (default: all)")
    parser.add_argument("--greedy", action="store_true", help="take the most likely tokens instead of sampling")
    parser.add_argument("--temperature", type=float, default=1.0, help="of sampling; lower is closer to greedy")
    parser.add_argument(
        "--max-length",
        type=int,
        default=None,
        help="longest response in tokens; with its prompt it must fit into the model's positions (default: 128, "
        "or half of the positions where that is less)",
    )
    parser.add_argument(
        "--end-strings",
        nargs="*",
        default=[],
        help="strings that end a response, besides the EOS token and what the model has learnt (default: none)",
    )
    parser.add_argument(
        "--add-bos",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="BOS token before each prompt, as sampling_params.add_BOS in PPO (default: as the model was trained)",
    )
    parser.add_argument(
        "--num-slots",
        type=int,
        default=32,
        help="responses generated at the same time; more take more memory",
    )
    parser.add_argument("--seed", type=seed_argument, default=1234, help="random seed of sampling")
    args = parser.parse_args()

    if not args.prompts.is_file():
        parser.error(f"--prompts {args.prompts}: no such file")
    for option, archive in (("--model", args.model), ("--reward-model", args.reward_model)):
        if archive is not None and not archive.exists():
            parser.error(f"{option} {archive} does not exist{download_hint(str(archive))}")
    for option, number in (("--limit", args.limit), ("--max-length", args.max_length), ("--num-slots", args.num_slots)):
        if number is not None and number < 1:
            parser.error(f"{option} {number}: give at least 1")
    if not args.temperature > 0:
        parser.error(f"--temperature {args.temperature}: must be above 0; use --greedy for the most likely tokens")
    if args.output.is_dir():
        parser.error(f"--output {args.output} is a folder: name a file")
    try:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        _evaluate(args)
    except (UserError, OSError) as error:
        parser.error(str(error))


def _evaluate(args: argparse.Namespace) -> None:
    print(f"loading torch and megatron-core, then {args.model}", file=sys.stderr, flush=True)
    from nemo_style_aligner.checkpoints.nemo_archive import require_reward_head
    from nemo_style_aligner.engine.contract import SamplingParams
    from nemo_style_aligner.jobs.evaluation import default_max_length, evaluate, score
    from nemo_style_aligner.models.restore import require_same_tokenizer
    from nemo_style_aligner.parallel.groups import single_process

    logging.basicConfig(format="%(levelname)s: %(message)s")
    max_length = args.max_length or default_max_length(args.model)
    try:
        sampling = SamplingParams(
            max_new_tokens=max_length,
            use_greedy=args.greedy,
            temperature=args.temperature,
            stop_strings=tuple(map(unescaped, args.end_strings)),
            seed=args.seed,
        )
    except ValueError as error:
        raise UserError(str(error)) from error
    if args.reward_model is not None:
        require_same_tokenizer(args.model, args.reward_model)
        require_reward_head(args.reward_model)
    with single_process(args.seed):
        responses = evaluate(
            args.model, args.prompts, sampling, args.precision, args.num_slots, args.limit, args.add_bos
        )
        args.output.write_text(json.dumps(responses.to_json(), indent=1))  # in case scoring fails
        if args.reward_model is not None:
            score(responses, args.reward_model, args.precision)
    print(json.dumps(responses.summary(), indent=1))
    args.output.write_text(json.dumps(responses.to_json(), indent=1))


if __name__ == "__main__":
    main()
