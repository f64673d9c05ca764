"""Merge an adapter into its base model, or write it as a directory that PEFT loads.

    python convert_adapter.py --adapter lora.nemo --base llama.nemo --output merged.nemo
    python convert_adapter.py --adapter lora.nemo --base llama.nemo --output lora-peft

An adapter is a PEFT directory, an archive that a job wrote with model.peft.archive=adapter, or a training checkpoint.
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
    parser = conversion_arguments(__doc__)
    parser.add_argument("--adapter", required=True, help="the adapter")
    parser.add_argument("--base", required=True, type=Path, help="the .nemo file or directory of its base model")
    parser.add_argument("--output", required=True, help="NAME.nemo: a merged archive; else the PEFT directory to write")
    arguments = parser.parse_args()

    # Imported here: it takes seconds, in which Ctrl-C should end the script as later on.
    from nemo_style_aligner.models.conversion import adapter_to_nemo, adapter_to_peft, run_conversion

    convert = adapter_to_nemo if arguments.output.endswith(".nemo") else adapter_to_peft
    run_conversion(functools.partial(convert, base=arguments.base), arguments.adapter, arguments.output, arguments)


if __name__ == "__main__":
    main()
