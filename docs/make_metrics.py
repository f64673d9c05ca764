"""Writes metrics.md, beside this file, from the table in ``nemo_style_aligner/trainer/telemetry/metric_table.py``."""

from __future__ import annotations

from pathlib import Path

from nemo_style_aligner.tools.reports.run_view import QUESTIONS
from nemo_style_aligner.trainer.telemetry.metric_table import COUNTS, METRICS

HEAD = """# Metrics

Every number that jobs write to `metrics.jsonl`, TensorBoard and, if asked for, Weights & Biases and MLflow. `*` stands
for any part of a name: `*_rollouts` is `train_rollouts` or `val_rollouts`, after `warm_up/` in a critic's warm-up. A
policy loss of your own adds its statistics under `train_optim/`. Healthy ranges are rules of thumb;
[reports](reports.md) warn by them.

Made by `python docs/make_metrics.py`."""


def markdown() -> str:
    """The page."""
    lines = [HEAD]
    for question, title in {**{key: title for key, (title, _) in QUESTIONS.items()}, COUNTS: "Counts"}.items():
        lines += [f"\n## {title}\n", "| name | unit | what it is | healthy |", "| --- | --- | --- | --- |"]
        for row in METRICS:
            if row.question == question:
                meaning = f"**{row.title}.** {row.meaning}".replace("|", "\\|")
                lines.append(f"| `{row.name}` | {row.unit} | {meaning} | {row.healthy} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("metrics.md").write_text(markdown(), encoding="utf-8")
