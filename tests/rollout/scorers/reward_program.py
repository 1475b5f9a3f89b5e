"""A reward service as a program of its own: `python reward_program.py SECONDS WORKERS`.

Each score takes SECONDS, and at most WORKERS are worked on at once, as in a pool of threads. Prints
its port. GET /most answers how many requests were there at once.
"""

import asyncio
import json
import sys

from aiohttp import web

there = most = 0


async def score(request: web.Request) -> web.Response:
    global there, most
    there += 1
    most = max(most, there)
    asked = await request.json()
    async with workers:
        await asyncio.sleep(seconds)
    there -= 1
    return web.json_response({"score": float(asked["model_answer"])})


async def tell_most(request: web.Request) -> web.Response:
    return web.Response(text=json.dumps(most))


async def main() -> None:
    app = web.Application()
    app.add_routes([web.post("/score", score), web.get("/most", tell_most)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until the test that started it is gone


if __name__ == "__main__":
    seconds, workers = float(sys.argv[1]), asyncio.Semaphore(int(sys.argv[2]))
    asyncio.run(main())
