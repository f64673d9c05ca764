"""``python -m nemo_style_aligner`` is ``nsa``, also under ``torchrun -m``."""

from nemo_style_aligner.tools.cli.main import main

if __name__ == "__main__":
    main()
