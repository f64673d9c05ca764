"""The environment of run_demo_agent.py: a policy that writes a sum in brackets is told what it comes to."""

import re
from typing import Any

from nemo_style_aligner.trainer.data.answers import is_right
from nemo_style_aligner.trainer.rl.episodes.policy import Policy

CALL = re.compile(r"calc\((\d+)\+(\d+)\)")
MAX_CALLS = 3
ROOM = 12  # tokens of what the template writes around a message, and of a reply that begins


async def episode(policy: Policy, line: dict[str, Any]) -> dict[str, float]:
    """1 for the right answer, however the policy has come to it; whether it has used the tool is only counted."""
    said, used = await policy.reply(), False
    for _ in range(MAX_CALLS):
        if (call := CALL.search(said.text)) is None:
            break
        told = str(int(call[1]) + int(call[2]))
        if policy.tokens_left < len(told) + ROOM:  # the episode ends wrong, not failed: it was the policy that talked
            break
        said, used = await policy.reply({"role": "tool", "content": told}), True
    right = float(is_right(said.text, line))
    return {"reward": right, "right": right, "tool": float(used)}
