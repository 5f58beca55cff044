"""Light traffic for the demo: chats and streams of two tenants, so that the dashboard has something to show."""

import asyncio
import random
from itertools import cycle
from typing import Final

from aiohttp import ClientError, ClientSession, ClientTimeout

from din_extproc.tools.demo.plan import CHAT_ALIAS, DemoPlan

_PAUSE_S: Final = 0.8
"""Mean pause between two requests of one client."""
_CLIENTS: Final = 2
_TRIAL_EVERY: Final = 10
"""One request in so many uses the trial key, which soon reaches its limit."""
_PROMPTS: Final = ("Say hello.", "Name three rivers.", "Tell a short story about a lighthouse.", "What is a queue?")


async def send_traffic(plan: DemoPlan) -> None:
    """Send requests until cancelled. Refusals and failures are what the dashboard shows; they end nothing."""
    async with ClientSession(timeout=ClientTimeout(total=30)) as session, asyncio.TaskGroup() as group:
        for number in range(_CLIENTS):
            group.create_task(_run_client(plan, session, random.Random(number)))  # noqa: S311 - pauses need no secrecy


async def _run_client(plan: DemoPlan, session: ClientSession, chance: random.Random) -> None:
    for number, prompt in enumerate(cycle(_PROMPTS), 1):
        key = plan.trial_key if number % _TRIAL_EVERY == 0 else plan.key
        body = {"model": CHAT_ALIAS, "messages": [{"role": "user", "content": prompt}], "max_tokens": 24, "stream": number % 2 == 0}
        headers = {"authorization": f"Bearer {key.text}"}
        try:
            async with session.post(f"{plan.url}/v1/chat/completions", json=body, headers=headers) as reply:
                await reply.read()
        except (ClientError, TimeoutError):
            pass
        await asyncio.sleep(chance.expovariate(1 / _PAUSE_S))
