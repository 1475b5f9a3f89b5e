"""A program from outside for the chaos: `chaos_program.py URL SESSIONS LOG`.

It works on several tasks at once, each a conversation of some turns, and writes what it was told to
the log: a line for each answer, and one when the gateway has taken the end of a session.
"""

import json
import random
import sys
import threading
import time

import agentrl_client as agentrl
from openai import OpenAI, OpenAIError

TURNS = 5
lock = threading.Lock()


def note(**told: object) -> None:
    with lock, open(sys.argv[3], "a") as log:
        log.write(json.dumps(told) + "\n")


def work() -> None:
    for task in agentrl.tasks(sys.argv[1]):
        said: list[str] = []
        try:
            with agentrl.session(task) as s:
                model = OpenAI(base_url=s.base_url, api_key=s.api_key, max_retries=s.max_retries)
                messages = [{"role": "user", "content": task.query}]
                for turn in range(TURNS):
                    answer = model.chat.completions.create(model="m", messages=messages)
                    said.append(answer.choices[0].message.content)
                    note(session=s.id, turn=turn, said=said[-1])
                    messages.append({"role": "assistant", "content": said[-1]})
                    messages.append({"role": "user", "content": f"And number {turn}?"})
                    time.sleep(random.uniform(0.05, 0.5))
                s.reward(random.random())
                s.finish(said[-1])
                note(session=s.id, finished=said)
        except (OpenAIError, agentrl.GatewayError) as error:
            note(session=task.session, error=f"{type(error).__name__}: {error}")


threads = [threading.Thread(target=work) for _ in range(int(sys.argv[2]))]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
