"""The sidecar of the ``pytorch`` backend: its program, which runs in another environment, and its parent's side."""
