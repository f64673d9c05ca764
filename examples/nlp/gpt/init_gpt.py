"""Make a .nemo checkpoint of a randomly initialised model, to train from scratch.

    python init_gpt.py --tokenizer DIR --output base.nemo --num-layers 4 --hidden-size 128 --num-heads 4

The tokenizer may be that of any Hugging Face model (give the model's folder), or a new one, trained on your texts:

    python -c "from nemo_style_aligner.engine.text import tokenizer_training; \\
        tokenizer_training.train_bpe_tokenizer(open('texts.txt'), vocab_size=8000, directory='DIR')"
"""

try:
    import nemo_style_aligner  # noqa: F401
except ModuleNotFoundError as error:
    raise SystemExit(f"error: {error}: start this with the environment's python, .venv/bin/python {__file__}") from None

import argparse
from typing import Any

from nemo_style_aligner.arguments import HelpFormatter, output_argument, seed_argument
from nemo_style_aligner.engine.architecture import Experts, ModelArchitecture
from nemo_style_aligner.trainer.launch.ending import install_excepthook


def main() -> None:
    install_excepthook()

    # Imported here and below: it takes seconds, in which Ctrl-C should end the script as later on.
    from nemo_style_aligner.engine.text.tokenizer import tokenizer_argument

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument(
        "--tokenizer",
        type=tokenizer_argument,
        required=True,
        metavar="DIR",
        help="folder of a Hugging Face tokenizer (tokenizer.json, tokenizer_config.json); see above",
    )
    parser.add_argument("--output", type=output_argument, required=True, help="the .nemo file to write")
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument(
        "--ffn-hidden-size",
        type=int,
        default=None,
        help="default: 8/3 of the hidden size, rounded up to a multiple of 16",
    )
    parser.add_argument("--num-heads", type=int, default=4, help="attention heads")
    parser.add_argument("--num-query-groups", type=int, default=None, help="key and value heads; default: --num-heads")
    parser.add_argument("--num-experts", type=int, default=None, help="experts in place of each MLP; default: none")
    parser.add_argument("--experts-per-token", type=int, default=2, help="of them, for each token")
    parser.add_argument("--expert-size", type=int, default=None, help="their --ffn-hidden-size; default: that")
    parser.add_argument(
        "--family",
        choices=("llama", "gpt_oss"),
        default="llama",
        help="what layers compute: as Llama's do, or GPT-OSS' (with experts; windows of 128 in every other layer)",
    )
    parser.add_argument("--max-length", type=int, default=256, help="longest sequence in tokens")
    parser.add_argument("--tied-embeddings", action="store_true", help="use the embedding as the output layer")
    parser.add_argument("--seed", type=seed_argument, default=1234, help="random seed of the weights")
    args = parser.parse_args()
    for option in (
        "ffn_hidden_size",
        "num_query_groups",
        "num_experts",
        "expert_size",
        "max_length",
    ):  # the architecture checks the others
        number = getattr(args, option)
        if number is not None and number < 1:
            parser.error(f"--{option.replace('_', '-')} {number}: give at least 1")

    ffn_hidden_size = args.ffn_hidden_size or -(-args.hidden_size * 8 // 3 // 16) * 16
    try:
        experts = None
        if args.num_experts is not None:
            experts = Experts(
                number=args.num_experts,
                per_token=args.experts_per_token,
                ffn_hidden_size=args.expert_size or ffn_hidden_size,
            )
        features: dict[str, Any] = {"family": "llama" if experts is None else "mixtral"}
        if args.family == "gpt_oss":
            if experts is None:
                parser.error("--family gpt_oss: give --num-experts, too")
            features = {"family": args.family, "bias": True, "clamped_swiglu": True, "attention_sinks": True}
            features |= {"sliding_window": 128, "windowed_layers": tuple(range(0, args.num_layers, 2))}
        architecture = ModelArchitecture(
            num_layers=args.num_layers,
            hidden_size=args.hidden_size,
            ffn_hidden_size=ffn_hidden_size,
            experts=experts,
            num_attention_heads=args.num_heads,
            num_query_groups=args.num_query_groups or args.num_heads,
            vocab_size=args.tokenizer.vocab_size,
            max_position_embeddings=args.max_length,
            tied_embeddings=args.tied_embeddings,
            **features,
        )
    except ValueError as error:
        parser.error(str(error))

    from nemo_style_aligner.engine.parallel.groups import single_process
    from nemo_style_aligner.trainer.checkpoints.nemo_archive import save_nemo
    from nemo_style_aligner.trainer.models.gpt import build_model, parse_precision

    args.output.parent.mkdir(parents=True, exist_ok=True)
    config = {**architecture.to_nemo_config(), "encoder_seq_length": args.max_length}
    try:
        with single_process(args.seed):
            model = build_model(architecture, {}, parse_precision(32), trainable=False)
            save_nemo(args.output, model, config, args.tokenizer)
    except ValueError as error:  # a folder that is no archive, in the place of one
        parser.error(str(error))
    print(f"{args.output}: {architecture.num_parameters / 1e6:.2f} M parameters")


if __name__ == "__main__":
    main()
