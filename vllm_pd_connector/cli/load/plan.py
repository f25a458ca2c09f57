"""`vllm-pd plan`: from two measurements and a rate of requests to numbers of instances, blocks and a lease.

The formula is in docs/sizing.md.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import ceil
from typing import Annotated, Final

import typer

from vllm_pd_connector.arguments import seconds
from vllm_pd_connector.cli.options import Json, taken
from vllm_pd_connector.cli.output import Exit, emit, emit_json
from vllm_pd_connector.config import Config

LONGEST_LEASE_S: Final = 86400.0
MAX_TOKENS: Final = 1 << 24


@dataclass(frozen=True, slots=True)
class Plan:
    """Numbers of instances, how much of their time is used, blocks of one instance, and `kv_lease_duration`."""

    prefill: int
    decode: int
    prefill_used: float
    decode_used: float
    prefill_blocks: int
    decode_blocks: int
    kv_lease_duration: float
    kv_lease_limit: float


def size(
    rate: float, prefill_s: float, token_s: float, batch: int, prompt: int, answer: int, block: int, wait_s: float,
    used: float,
) -> Plan:  # fmt: skip
    """See docs/sizing.md. `used` is the part of an instance's time that may be taken, in (0, 1]."""
    prefill_load, decode_load = rate * prefill_s, rate * answer * token_s / batch
    prefills, decodes = (max(1, ceil(load / used - 1e-9)) for load in (prefill_load, decode_load))
    computing = prefill_load / prefills
    waiting = rate / prefills * wait_s
    lease = min(LONGEST_LEASE_S, max(Config().kv_lease_duration, 3 * wait_s))
    return Plan(
        prefills,
        decodes,
        prefill_load / prefills,
        decode_load / decodes,
        ceil((computing + waiting) * ceil(prompt / block)),
        batch * ceil((prompt + answer) / block),
        lease,
        max(Config().kv_lease_limit, lease),
    )


def plan(
    rate: Annotated[float, typer.Option(min=1e-6, max=1e6, help="requests per second")],
    prefill_seconds: Annotated[float, typer.Option(parser=taken(seconds), metavar="SECONDS",
                                                   help="time to first token of one request alone")],
    token_seconds: Annotated[float, typer.Option(parser=taken(seconds), metavar="SECONDS",
                                                 help="time per token of a request in a full batch")],
    batch: Annotated[int, typer.Option(min=1, max=1 << 20, help="requests in that batch")],
    prompt_tokens: Annotated[int, typer.Option(min=1, max=MAX_TOKENS, help="of a request, on average")],
    answer_tokens: Annotated[int, typer.Option(min=1, max=MAX_TOKENS, help="of its answer")],
    block_size: Annotated[int, typer.Option(min=1, max=MAX_TOKENS, help="tokens of a block of the cache")] = 16,
    wait_seconds: Annotated[float, typer.Option(parser=taken(seconds), metavar="SECONDS",
                                                help="from a prefill's end until its blocks were read")] = 1.0,
    use: Annotated[float, typer.Option(min=0.01, max=1.0, help="part of an instance's time that may be taken")] = 0.7,
    json: Json = False,
) -> Exit:  # fmt: skip
    """How many instances, blocks and seconds of lease a load needs."""
    found = size(
        rate, prefill_seconds, token_seconds, batch, prompt_tokens, answer_tokens, block_size, wait_seconds, use
    )
    if json:
        emit_json("plan", asdict(found))
        return Exit.OK
    lines = [
        f"{side}: {number} instances, {busy:.0%} of their time, {blocks} blocks each"
        for side, number, busy, blocks in (
            ("prefill", found.prefill, found.prefill_used, found.prefill_blocks),
            ("decode", found.decode, found.decode_used, found.decode_blocks),
        )
    ]
    lines.append(f"kv_lease_duration: {found.kv_lease_duration:g}")
    if found.kv_lease_limit > Config().kv_lease_limit:
        lines.append(f"kv_lease_limit: {found.kv_lease_limit:g}")
    emit("\n".join(lines))
    return Exit.OK
