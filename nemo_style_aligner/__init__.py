"""RLHF for Megatron-Core models: PPO with a refitted generation engine, SFT and reward models."""

import warnings

from nemo_style_aligner.parallel.cpu import install_import_hook

__version__ = "0.1.0"

# Before anything can import megatron.core: where CUDA is absent it needs the rewriting of parallel/cpu.py.
install_import_hook()

# What megatron-core says on import and in every process, of libraries that are optional here and of its own use of
# torch: nothing that a user of this package could act on.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core\.")
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.")
