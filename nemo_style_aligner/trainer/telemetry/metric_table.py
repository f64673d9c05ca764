"""Every metric that a job logs: its unit, what it means, and in which range a healthy run keeps it.

The report, the dashboard and ``docs/metrics.md`` come from this table. A range is a rule of thumb: outside of it
something is worth a look, and the row says what.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from fnmatch import fnmatchcase
from typing import Final, Literal

LEARNS: Final = "learns"
STABLE: Final = "stable"
TIME: Final = "time"
COUNTS: Final = "counts"

Question = Literal["learns", "stable", "time", "counts"]
"""What a metric helps to answer: does it learn, is it stable, where does the time go; or it only counts."""


@dataclasses.dataclass(frozen=True)
class Metric:
    """A row of the table.

    Attributes:
        name: in ``metrics.jsonl``; ``*`` stands for any part of it.
        title: a few words, for people.
        unit: of the numbers; "": a bare number, "share": between 0 and 1.
        meaning: one sentence.
        question: where the report shows it.
        low, high: the healthy range.
        below, above: what it means to be outside, and what to look at.
        goal: whether more is better; None where neither is.
    """

    name: str
    title: str
    unit: str
    meaning: str
    question: Question
    low: float = -math.inf
    high: float = math.inf
    below: str = ""
    above: str = ""
    goal: Literal["up", "down"] | None = None

    def trouble(self, value: float) -> str:
        """What is wrong with a value; "" if it is in the healthy range."""
        if math.isnan(value):
            return "is not a number"
        return self.below if value < self.low else self.above if value > self.high else ""

    @property
    def healthy(self) -> str:
        """The healthy range in words; "" if there is none."""
        low, high = f"{self.low:g}", f"{self.high:g}"
        if math.isinf(self.low):
            return "" if math.isinf(self.high) else f"at most {high}"
        return f"at least {low}" if math.isinf(self.high) else low if low == high else f"{low} to {high}"


WARM_UP = "warm_up/"
"""What the names of metrics from a critic's warm-up begin with, which comes before the first step."""

_TRUNCATED = (
    "many responses are cut off at the length limit: is model.ppo.length_params.max_length enough, and does the model "
    "know what ends a response (model.ppo.sampling_params.end_strings)?"
)
_DRIFTS = (
    "the policy is far from where it started, and may be exploiting the reward: read its samples; a larger "
    "trainer.ppo.initial_policy_kl_penalty or a smaller learning rate holds it back"
)
_GAP = "engine and trainer disagree about the same tokens, and updates are made for another policy than the one sampled"
_STEEP = "an update moves the policy far: a smaller learning rate, or fewer updates of the same samples, is calmer"
_UNEVEN = "ranks wait for the slowest one"

METRICS = (
    # Does it learn?
    Metric("*_rollouts/rewards", "Reward", "", "Mean reward of the samples, without the KL penalty.", LEARNS,
           goal="up"),
    Metric("*_rollouts/rewards/*", "Reward, its parts", "", "Mean of one reward source or of one part of it, before "
           "weights.", LEARNS, goal="up"),
    Metric("*_rollouts/rewards_with_kl", "Reward with penalties", "per token", "Mean over samples of reward, less KL "
           "and length penalties, divided by the response's length.", LEARNS, goal="up"),
    Metric("*_rollouts/init_policy_kl", "KL from the initial policy", "nats per token", "How far the policy has moved "
           "from where it started, by trainer.ppo.kl_estimator (by default the mean |difference of log-probs|).",
           LEARNS, high=0.5, above=_DRIFTS),
    Metric("*_rollouts/teacher_kl", "KL from the teacher", "nats per token", "Mean of log p_policy - log p_teacher "
           "over the tokens that the policy has sampled: what on-policy distillation brings down.", LEARNS,
           goal="down"),
    Metric("*_rollouts/generation_length", "Response length", "tokens", "Mean length of the responses, stop token "
           "included. A steady climb or fall without more reward is a loophole.", LEARNS),
    Metric("*_rollouts/fraction_of_samples_properly_ended", "Responses that end", "share", "Responses that end by "
           "themselves, and not at the length limit.", LEARNS, low=0.7, below=_TRUNCATED, goal="up"),
    Metric("*generation/empty_responses", "Empty responses", "share", "Responses without text, that is, the end came "
           "first.", LEARNS, high=0.1, above="many responses are empty: the policy may have learnt to say nothing",
           goal="down"),
    Metric("*generation/replies", "Replies", "", "Of the policy in an episode: mean.", LEARNS),
    Metric("*generation/rows", "Rows", "", "Sequences that an episode is to the models: mean; more than 1 where its "
           "history was rewritten.", LEARNS),
    Metric("*generation/inserted_tokens", "Inserted tokens", "tokens", "What an environment has told the policy in an "
           "episode: mean.", LEARNS),
    Metric("*generation/environment_seconds", "Time in environments", "s", "Of an episode: mean. Others go on "
           "meanwhile.", LEARNS),
    Metric("*generation/cut_episodes", "Episodes cut off", "share", "Episodes whose environment wanted another reply "
           "than there may be; they get trainer.ppo.episodes.limit_reward.", LEARNS, high=0.5,
           above="most episodes are cut off: more room (model.ppo.length_params.max_length) or max_replies may help",
           goal="down"),
    Metric("*generation/failed_episodes", "Failed episodes", "share", "Episodes whose environment raised an error, "
           "took too long, or was a program that failed.", LEARNS, high=0.05,
           above="environments fail: the log says why", goal="down"),
    Metric("*_rollouts/overlong_penalty", "Length penalty", "", "Mean of what trainer.ppo.overlong adds to the "
           "reward.", LEARNS, goal="up"),
    Metric("*_rollouts/uninformative_samples", "Samples that teach nothing", "samples", "Samples of groups whose "
           "rewards are all equal, left in after dynamic sampling: their advantages are 0.", LEARNS, goal="down"),
    Metric("*_rollouts/dropped_samples", "Samples replaced", "samples", "Samples that dynamic sampling has dropped "
           "because all rewards of their group were equal.", LEARNS, goal="down"),
    Metric("train_critic/critic_loss", "Critic's loss", "reward²", "Mean squared error of the critic's values.",
           LEARNS, goal="down"),
    Metric("train_optim/loss", "Policy's loss", "", "What an update minimises. Its height says little: it begins anew "
           "with each step's samples.", STABLE),
    Metric("*/preference_loss", "Preference loss", "", "The part of the loss that ranks good over bad responses.",
           LEARNS, goal="down"),
    Metric("*/kd_loss", "Distillation loss", "nats", "Divergence between teacher and student over the teacher's top-k "
           "tokens, before its weight.", LEARNS, goal="down"),
    Metric("*/agreement", "Same first choice", "share", "How often the teacher's most likely token is the student's "
           "among the teacher's top k.", LEARNS, goal="up"),
    Metric("*/sft_loss", "SFT loss", "nats", "Cross-entropy of the good responses, or of the text in distillation, "
           "before its weight.", LEARNS),
    Metric("*/rewards_margin", "Margin", "", "Reward of the better less that of the worse responses.", LEARNS,
           goal="up"),
    Metric("*/kl", "KL estimate", "nats", "KTO's estimate of how far policy and reference are apart.", STABLE),
    Metric("*/loss", "Loss", "nats", "What training minimises: nats per learnt token (SFT) or per pair (reward "
           "models); squared error per label or token (regression, critics).", LEARNS, goal="down"),
    Metric("*/accuracy", "Pairs ranked right", "share", "Comparisons in which the better response has the higher "
           "reward; 0.5 is guessing.", LEARNS, low=0.55, below="better responses are told from worse ones hardly "
           "better than by a coin: are the comparisons consistent, and is the learning rate high enough?", goal="up"),
    Metric("*/lr", "Learning rate", "", "Of the update.", LEARNS),
    Metric("*_rollouts/best_rewards", "Reward of the best", "", "Mean over the responses that top_n_rollouts chose.",
           LEARNS, goal="up"),
    Metric("*/rewards_chosen_mean", "Reward of the better", "", "Mean reward of the preferred responses.", LEARNS),
    Metric("*/rewards_rejected_mean", "Reward of the worse", "", "Mean reward of the rejected responses.", LEARNS),
    Metric("*/rewards_all_mean", "Reward of all pairs", "", "Mean reward of both responses. Only differences are "
           "learnt, so this may drift.", STABLE),
    Metric("*/rewards_all_std", "Spread of rewards", "", "Standard deviation of the rewards of both responses.",
           STABLE),
    # Is it stable?
    Metric("*/grad_norm", "Gradient norm", "", "Before clipping. Jumps mean that single updates pull hard.", STABLE),
    Metric("*/skipped_updates", "Skipped updates", "updates", "Updates left out because of NaN or Inf, so far.",
           STABLE, high=0, above="updates were left out because of NaN or Inf: the log names their samples",
           goal="down"),
    Metric("*_rollouts/nonfinite_samples", "Samples left out", "samples", "Samples whose reward, values or log-probs "
           "are NaN or Inf.", STABLE, high=0, above="samples are left out because of NaN or Inf: the log names them",
           goal="down"),
    Metric("train_optim/approximate_kl", "KL of an update", "nats per token", "From the policy that the samples are "
           "from to the one being updated (k3 estimate).", STABLE, high=0.1, above=_STEEP),
    Metric("train_optim/clip_fraction", "Clipped tokens", "share", "Tokens whose ratio is clipped and have no "
           "gradient.", STABLE, high=0.3, above=_STEEP),
    Metric("train_optim/ppo_ratio", "Ratio", "", "Mean of p_new / p_old over tokens; 1 in a step's first update.",
           STABLE, 0.8, 1.25, _STEEP, _STEEP),
    Metric("train_optim/ppo_ratio_clamped", "Ratio, clipped", "", "The same after clipping.", STABLE),
    Metric("train_optim/kl_loss", "KL in the loss", "nats per token", "KL penalty as a term of the loss, before its "
           "coefficient.", STABLE, high=0.5, above=_DRIFTS),
    Metric("train_optim/sampling_kl_loss", "KL to what sampled", "nats per token", "That of trainer.ppo.sampling_kl, "
           "before its coefficient.", STABLE, high=0.5, above=_STEEP),
    Metric("train_optim/beyond_sampling", "Beyond what sampled", "share", "Tokens without gradient, as they have left "
           "the clip range around the weights that sampled them (trainer.ppo.trust_region=both).", STABLE, high=0.3,
           above=_STEEP),
    Metric("train_optim/scaled_entropy", "Entropy bonus", "nats per token", "Entropy times its coefficient; 0 where "
           "there is no bonus.", STABLE),
    Metric("*_rollouts/advantages_mean", "Advantages, mean", "", "Over tokens, before whitening.", STABLE),
    Metric("*_rollouts/advantages_std", "Advantages, spread", "", "Standard deviation over tokens, before whitening. "
           "At 0 nothing is learnt.", STABLE, low=0.0001, below="all advantages are equal, so the policy learns "
           "nothing: do rewards differ between samples?"),
    Metric("*_rollouts/returns_mean", "Returns, mean", "", "What the critic learns, over tokens.", STABLE),
    Metric("*_rollouts/returns_std", "Returns, spread", "", "Standard deviation over tokens.", STABLE),
    Metric("*_rollouts/values_mean", "Values, mean", "", "The critic's values over tokens; they should follow the "
           "returns.", STABLE),
    Metric("*_rollouts/values_std", "Values, spread", "", "Standard deviation over tokens.", STABLE),
    Metric("*_rollouts/engine_logprob_gap_mean", "Engine's gap, mean", "nats", "Mean |log-prob of the engine - of the "
           "trainer| of the same tokens: about 1e-6 in fp32, 0.01 in bf16; more with stale weights.", STABLE,
           high=0.05, above=_GAP),
    Metric("*_rollouts/engine_logprob_gap_max", "Engine's gap, largest", "nats", "The same, the largest of all "
           "tokens.", STABLE),
    Metric("*_rollouts/engine_kl", "Engine's KL", "nats per token", "KL(engine || trainer), k3 estimate.", STABLE,
           high=0.01, above=_GAP),
    Metric("*_rollouts/routing_disagreement", "Routing disagreement", "share", "Sampled tokens, in each layer with "
           "experts, whose experts in the trainer were others than in the engine.", STABLE, high=0.1,
           above="training computes other experts than generation did: set trainer.ppo.replay_routes"),
    Metric("*_rollouts/importance_weights", "Importance weights", "", "Mean of min(cap, p_trainer / p_engine).",
           STABLE, 0.8, 1.25, _GAP, _GAP),
    Metric("*_rollouts/importance_truncated", "Weights at the cap", "share", "Tokens whose importance weight is cut.",
           STABLE, high=0.1, above=_GAP),
    Metric("*_rollouts/importance_effective_share", "Effective samples", "share", "Kish's effective sample size of "
           "the importance weights over the number of tokens.", STABLE, low=0.5, below=_GAP, goal="up"),
    Metric("*_rollouts/importance_masked_sequences", "Sequences left out", "share", "Sequences outside of "
           "importance_sequence_bounds.", STABLE, high=0.2, above=_GAP),
    Metric("*_rollouts/importance_masked_tokens", "Tokens left out", "share", "Tokens outside of "
           "importance_token_bounds.", STABLE, high=0.2, above=_GAP),
    Metric("*_rollouts/staleness_mean", "Age of weights, mean", "updates", "Updates made since the weights that "
           "sampled a token.", STABLE),
    Metric("*_rollouts/staleness_max", "Age of weights, largest", "updates", "The same, of the oldest token.", STABLE),
    # Where does the time go?
    Metric("timers/step", "A step", "s", "All of one step.", TIME, goal="down"),
    Metric("*train_step_time", "A step", "s", "All of one step.", TIME, goal="down"),
    Metric("*rollout_time", "Rollouts", "s", "From prompts to advantages.", TIME),
    Metric("*/offload", "Moving the optimizer", "s", "Optimizer states to the CPU and back.", TIME),
    Metric("*/refit", "Refit", "s", "New weights into the generation engine.", TIME),
    Metric("*/unload", "Freeing the engine", "s", "The engine's memory for training.", TIME),
    Metric("*/generate", "Generation", "s", "Responses, and their scoring meanwhile.", TIME),
    Metric("*/rollout_wait", "Waiting for rollouts", "s", "Those that were begun a step ahead, from ranks set apart.",
           TIME),
    Metric("*/logprobs", "Log-probs", "s", "Of the policy, by the trainer.", TIME),
    Metric("*/teacher_logprobs", "Log-probs, teacher", "s", "For on-policy distillation.", TIME),
    Metric("*/init_logprobs", "Log-probs, initial policy", "s", "For the KL penalty.", TIME),
    Metric("*/critic_wait", "Waiting for scores", "s",
           "What other ranks and services have not answered when the policy's log-probs are there.", TIME),
    Metric("timers/*values", "Values", "s", "Of a critic in this job; of one in another, bringing them to the ranks "
           "that train on them.", TIME),
    Metric("timers/*critic_train", "Training the critic", "s", "In this job; of one in another, sending it the batch.",
           TIME),
    Metric("timers/*critic_train_wait", "Waiting for the critic", "s", "After the policy's updates.", TIME),
    Metric("timers/*train_time", "Training", "s", "The updates; in a critic job, those of one request.", TIME),
    Metric("timers/infer_time", "Scoring requests", "s", "Of a critic job.", TIME),
    Metric("*/prepare_time", "Reference", "s", "The initial policy's log-probs of a batch, in DPO and KTO.", TIME),
    Metric("*validation_time", "Validation", "s", "All of one validation.", TIME),
    Metric("*save_time", "Saving", "s", "What a checkpoint or archive holds up.", TIME),
    Metric("*save_background_time", "Saving, beside training", "s", "Writing that holds nothing up.", TIME),
    Metric("*save_wait", "Waiting for a save", "s", "The checkpoint before is not yet written.", TIME),
    Metric("*generation/tokens_per_second", "Generation", "tokens/s", "New tokens of all engines over the time of the "
           "slowest.", TIME, goal="up"),
    Metric("*generation/active_slots", "Busy slots", "slots", "Mean number of responses per forward pass.", TIME,
           goal="up"),
    Metric("*generation/balance", "Balance of engines", "share", "Mean time of the engines over the slowest's.", TIME,
           low=0.6, below=f"{_UNEVEN} in generation", goal="up"),
    Metric("*generation/peak_kv_share", "KV memory in use", "share", "Largest share of the engines' KV memory.", TIME),
    Metric("*generation/preemptions", "Preemptions", "responses", "Responses computed again for want of KV memory: a "
           "larger generation.kv_cache_tokens, or fewer slots, avoids them.", TIME, goal="down"),
    Metric("*generation/passes", "Forward passes", "", "Of all engines in a step.", TIME),
    Metric("*generation/guessed_tokens", "Guessed tokens", "tokens", "Computed on a guess, see "
           "generation.lookup_decoding.", TIME),
    Metric("*generation/guesses_held", "Guesses that held", "tokens", "Of these, the ones that responses had: so many "
           "passes of a response were saved.", TIME, goal="up"),
    Metric("*generation/seconds", "Round of generation", "s", "On ranks that only generate.", TIME, goal="down"),
    Metric("*generation/idle_seconds", "Wait for a round", "s", "Of ranks that only generate.", TIME, goal="down"),
    Metric("generation/buffered_steps", "Steps in the buffer", "", "Further steps whose rollouts are complete when one "
           "takes its own: trainer.ppo.staleness, less 1, where training is what takes time.", TIME),
    Metric("generation/carried_responses", "Responses under way", "responses", "Begun, and left to a later step, when "
           "a round ends (trainer.ppo.in_flight).", TIME),
    Metric("generation/carried_tokens", "Tokens under way", "tokens", "Of these responses: they are computed again "
           "with the next weights.", TIME),
    Metric("*generation/compilations", "Compilations", "", "Of engines since the start; a growing number costs time.",
           TIME),
    Metric("*/padding_efficiency", "Real tokens", "share",
           "Tokens over positions computed in training; shared prompts count once.", TIME,
           low=0.5, below="most of what training computes is padding", goal="up"),
    Metric("*/dp_balance", "Balance of ranks", "share", "Mean work of the data-parallel ranks over the largest.", TIME,
           low=0.6, below=f"{_UNEVEN} in training", goal="up"),
    Metric("*/expert_load_mean", "Load of experts", "", "Of the tokens that the loss depends on, the most of an expert "
           "over the mean; mean over layers.", STABLE),
    Metric("*/expert_load_max", "Load of experts, worst layer", "", "The same of the least even layer.", STABLE),
    Metric("*/dead_experts", "Dead experts", "share", "Experts that no such token of an update has chosen.", STABLE,
           high=0.5, above="most experts learn nothing: train with more tokens an update, or "
           "model.moe_aux_loss_coeff in SFT"),
    Metric("memory/*_peak_gib", "Memory", "GiB", "Rank 0's peak while this went on: of its GPU's tensors or, without "
           "a GPU, resident.", TIME),
    # Counts
    Metric("*generation/tokens", "Tokens generated", "tokens", "In the step, by all engines.", COUNTS),
    Metric("*generation/prompt_tokens_computed", "Prompt tokens computed", "tokens", "In the step.", COUNTS),
    Metric("*generation/prompt_tokens_shared", "Prompt tokens shared", "tokens", "Taken from prompts with the same "
           "beginning.", COUNTS),
    Metric("*_rollouts/rollout_size", "Samples", "samples", "In the step.", COUNTS),
    Metric("*_rollouts/prompt_lengths", "Prompt length", "tokens", "Mean.", COUNTS),
    Metric("*_rollouts/response_lengths", "Prompt and response", "tokens", "Mean length of both together.", COUNTS),
    Metric("*_rollouts/consumed_samples", "Prompts used", "prompts", "Since the start.", COUNTS),
    Metric("*_rollouts/epoch", "Epoch", "", "Passes over the prompts, counted from 1.", COUNTS),
    Metric("*_rollouts/sampling_rounds", "Sampling rounds", "rounds", "Of dynamic sampling.", COUNTS),
    Metric("train_optim/optim_step", "Updates", "updates", "Made before this one.", COUNTS),
)  # fmt: skip
"""The table. Where several rows fit a name, the first counts."""


@functools.cache
def find_metric(name: str) -> Metric | None:
    """The row of a metric by its name in ``metrics.jsonl``; None for what a user's own loss function reports."""
    name = name.removeprefix(WARM_UP)
    return next((row for row in METRICS if fnmatchcase(name, row.name)), None)


def phase_title(name: str) -> str:
    """A phase in words, by the path of its timer, with or without ``timers/`` or ``memory/`` before it."""
    path = name.removeprefix("timers/").removeprefix("memory/")
    metric = find_metric(f"timers/{path}")
    inside = " in validation" if "validation_time/" in path else ""
    return (metric.title if metric else path.rpartition("/")[2].replace("_", " ")) + inside
