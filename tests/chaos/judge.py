"""A judge behind OpenAI's API that does what a file says: judge, fail, or talk nonsense.

python judge.py --host ADDRESS --port PORT --mode FILE
"""

import argparse
import json
import sys
from pathlib import Path

from aiohttp import web

sys.path.insert(0, str(Path(__file__).parents[1]))  # `chat_completion`

from chat_completion import chat_completion

RIGHT, ERROR, NONSENSE = "judges", "error 500", "nan"


def main() -> None:
    """Serve until a signal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--mode", type=Path, required=True, help="file that says what it does now")
    arguments = parser.parse_args()

    async def answer(request: web.Request) -> web.Response:
        body = await request.json()
        mode = arguments.mode.read_text() if arguments.mode.exists() else RIGHT
        if mode == ERROR:
            return web.json_response({"error": {"message": "out of order"}}, status=500)
        material = json.loads(body["messages"][-1]["content"])
        verdict = "right" if material["reference"] in material["response"] else "wrong"
        content = "nan" if mode == NONSENSE else f"JUDGEMENT: {verdict}"
        return web.json_response(chat_completion(body["model"], content))

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    web.run_app(app, host=arguments.host, port=arguments.port, access_log=None, print=None)


if __name__ == "__main__":
    main()
