"""Makes OpenMP's threads wait as they do in jobs: import this before anything that imports torch.

OpenMP reads OMP_WAIT_POLICY when torch loads it. Our package sets the variable when imported: after torch is too late.
"""

import nemo_style_aligner  # noqa: F401
