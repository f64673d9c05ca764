"""Stands in for the actor: works for ``seconds`` in the first run, not at all in later ones; ends early with 75."""

import os
import signal
import sys
import time

options = dict(argument.split("=", 1) for argument in sys.argv[1:])
received: list[int] = []
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda number, frame: received.append(number))
print("the actor works", flush=True)
end = time.monotonic() + (float(options["seconds"]) if "SLURM_RESTART_COUNT" not in os.environ else 0.0)
while time.monotonic() < end and not received:
    time.sleep(0.1)
time.sleep(int(os.environ["SLURM_PROCID"]))  # ranks do not end at the same instant
sys.exit(75 if received else 0)
