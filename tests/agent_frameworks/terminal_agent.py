"""A terminal coding agent, mini-SWE-agent, on a folder with a fault: `python terminal_agent.py`.

It knows nothing of training, and finds the model by the environment. Whether the folder's test
passes afterwards is the reward.
"""

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

TASK = json.loads(Path(os.environ["AGENTRL_TASK_FILE"]).read_text())
SETTINGS = {
    "MSWEA_CONFIGURED": "true",  # it asks nobody for a key
    "MSWEA_COST_TRACKING": "ignore_errors",  # no price is known of our model
    "MSWEA_SILENT_STARTUP": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}

with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    (folder / "total.py").write_text("def total(a, b):\n    return a - b\n")
    (folder / "check.py").write_text("from total import total\n\nassert total(2, 3) == 5\n")
    command = [
        str(Path(sys.executable).with_name("mini")), "-m", f"openai/{os.environ['AGENTRL_MODEL']}",
        "-t", TASK["query"], "-y", "--exit-immediately", "-o", str(folder / "trajectory.json"),
    ]  # fmt: skip
    ran = subprocess.run(
        command, cwd=folder, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=True,
        env={**os.environ, **SETTINGS, "MSWEA_GLOBAL_CONFIG_DIR": name},
    )  # fmt: skip
    passes = subprocess.run([sys.executable, "check.py"], cwd=folder).returncode == 0
    url, key = os.environ["AGENTRL_SESSION_URL"], os.environ["AGENTRL_SESSION_KEY"]
    told = json.dumps({"reward": float(passes)}).encode()
    request = urllib.request.Request(f"{url}/reward", told, {"Authorization": f"Bearer {key}"})
    urllib.request.urlopen(request).close()
    print(f"<answer>{(folder / 'total.py').read_text()}</answer>")
