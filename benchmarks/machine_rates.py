"""Prints as JSON how fast this machine is at best: `MachineRates`, measured in a process of its own.

    python machine_rates.py DEVICE THREADS MEGABYTES

In a process of its own, because OMP_WAIT_POLICY is read only at a process's start, and so that a GPU's memory is free
again afterwards.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import torch
from common import MachineRates, measure_rates


def rates_of(device: str, threads: int, megabytes: int, environment: dict[str, str]) -> tuple[MachineRates, str]:
    """The rates and the device's name; SystemExit, with what the process printed, if they cannot be measured."""
    command = [sys.executable, str(Path(__file__).resolve()), device, str(threads), str(megabytes)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"the rates of {device} cannot be measured:\n{result.stderr[-800:]}")
    answer = json.loads(result.stdout.splitlines()[-1])
    return MachineRates(**answer["rates"]), answer["name"]


def main() -> None:
    device, threads, megabytes = torch.device(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(threads)
    rates = measure_rates(device, megabytes * 2**20)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    print(json.dumps({"rates": dataclasses.asdict(rates), "name": name}))


if __name__ == "__main__":
    main()
