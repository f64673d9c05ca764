"""RLHF for Megatron-Core models: PPO with a refitted generation engine, SFT and reward models."""

import os
import warnings

from nemo_style_aligner.parallel.cpu import install_import_hook

__version__ = "0.1.0"

# Read once, when torch loads its OpenMP. By default threads wait for each other by spinning, which slows everything
# down many times over as soon as another process (the critic beside the actor, say) wants a core.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Before anything can import megatron.core: where CUDA is absent it needs the rewriting of parallel/cpu.py.
install_import_hook()

# What megatron-core says on import and in every process, of libraries that are optional here and of its own use of
# torch: nothing that a user of this package could act on.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core\.")
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.")
