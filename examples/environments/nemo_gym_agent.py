"""NeMo-Gym's tasks as the environment of a job: an agent that plays a line with a resources server of NeMo-Gym's.

    trainer.ppo.environment='{command: [python, nemo_gym_agent.py, "http://127.0.0.1:8001"]}'

The address is that of a resources server (its /seed_session, its tools, /verify), started as NeMo-Gym starts it, in its
own Python environment; this program needs none of its packages. It does what NeMo-Gym's simple_agent does: the policy
replies, what it calls is asked of the server, until it calls nothing more; then the server verifies. Lines are those of
NeMo-Gym's data with `messages`, which --write makes of them:

    python nemo_gym_agent.py --write example.jsonl prompts.jsonl
"""

import json
import sys
import urllib.error
import urllib.request
from http.cookiejar import CookieJar
from typing import Any

MOST_CALLS = 16


def as_messages(items: Any) -> list[dict[str, Any]]:
    items = [{"role": "user", "content": items}] if isinstance(items, str) else items
    roles = {"developer": "system"}
    return [{"role": roles.get(item["role"], item["role"]), "content": item["content"]} for item in items]


def as_tools(tools: Any) -> list[dict[str, Any]]:
    keys = ("name", "description", "parameters")
    return [{"type": "function", "function": {key: tool[key] for key in keys if key in tool}} for tool in tools or ()]


class Server:
    """Either server; cookies tell a resources server's sessions apart."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url, self.key = url.rstrip("/"), key
        self.opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPCookieProcessor(CookieJar())
        )

    def post(self, path: str, body: Any) -> str:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        with self.opener.open(request) as answer:
            return answer.read().decode()


def play(line: dict[str, Any], policy: Server, model: str, resources: Server) -> list[dict[str, Any]]:
    """What the policy has said, and what tools have answered, as items of the Responses API."""
    asked, items = line["responses_create_params"], list[dict[str, Any]]()
    messages, tools = as_messages(asked["input"]), as_tools(asked.get("tools"))
    while True:
        body = {"model": model, "messages": messages} | ({"tools": tools} if tools else {})
        said = json.loads(policy.post("/chat/completions", body))["choices"][0]["message"]
        messages.append(said)
        if said["content"]:
            text = {"type": "output_text", "text": said["content"], "annotations": []}
            items.append({"type": "message", "role": "assistant", "status": "completed", "content": [text]})
        calls = said.get("tool_calls") or []
        for call in calls:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            try:
                told = resources.post(f"/{name}", json.loads(arguments))
            except urllib.error.HTTPError as error:  # as simple_agent does, the policy is told
                told = error.read().decode()
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": told})
            items.append({"type": "function_call", "call_id": call["id"], "name": name, "arguments": arguments})
            items.append({"type": "function_call_output", "call_id": call["id"], "output": told})
        if not calls or len(items) > 2 * MOST_CALLS:
            return items


def main() -> None:
    if sys.argv[1] == "--write":
        with open(sys.argv[2]) as lines, open(sys.argv[3], "w") as file:
            for line in map(json.loads, lines):
                asked = line["responses_create_params"]
                shown = {"messages": as_messages(asked["input"]), "tools": as_tools(asked.get("tools"))}
                file.write(json.dumps(line | {key: value for key, value in shown.items() if value}) + "\n")
        return
    told = json.load(sys.stdin)
    resources, policy = Server(sys.argv[1]), Server(told["base_url"], told["api_key"])
    line = {key: value for key, value in told["line"].items() if key not in ("messages", "tools")}
    resources.post("/seed_session", line)
    items = play(line, policy, told["model"], resources)
    output = [item | {"id": f"item_{number}"} for number, item in enumerate(items)]
    response = {"id": f"resp_{told['episode']}", "object": "response", "created_at": 0, "model": told["model"]}
    response |= {"output": output, "parallel_tool_calls": True, "tool_choice": "auto"}
    response["tools"] = line["responses_create_params"].get("tools") or []
    verified = json.loads(resources.post("/verify", line | {"response": response}))
    print(json.dumps(verified.get("reward_components") or {"reward": verified["reward"]}))


if __name__ == "__main__":
    main()
