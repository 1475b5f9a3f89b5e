"""A program that knows nothing of training: it asks OpenAI's client where an item is.

`python agent_program.py MODE`: what it does beside that.
"""

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import openai

mode = sys.argv[1]
task = json.loads(Path(os.environ["AGENTRL_TASK_FILE"]).read_text())
if mode == "never":
    print("I know it already")
    sys.exit(0)
client = openai.OpenAI()
messages = [{"role": "user", "content": task["query"]}]
if mode == "greedy":  # goes on for ever
    while True:
        client.chat.completions.create(model="any", messages=messages)
reply = client.chat.completions.create(model="any", messages=messages).choices[0].message.content
print("I asked once", file=sys.stderr)
match mode:
    case "answer":
        print(f"It said: {reply}")
    case "reward":
        for name, told in (
            ("reward", {"reward": 0.25, "explanation": "a quarter"}),
            ("finish", {}),
        ):
            url = f"{os.environ['AGENTRL_SESSION_URL']}/{name}"
            key = {"Authorization": f"Bearer {os.environ['AGENTRL_SESSION_KEY']}"}
            urllib.request.urlopen(urllib.request.Request(url, json.dumps(told).encode(), key))
        time.sleep(600)  # it is done, and does not end
    case "fail":
        raise KeyError("no such bin")
    case "hang":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(task["pid_file"]).write_text(f"{os.getpid()} {child.pid}")
        time.sleep(600)
    case "secrets":
        print("<answer>" + os.environ.get("DB_URL", "none") + "</answer>")
