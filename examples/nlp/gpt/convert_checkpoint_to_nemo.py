"""Make a .nemo checkpoint from a training checkpoint, to evaluate it, convert it or start another job from it.

    python convert_checkpoint_to_nemo.py --input sft/checkpoints/*-step=20-* --output step20.nemo

The result is what the job (SFT, reward model, actor or critic, at any parallel layout) would have written at the end of
training. A model that is too large for one process is split:

    torchrun --nproc-per-node 4 convert_checkpoint_to_nemo.py --tensor-parallel 4 --input ... --output ...
"""

from __future__ import annotations

try:
    import nemo_style_aligner  # noqa: F401
except ModuleNotFoundError as error:
    raise SystemExit(f"error: {error}: start this with the environment's python, .venv/bin/python {__file__}") from None

import functools
from pathlib import Path

from nemo_style_aligner.arguments import conversion_arguments
from nemo_style_aligner.launch.ending import install_excepthook


def main() -> None:
    install_excepthook()
    parser = conversion_arguments(__doc__, precision=None)
    parser.add_argument("--input", required=True, help="the checkpoint: a folder in <log_dir>/checkpoints/")
    parser.add_argument("--output", required=True, help="the .nemo file to write")
    parser.add_argument(
        "--base",
        type=Path,
        help="the .nemo checkpoint that the job started from, which has the tokenizer (default: as in hyperparameters)",
    )
    parser.add_argument(
        "--hyperparameters",
        type=Path,
        help="hyperparameters.yaml of the job (default: that in the log directory that the checkpoint is in)",
    )
    arguments = parser.parse_args()

    # Imported here: it takes seconds, in which Ctrl-C should end the script as later on.
    from nemo_style_aligner.models.conversion import checkpoint_to_nemo, run_conversion

    convert = functools.partial(checkpoint_to_nemo, base=arguments.base, hyperparameters=arguments.hyperparameters)
    run_conversion(convert, arguments.input, arguments.output, arguments)


if __name__ == "__main__":
    main()
