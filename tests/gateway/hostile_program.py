"""A program that asks the model once and then tries what a sandbox and its limits must stop.

`python hostile_program.py MODE`. It imports only the standard library.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

mode = sys.argv[1]
task = json.loads(Path(os.environ["AGENTRL_TASK_FILE"]).read_text())
asked = {"model": "any", "messages": [{"role": "user", "content": task["query"]}]}
request = urllib.request.Request(
    f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
    json.dumps(asked).encode(),
    {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"},
)
reply = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]


def tried(attempt) -> str:
    """What came of an attempt: "done", or the name of the error."""
    try:
        attempt()
    except OSError as error:
        return type(error).__name__
    return "done"


match mode:
    case "answer":
        print(reply)
    case "look":
        found = {
            "service": tried(lambda: socket.create_connection(("127.0.0.1", task["port"]), 3)),
            "outside": tried(lambda: socket.create_connection(("192.0.2.1", 80), 3)),
            "secret": tried(Path(task["secret"]).read_bytes),
            "code": tried(lambda: Path(__file__).with_name("made").write_text("x")),
            "own": tried(lambda: Path("/tmp/made").write_text("x")),
            "door": tried(lambda: socket.socket(socket.AF_UNIX).connect("/run/agentrl/door")),
            "interfaces": [name for _, name in socket.if_nameindex()],
            "pids": sum(name.isdigit() for name in os.listdir("/proc")),
            "signal": tried(lambda: os.kill(1, signal.SIGKILL)),
            "privileged": os.geteuid() == 0,
            "begins": os.getcwd(),
            "variables": sorted(os.environ),
        }
        print(json.dumps(found))
    case "memory":
        held = []
        while True:
            held.append(b"x" * 2**20)
    case "cpu":
        while True:
            pass
    case "threads":
        while True:
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    case "disk":
        with open(Path(os.environ.get("TMPDIR", "/tmp")) / "large", "wb") as file:
            while True:
                file.write(b"x" * 2**20)
    case "kills_its_subreaper" | "stops_its_subreaper":
        child = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"],
            start_new_session="stops" in mode,
        )
        pids = [os.getpid(), child.pid]
        Path(task["pid_file"]).write_text(" ".join(map(str, pids)))
        os.kill(os.getppid(), signal.SIGKILL if "kills" in mode else signal.SIGSTOP)
        time.sleep(600)
    case "outlives_all":
        # Its environment has no key, it has left the session, and it holds the pipes.
        child = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(600)"],
            start_new_session=True,
            env={},
        )
        Path(task["pid_file"]).write_text(str(child.pid))
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)
