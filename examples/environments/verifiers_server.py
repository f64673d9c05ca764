"""Tasksets of verifiers as the environment of a job: a server that plays what it is sent.

    python verifiers_server.py TASKSET --write prompts.jsonl     # its tasks, as the prompts of a job
    python verifiers_server.py TASKSET --port 9000               # trainer.ppo.environment={url: http://127.0.0.1:9000/run}

It needs verifiers alone (pip install verifiers==0.4.0), in a Python environment of its own if you like. TASKSET is what
`vf-eval` takes; --env is the run's [env] block as JSON, such as '{"agent": {"harness": {"id": "null"}}}'. The policy is
asked at the address, and with the key, that an episode comes with: tokens need not be told. An episode's reward is what
its rewards are worth, by name; metrics count nothing.
"""

import argparse
import json
import os
from collections.abc import AsyncIterator

from aiohttp import web
from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.env import Env
from verifiers.v1.utils.loaders import env_config_type, load_environment


def open_environment(taskset: str, settings: dict) -> Env:
    local = {"runtime": {"type": "subprocess"}}  # of each agent that says nothing else
    known = env_config_type(taskset, settings.get("id", ""))
    roles = [name for name, field in known.model_fields.items() if isinstance(field.default, AgentConfig)]
    settings = {**settings, "taskset": {"id": taskset, **settings.get("taskset", {})}}
    settings |= {role: {**local, **settings.get(role, {})} for role in roles}
    return load_environment(known.model_validate(settings))


def write_prompts(env: Env, path: str, limit: int) -> None:
    with open(path, "w") as file:
        for task, _ in zip(env.taskset, range(limit), strict=False):
            system, asked = task.data.system_prompt, task.data.prompt
            messages = asked if isinstance(asked, list) else [{"role": "user", "content": asked or ""}]
            messages = [*([{"role": "system", "content": system}] if system else []), *messages]
            line = {"messages": messages, "task": task.data.model_dump(mode="json", exclude_none=True)}
            file.write(json.dumps(line, default=lambda of: of.model_dump(exclude_none=True)) + "\n")


def serve(env: Env, host: str, port: int) -> None:
    task_type = type(env.taskset).task_type()

    async def run(request: web.Request) -> web.Response:
        told = await request.json()
        task = task_type(task_type.data_type().model_validate(told["line"]["task"]), env.config.taskset.task)
        variable = f"KEY_OF_{told['episode']}"  # verifiers reads keys from the environment
        os.environ[variable] = told["api_key"]
        try:
            client = EvalClientConfig(base_url=told["base_url"], api_key_var=variable)
            episode = await env.run_episode(task, ModelContext(model=told["model"], client=client))
        finally:
            del os.environ[variable]
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            return web.Response(status=500, text="; ".join(f"{error.type}: {error.message}" for error in errors))
        rewards: dict[str, float] = {}
        for trace in episode.traces:
            for name, reward in trace.rewards.items():
                rewards[name] = rewards.get(name, 0.0) + (reward.value if reward is not None else 0.0)
        return web.json_response(rewards)

    async def serving(app: web.Application) -> AsyncIterator[None]:
        async with env.serving():  # tool servers, and what passes requests on
            yield

    app = web.Application(client_max_size=2**28)
    app.router.add_post("/run", run)
    app.cleanup_ctx.append(serving)
    web.run_app(app, host=host, port=port, print=lambda text: print(text, flush=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("taskset")
    parser.add_argument("--env", type=json.loads, default={}, help="as JSON")
    parser.add_argument("--write", metavar="FILE")
    parser.add_argument("--limit", type=int, default=10_000, help="tasks that are written")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=9000)
    args = parser.parse_args()
    env = open_environment(args.taskset, args.env)
    if args.write:
        write_prompts(env, args.write, args.limit)
    else:
        serve(env, args.host, args.port)


if __name__ == "__main__":
    main()
