"""What a prefill instance holds for a request that no decode instance takes is given back.

vLLM tells its connector of a request that it refuses, and that gives the prefill's blocks back. Of some it does not: of
those whose form it refuses before it has read the parameters (which prefill has run, since fields that only shape the
answer are taken out of its leg), of those that an engine refuses because it ends, and of those that nobody took. Their
blocks would be held for the time of their lease, and a client that goes on so has prefill hold back everybody's. So a
decode instance is sent the parameters once more with a request that it surely refuses, and of which it tells its
connector; where that was told before, it is told twice, which changes nothing.

Source: vLLM 0.32, `entrypoints/generate/base/serving.py` (`_with_kv_transfer_rejection_cleanup`).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import aiohttp

from vllm_pd_connector.proxy.fleet import LOOK_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_pd_connector.proxy.exchange import Exchange
    from vllm_pd_connector.proxy.instance import Instance
    from vllm_pd_connector.routing.handoff import Body

logger = logging.getLogger(__name__)

REFUSED: Body = {"prompt": "given back", "max_tokens": 1, "temperature": -1}
"""No engine samples at a temperature below 0."""


ATTEMPTS = 3


async def give_back(
    instances: Sequence[Instance], session: aiohttp.ClientSession, exchange: Exchange, body: Body
) -> None:
    """Have what the parameters in a decode leg's `body` describe given back, by the first of these decode instances
    that can. Raises nothing: a lease ends by itself."""
    name = f"{exchange.request_id}-given-back"
    said = "there is no decode instance"
    for instance in instances[:ATTEMPTS]:
        try:
            async with session.post(
                f"{instance.url}/v1/completions",
                json=REFUSED | {"kv_transfer_params": body["kv_transfer_params"]},
                headers=exchange.headers | {"X-Request-Id": name},
                timeout=aiohttp.ClientTimeout(LOOK_S),
                allow_redirects=False,
            ) as response:
                if response.status == 400:
                    logger.debug("request %s: %s was told that its prefill is given back", name, instance.url)
                    return
                said = f"{instance.url} answered {response.status}"
        except (aiohttp.ClientError, TimeoutError) as error:
            said = f"{instance.url}: {str(error) or type(error).__name__}"
    logger.warning("request %s: what was prefilled is held until its lease ends: %s", exchange.request_id, said)
