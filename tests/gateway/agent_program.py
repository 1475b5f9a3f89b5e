"""A program that knows nothing of training: it asks a model where an item is.

`python agent_program.py MODE`: what it does beside that.
"""

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

mode = sys.argv[1]
task = json.loads(Path(os.environ["AGENTRL_TASK_FILE"]).read_text())
if mode == "never":
    print("I know it already")
    sys.exit(0)


def post(url: str, told: object) -> dict:
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    request = urllib.request.Request(url, json.dumps(told).encode(), headers)
    return json.load(urllib.request.urlopen(request))


def ask() -> str:
    asked = {"model": "any", "messages": [{"role": "user", "content": task["query"]}]}
    answer = post(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", asked)
    return answer["choices"][0]["message"]["content"]


while mode == "greedy":  # goes on for ever
    ask()
reply = ask()
print("I asked once", file=sys.stderr)
match mode:
    case "answer":
        print(f"It said: {reply}")
    case "reward":
        url = os.environ["AGENTRL_SESSION_URL"]
        post(f"{url}/reward", {"reward": 0.25, "explanation": "a quarter"})
        post(f"{url}/finish", {})
        time.sleep(600)  # it is done, and does not end
    case "fail":
        raise KeyError("no such bin")
    case "hang":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(task["pid_file"]).write_text(f"{os.getpid()} {child.pid}")
        time.sleep(600)
    case "secrets":
        print("<answer>" + os.environ.get("DB_URL", "none") + "</answer>")
