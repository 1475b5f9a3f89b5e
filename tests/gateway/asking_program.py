"""A program of five turns: `asking_program.py [TURN]` is killed in first attempts after TURN.

It knows nothing of training, and of its attempt only what the test reads from the session's URL.
"""

import json
import os
import signal
import sys
import urllib.request

TURNS = 5


def ask(messages: list) -> dict:
    url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    asked = json.dumps({"model": "any", "messages": messages, "max_tokens": 16})
    request = urllib.request.Request(url, asked.encode(), headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]


def main() -> None:
    killed_after = int(sys.argv[1]) if len(sys.argv) > 1 else None
    first = os.environ["AGENTRL_SESSION_URL"].endswith("-a0")
    question = os.environ.get("ASKED", "How many?")
    messages = [{"role": "user", "content": question}]
    for turn in range(TURNS):
        reply = ask(messages)
        messages += [reply, {"role": "user", "content": f"And after {turn}?"}]
        if first and turn == killed_after:
            os.kill(os.getpid(), signal.SIGKILL)
    print(reply["content"])


if __name__ == "__main__":
    main()
