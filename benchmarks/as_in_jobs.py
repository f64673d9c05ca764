"""Lets OpenMP's threads wait as they do in jobs: import it before anything that imports torch.

They read how to wait when torch loads them. Our package says it when it is imported, which is too late after torch.
"""

import nemo_style_aligner  # noqa: F401
