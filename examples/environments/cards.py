"""A taskset of verifiers: say the card that you are shown, then the next one. verifiers_server.py serves it.

The policy learns it from nothing: it is right by chance at first. Its program (harness) is a loop in this process.
"""

import random
from collections.abc import Iterator

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.runtimes import ProgramResult

CARDS = "1234"
CLIENT = AsyncOpenAI(api_key="of each rollout", timeout=600)  # one: what it makes first costs more than an answer


class CardsData(vf.TaskData):
    cards: str


class CardsTask(vf.Task[CardsData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, task: CardsData, trace: vf.Trace) -> float:
        said = [(message.content or "")[:1] for message in trace.assistant_messages]
        return sum(a == b for a, b in zip(said, task.cards, strict=False)) / len(task.cards)


class CardsTaskset(vf.Taskset[CardsTask, vf.TasksetConfig]):
    def load(self) -> Iterator[CardsTask]:
        chosen = random.Random(0)
        for _ in range(64):
            cards = "".join(chosen.choices(CARDS, k=2))
            yield CardsTask(CardsData(prompt=cards[0], cards=cards), self.config.task)


class CardsHarness(vf.Harness[vf.HarnessConfig]):
    """Asks the policy once."""

    SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data) -> ProgramResult:
        prompt = data.prompt if isinstance(data.prompt, list) else [{"role": "user", "content": data.prompt}]
        messages = [m if isinstance(m, dict) else m.model_dump(include={"role", "content"}) for m in prompt]
        client = CLIENT.with_options(base_url=endpoint, api_key=secret)
        await client.chat.completions.create(model=ctx.model, messages=messages, max_tokens=2)
        return ProgramResult(exit_code=0, stdout="", stderr="")


class CardsConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class CardsEnv(vf.Env[CardsConfig]):
    async def run(self, task: CardsTask, agents: vf.Agents) -> None:
        async with agents.player.interaction(task) as interaction:
            await interaction.turn()
            await interaction.turn(task.data.cards[1])


__all__ = ["CardsEnv", "CardsHarness", "CardsTaskset"]
