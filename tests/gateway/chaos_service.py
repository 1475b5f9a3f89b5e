"""An inference service for the chaos of programs: `chaos_service.py PORT`. It answers after a
moment with words that no two answers have in common."""

import asyncio
import random
import sys
from pathlib import Path
from uuid import uuid4

sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))  # `answering_service`

from answering_service import AnsweringService

from agentrl.rollout.chat import ChatRenderer

DEMO_MODEL = Path(__file__).parents[2] / "assets" / "demo" / "model"


async def answer(prompt: str) -> str:
    await asyncio.sleep(random.uniform(0.02, 0.3))
    return f"It is {uuid4().hex[:8]}.<|im_end|>"


async def main(port: int) -> None:
    service = AnsweringService(ChatRenderer.load(DEMO_MODEL), answer)
    service.url = f"http://127.0.0.1:{port}"
    async with service.running():
        await asyncio.Event().wait()


asyncio.run(main(int(sys.argv[1])))
