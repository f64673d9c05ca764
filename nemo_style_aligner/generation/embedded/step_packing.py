"""Turns a scheduler's plan into the arrays of a forward pass."""

from __future__ import annotations

import numpy as np

from nemo_style_aligner.generation.embedded.block_table import BlockTable
from nemo_style_aligner.generation.embedded.scheduler import Scheduler, StepPlan
from nemo_style_aligner.generation.embedded.step import StepInput


class StepPacker:
    """Builds `StepInput`s; keeps the arrays that never change."""

    def __init__(self, blocks: BlockTable) -> None:
        self._blocks = blocks
        self._rows = np.arange(len(blocks.table), dtype=np.int32)
        self._single = np.stack((self._rows, np.ones_like(self._rows)), axis=1)  # segments of one token

    def pack(self, plan: StepPlan, scheduler: Scheduler) -> StepInput:
        """The arrays of ``plan``, decode tokens first."""
        slots, num_decode = plan.decode_slots, len(plan.decode)
        token_ids, positions = [scheduler.newest[slots]], [scheduler.positions[slots]]
        if not plan.prefill:
            return StepInput(
                token_ids=token_ids[0],
                positions=positions[0],
                slots=slots,
                segments=self._single[:num_decode],
                num_decode=num_decode,
                output_rows=self._rows[:num_decode],
                block_table=self._blocks.table,
            )
        all_slots, segments, output_rows = [slots], [], list(range(num_decode))
        first = num_decode
        for chunk in plan.prefill:
            end = chunk.start + chunk.length
            token_ids.append(np.array(chunk.sequence.prefill_ids[chunk.start : end], dtype=np.int32))
            positions.append(np.arange(chunk.start, end, dtype=np.int32))
            all_slots.append(np.full(chunk.length, chunk.sequence.slot, dtype=np.int32))
            segments.append((first, chunk.length))
            first += chunk.length
            if chunk.completes_prompt:
                output_rows.append(first - 1)
        return StepInput(
            token_ids=np.concatenate(token_ids),
            positions=np.concatenate(positions),
            slots=np.concatenate(all_slots),
            segments=np.concatenate((self._single[:num_decode], np.array(segments, dtype=np.int32))),
            num_decode=num_decode,
            output_rows=np.array(output_rows, dtype=np.int32),
            block_table=self._blocks.table,
        )
