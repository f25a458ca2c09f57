"""`vllm-pd explain` and `manifest`: what a pair of instances would do, and what one says of itself."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from vllm_pd_connector.cli.instances import identity_of, load, save
from vllm_pd_connector.cli.options import INSTANCE, Json, KeysDirectory, ServerKey, Timeout
from vllm_pd_connector.cli.output import Exit, emit, emit_json, table
from vllm_pd_connector.config import MAX_STAGING_BYTES, Config
from vllm_pd_connector.geometry.explain import Explanation, Movement, explain_pair
from vllm_pd_connector.geometry.manifest import Manifest
from vllm_pd_connector.geometry.staging.chunks import CHUNKS_PER_BUFFER, RUN_COST_BYTES
from vllm_pd_connector.transport.endpoint import protocol_of

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_TOKENS = 1 << 24


def explain(
    prefill: Annotated[str, typer.Argument(help=INSTANCE)],
    decode: Annotated[str, typer.Argument(help=INSTANCE)],
    json: Json = False,
    tokens: Annotated[int, typer.Option(min=1, max=MAX_TOKENS, help="length of the request")] = 1000,
    staging_bytes: Annotated[
        int, typer.Option(min=0, max=MAX_STAGING_BYTES, help="that of the instance that starts transfers")
    ] = Config().staging_bytes,
    mode: Annotated[Literal["pull", "push"], typer.Option(help="who starts them: decode or prefill")] = "pull",
    run_cost: Annotated[
        int, typer.Option(min=1, help="what one run costs the transport, in bytes, as its self-test tells")
    ] = RUN_COST_BYTES,
    keys: KeysDirectory = None,
    server_key: ServerKey = None,
    timeout: Timeout = 5.0,
) -> Exit:
    """May this pair work, who moves what to whom, which layouts are converted."""
    identity = identity_of(keys, server_key)
    givers, takers = load(prefill, timeout, identity), load(decode, timeout, identity)
    chunk_bytes = staging_bytes // CHUNKS_PER_BUFFER
    found = explain_pair(givers, takers, tokens, chunk_bytes, push=mode == "push", run_cost=run_cost)
    if json:
        emit_json("explain", as_json(givers, takers, found))
    else:
        emit(as_text(givers, takers, found))
    return Exit.OK if found.check.allowed else Exit.REFUSED


def manifest(
    source: Annotated[str, typer.Argument(help="tcp://host:port[/engine_id], or a file to convert")],
    output: Annotated[Path, typer.Option("-o", "--output", help="file; JSON if it ends in .json, else msgpack")],
    json: Json = False,
    keys: KeysDirectory = None,
    server_key: ServerKey = None,
    timeout: Timeout = 5.0,
) -> Exit:
    """Save what an instance says of itself."""
    manifests = load(source, timeout, identity_of(keys, server_key))
    save(manifests, output)
    if json:
        emit_json("manifest", {"file": str(output), "instance": _facts(manifests)})
    else:
        emit(f"{len(manifests)} manifests of {_instance(manifests)} in {output}")
    return Exit.OK


def as_json(prefill: Sequence[Manifest], decode: Sequence[Manifest], found: Explanation) -> dict[str, Any]:
    """The explanation as plain values; the keys are part of the command's interface."""
    return {
        "status": str(found.check.status),
        "allowed": found.check.allowed,
        "reason": found.check.reason,
        "differences": [
            {"field": d.field, "decode": d.local, "prefill": d.remote, "advice": d.advice}
            for d in found.check.differences
        ],
        "prefill": _facts(prefill),
        "decode": _facts(decode),
        "tokens": found.tokens,
        "mode": "push" if found.push else "pull",
        "run_cost": found.run_cost,
        "not_moved": found.not_moved,
        "movements": [asdict(movement) for movement in found.movements],
    }


def _facts(manifests: Sequence[Manifest]) -> dict[str, Any]:
    if not manifests:
        return {"workers": 0}
    first = manifests[0]
    return {
        "engine_id": first.engine_id,
        "software": first.software,
        "transport": first.transport,
        "protocol": _protocols(manifests),
        "model": first.model.model,
        "workers": len(manifests),
        "tensor_parallel": first.parallel.tp_size,
        "pipeline_parallel": first.parallel.pp_size,
        "decode_context_parallel": first.parallel.dcp_size,
        "prefill_context_parallel": first.parallel.pcp_size,
    }


def _protocols(manifests: Sequence[Manifest]) -> str:
    """What the transport of these workers speaks, several where they differ; "" if it does not say."""
    return ", ".join(sorted({protocol_of(one.transport, one.endpoint) for one in manifests} - {""}))


def _instance(manifests: Sequence[Manifest]) -> str:
    if not manifests:
        return "no workers"
    facts = _facts(manifests)
    speaks = f" over {facts['protocol']}" if facts["protocol"] else ""
    contexts = "".join(
        f"{name} context parallel {size}, "
        for name in ("decode", "prefill")
        if (size := facts[f"{name}_context_parallel"]) > 1
    )
    return (
        f"engine {facts['engine_id']} ({facts['model']}, {facts['workers']} workers, tensor parallel "
        f"{facts['tensor_parallel']}, pipeline parallel {facts['pipeline_parallel']}, {contexts}"
        f"{facts['transport']}{speaks}, {facts['software']})"
    )


def as_text(
    prefill: Sequence[Manifest], decode: Sequence[Manifest], found: Explanation, *, recorded: bool = False
) -> str:
    """The explanation for a person; `recorded`: of a request that was, with its blocks."""
    check = found.check
    lines = [f"prefill: {_instance(prefill)}", f"decode:  {_instance(decode)}", f"verdict: {check.status}"]
    if not check.allowed:
        # A difference is told from the decode side, which reads and therefore checks.
        lines += [f"  {difference}" for difference in check.differences] or [f"  {check.reason}"]
        return "\n".join(lines)
    of_runs = "bytes written" if found.push else "bytes read"
    header = ("from", "to", "group", "layers", "tokens per page", "way", "bytes", "runs", "neighbours", of_runs,
              "mean run", "copies")  # fmt: skip
    how = "pushed by prefill" if found.push else "pulled by decode"
    where = "from and into the blocks above" if recorded else "in blocks that are not neighbours"
    lines += ["", f"A request of {found.tokens} tokens {where}, {how}:"]
    lines += table([header, *(_row(movement) for movement in found.movements)])
    converted = [m for m in found.movements if m.converted]
    runs, moved = sum(m.runs for m in found.movements), sum(m.bytes for m in found.movements)
    fewest = sum(m.neighbouring_runs for m in found.movements)
    fresh = "" if recorded else f", or {fewest} where blocks are neighbours (a fresh cache)"
    lines += ["", f"in all: {moved} bytes in {runs} runs{fresh}; a run counts as {found.run_cost} bytes"]
    if found.not_moved:
        lines.append(found.not_moved)
    if converted:
        saved = sum(m.unconverted_runs for m in converted)
        lines.append(f"conversion makes {sum(m.runs for m in converted)} runs of about {saved}")
    return "\n".join(lines)


def _row(movement: Movement) -> tuple[str, ...]:
    sides = (
        (movement.source_page_tokens, movement.source_share),
        (movement.destination_page_tokens, movement.destination_share),
    )
    pages = " to ".join(f"{tokens} ({share})" if share else str(tokens) for tokens, share in sides)
    return (
        movement.source,
        movement.destination,
        f"{movement.group} {movement.kind}",
        str(movement.layers),
        pages if movement.destination_page_tokens else "-",
        "converted" if movement.converted else "direct",
        str(movement.bytes),
        str(movement.runs),
        str(movement.neighbouring_runs),
        str(movement.read_bytes),
        str(round(movement.read_bytes / max(1, movement.runs))),
        str(movement.copies),
    )
