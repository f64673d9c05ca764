"""Generate responses to prompts and measure them: right answers, rewards, lengths.

    python evaluate_gpt.py --model policy.nemo --prompts test_prompts.jsonl --output results.json \\
        [--reward-model rm.nemo] [--greedy] [--max-length 32] [--end-strings "User:"] [--add-bos]

Prompts are JSONL lines {"text": ..., "answer": ..., "answer_extraction": ...}; docs/data.md (Right answers) says how
responses are compared with "answer", without which there is no accuracy. `nsa eval` does the same; docs/command_line.md
says what the results mean.
"""

try:
    from nemo_style_aligner.tools.cli.eval import script
except ModuleNotFoundError as error:
    raise SystemExit(f"error: {error}: start this with the environment's python, .venv/bin/python {__file__}") from None

if __name__ == "__main__":
    script(__doc__)
