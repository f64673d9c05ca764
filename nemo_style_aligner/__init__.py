"""RLHF for Megatron-Core models: PPO with a refitted generation engine, SFT and reward models."""

import os
import warnings

from nemo_style_aligner.engine.parallel.cpu import install_import_hook

__version__ = "0.1.0"

# Read once, when torch loads its OpenMP. By default threads wait for each other by spinning, which slows everything
# down many times over as soon as another process (the critic beside the actor, say) needs a core.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Before anything can import megatron.core: where CUDA is absent it needs the rewriting of engine/parallel/cpu.py.
install_import_hook()

# megatron-core's warnings on import and in every process, about libraries that are optional here and its own use of
# torch: a user of this package could act on none of them.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core\.")
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.")
