"""`vllm-pd trace`: order records of receives on an instance, show them, move their bytes again."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from vllm_pd_connector.cli.explain import as_json, as_text
from vllm_pd_connector.cli.options import Json
from vllm_pd_connector.cli.output import Exit, NotReadable, emit, emit_json
from vllm_pd_connector.cli.trace.replay import Replayed, known_sources, replay, source_tables
from vllm_pd_connector.errors import PDConnectorError
from vllm_pd_connector.geometry.blocks import BlockTable
from vllm_pd_connector.geometry.explain import Explanation, explain_request
from vllm_pd_connector.geometry.sharding import describe_rank
from vllm_pd_connector.observability.record import MAX_REQUESTS, Order, Record, Unreadable, place_order, read

app = typer.Typer(help="Record receives of an instance, show a record, move its bytes again without servers.")

File = Annotated[Path, typer.Argument(metavar="FILE", help="records, as an instance writes them into its trace_dir")]


@app.command("next")
def order(
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="the instance's trace_dir, on its machine")],
    json: Json = False,
    requests: Annotated[int, typer.Option(min=1, max=MAX_REQUESTS, help="how many requests")] = 1,
    failures: Annotated[bool, typer.Option("--failures", help="write those of them alone that fail")] = False,
) -> Exit:
    """Have an instance record the next requests that it receives caches for."""
    try:
        path = place_order(directory, Order(requests=requests, failures=failures))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise NotReadable(f"{directory}: no order can be placed there: {why}; give the instance's trace_dir") from error
    if json:
        emit_json("trace", {"order": str(path), "requests": requests, "failures": failures})
    else:
        emit(f"{path}: of the next {requests} requests {'each that fails' if failures else 'each'} is recorded")
    return Exit.OK


@app.command()
def show(file: File, json: Json = False) -> Exit:
    """Print what was recorded: the request, its outcome, its stages, and what its plan moves."""
    records = _read(file)
    if json:
        emit_json("trace", {"records": [_plain(record) for record in records]})
    else:
        emit(_printable("\n\n".join(_text(record) for record in records)))
    return Exit.OK


@app.command("replay")
def move_again(file: File, json: Json = False) -> Exit:
    """Move the recorded requests' bytes again in this process, without servers, and look at every element."""
    outcomes = [(record, *_replayed(record)) for record in _read(file)]
    good = all(found is not None and not found.wrong for _, found, _ in outcomes)
    if json:
        emit_json("trace", {"good": good, "replays": [_replay_json(*outcome) for outcome in outcomes]})
    else:
        emit(_printable("\n".join(line for outcome in outcomes for line in _replay_lines(*outcome))))
    return Exit.OK if good else Exit.REFUSED


def _read(file: Path) -> list[Record]:
    try:
        return read(file)
    except Unreadable as error:
        raise NotReadable(_printable(str(error))) from error


def _replayed(record: Record) -> tuple[Replayed | None, str]:
    """What a replay found, or why there is none."""
    if not record.sources:
        return None, "the record has no manifests of the prefill side, which never came or could not be read"
    try:
        return replay(record), ""
    except PDConnectorError as error:
        return None, str(error)
    except MemoryError:
        return None, "this machine has not enough memory for it"


def _replay_json(record: Record, found: Replayed | None, why: str) -> dict[str, Any]:
    outcome: dict[str, Any] = {"request": record.request, "rank": _rank(record), "refused": why}
    if found is not None:
        outcome |= {"moved": msgspec.to_builtins(found.moved), "wrong": list(found.wrong)}
    return outcome | {
        "recorded": {"ok": record.ok, "reason": record.reason, "moved": msgspec.to_builtins(record.moved)}
    }


def _replay_lines(record: Record, found: Replayed | None, why: str) -> list[str]:
    said = "it ended well" if record.ok else f"it failed: {record.reason}"
    lines = [f"request {record.request}, decode {_rank(record)}: {said}"]
    if found is None:
        return [*lines, f"  not replayed: {why}"]
    moved = record.moved
    lines.append(f"  replayed: {found.moved.bytes} bytes in {found.moved.runs} runs")
    if record.ok:
        alike = record.way == "push" or (moved.bytes, moved.runs) == (found.moved.bytes, found.moved.runs)
        other = "" if alike else ": this release plans it otherwise"
        lines.append(f"  recorded: {moved.bytes} bytes in {moved.runs} runs{other}")
    if found.wrong:
        return [*lines, *(f"  wrong: {one}" for one in found.wrong)]
    here = "" if record.ok else "; what failed was not the plan: look at the transport, the lease and the times"
    return [*lines, f"  every element came where it belongs{here}"]


def _explained(record: Record) -> Explanation:
    return explain_request(
        known_sources(record),
        record.destination,
        source_tables(record),
        record.blocks,
        range(record.start, record.stop),
        record.chunk_bytes,
        push=record.way == "push",
        run_cost=record.run_cost,
    )


def _plain(record: Record) -> dict[str, Any]:
    """A record as plain values: ids for tables, and what `explain` says for manifests."""
    plain: dict[str, Any] = {
        name: msgspec.to_builtins(getattr(record, name))
        for name in Record.__struct_fields__
        if name not in ("blocks", "source_blocks", "destination", "sources")
    }
    for name, tables in (("blocks", record.blocks), ("source_blocks", record.source_blocks)):
        plain[name] = None if tables is None else [{"first": t.first_block, "ids": t.ids.tolist()} for t in tables]
    return plain | {"rank": _rank(record), "plan": as_json(record.sources, [record.destination], _explained(record))}


def _text(record: Record) -> str:
    ended = (
        f"done after {record.seconds:.3f} s" if record.ok else f"failed after {record.seconds:.3f} s ({record.kind})"
    )
    at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(record.at))
    by = "read by decode" if record.way == "pull" else "written by prefill"
    moved, compared = record.moved, ", and compared" if record.verified else ""
    lines = [
        f"request {record.request}, decode {_rank(record)}: {ended}, {at}",
        f"  prefill {record.prefill} at {record.peer}, {by}, waited {record.waited_s:.3f} s before",
        f"  tokens [{record.start}, {record.stop}), {moved.bytes} bytes in {moved.runs} runs moved{compared}",
    ]
    if not record.ok:
        lines.append(f"  {record.reason}{'; blocks were left in quarantine' if record.quarantined else ''}")
    lines += [f"  {stage.name}: {stage.began:.3f} to {stage.ended:.3f} s" for stage in record.stages]
    for side, tables in (("decode", record.blocks), ("prefill", record.source_blocks or ())):
        lines += [f"  {side} group {i}: {_ids(table)}" for i, table in enumerate(tables)]
    if record.source_blocks is None:
        lines.append("  prefill's blocks are known there alone; below they follow each other")
    return "\n".join([*lines, "", as_text(record.sources, [record.destination], _explained(record), recorded=True)])


def _ids(table: BlockTable) -> str:
    """Ids in stretches of neighbours."""
    ids = table.ids.tolist()
    stretches: list[list[int]] = []
    for one in ids:
        if stretches and one and stretches[-1][1] + 1 == one:
            stretches[-1][1] = one
        else:
            stretches.append([one, one])
    said = " ".join(str(a) if a == b else f"{a}-{b}" for a, b in stretches)
    return f"{len(ids)} blocks from logical block {table.first_block} on: {said}"


def _rank(record: Record) -> str:
    return describe_rank(record.destination.parallel.rank)


def _printable(text: str) -> str:
    """A record's words are a stranger's: nothing of them reaches the terminal as a command."""
    return re.sub(r"[^\n -~]", lambda found: found[0] if found[0].isprintable() else ascii(found[0])[1:-1], text)
