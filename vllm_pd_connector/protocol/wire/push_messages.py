"""Messages of pushes: what a decode instance asks to be written, and what a prefill instance tells its workers.

They are part of the one protocol of `messages`, which frames them and says which answers which. docs/design/push.md
tells what is done with them.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, field

from vllm_pd_connector.geometry.validate import MAX_GROUPS
from vllm_pd_connector.protocol.wire.fields import (
    MAX_COMPARE_S,
    MAX_LEASES,
    NONCE_BYTES,
    AnyLife,
    Count,
    EngineId,
    Host,
    Incarnation,
    LeaseRef,
    Message,
    Nonce,
    Port,
    RequestId,
    Seconds,
    ServerKey,
    Tables,
    Text,
    Tokens,
    Traceparent,
    Weights,
    Worker,
    Workers,
)

FirstValidTokens = Annotated[dict[Annotated[int, Meta(ge=0, lt=MAX_GROUPS)], Tokens], Meta(max_length=MAX_GROUPS)]


class PrefillRef(Message, frozen=True):
    """One prefill on the instance that is asked: by the name that both legs of a request carry, or, with the nonce of
    its lease, by its request id there."""

    name: RequestId
    nonce: Nonce | None


class InstanceAddress(Message, frozen=True):
    """Where the manifests of a decode instance are served, by whom (its CURVE key), and which of its incarnations is
    meant."""

    engine_id: EngineId
    incarnation: Incarnation
    host: Host
    port: Port
    server_key: ServerKey | None = None


class Moved(Message, frozen=True):
    """What the transport was given, for statistics."""

    bytes: Count = 0
    runs: Count = 0
    descriptors: Count = 0

    def __add__(self, other: Moved) -> Moved:
        return Moved(self.bytes + other.bytes, self.runs + other.runs, self.descriptors + other.descriptors)


class Taken(Message, frozen=True):
    """What a reader says of itself and of what it got, for statistics and traces alone: its engine, what the transport
    moved for it, and its span (`traceparent` of W3C), empty where it is not traced."""

    engine_id: Annotated[str, Meta(max_length=512)] = ""
    moved: Moved = Moved()
    trace: Traceparent = ""


class PushInto(Message, frozen=True, tag="push_into"):
    """Write tokens [start, stop) of a prefill into these blocks of one worker of the decode instance at `home`.

    Answered when every byte is there, at once when it fails, and otherwise after a few seconds with how far it is; the
    decode side then asks again, with the same `attempt` (random, drawn once per receive). `reader` and `readers`
    count workers as in `ReadDone`, `pp_rank`, `pcp_rank` and `tp_rank` name the worker in its instance's manifests.

    With `compare_s` above 0 the decode side compares what was written before it uses it, within so many seconds of the
    answer: the prefill side keeps the blocks under their lease until then, or until `ReadDone` or `Release`. `reading`
    is the attempt that these then name: one for all workers of the decode instance.

    `waited_s`: how long ago the decode request arrived, which tells a late leg of an attempt that has ended from the
    first leg of the next under the same name. `incarnation`: which incarnation of the prefill instance is asked;
    another one does not answer for it. `weights`: with which the decode instance computes; a prefill with others is not
    written. `trace`: as in `Taken`.
    """

    prefill: PrefillRef
    home: InstanceAddress
    pp_rank: Worker
    pcp_rank: Worker
    tp_rank: Worker
    reader: Worker
    readers: Workers
    attempt: Nonce
    blocks: Tables
    start: Tokens
    stop: Tokens
    prompt_digest: Annotated[str, Meta(min_length=16, max_length=16)]
    compare_s: Annotated[float, Meta(ge=0, le=MAX_COMPARE_S)] = 0.0
    reading: Nonce = bytes(NONCE_BYTES)
    waited_s: Seconds = 0.0
    incarnation: AnyLife = ""
    weights: Weights = Weights()
    trace: Traceparent = ""

    @property
    def rank(self) -> tuple[int, int, int]:
        return self.pp_rank, self.pcp_rank, self.tp_rank


class WithdrawPush(Message, frozen=True, tag="withdraw_push"):
    """The push of this attempt is not wanted any more; answered like `PushInto` when nothing of it can land, by the
    life that was asked for it."""

    prefill: PrefillRef
    attempt: Nonce
    incarnation: AnyLife = ""


class DeclinePush(Message, frozen=True, tag="decline_push"):
    """A prefill that the decode instance needs nothing of: a full prefix hit, or a request that was aborted. `waited_s`
    as in `PushInto`."""

    prefill: PrefillRef
    waited_s: Seconds = 0.0


class KeepPrefills(Message, frozen=True, tag="keep_prefills"):
    """Requests for these prefills queue on the decode instance and have no blocks to be written into yet: extend the
    leases of those that have finished, each to now plus its own duration. What is not known here may still come."""

    prefills: Annotated[tuple[PrefillRef, ...], Meta(max_length=MAX_LEASES)]


class PushState(StrEnum):
    """How far a push is."""

    EXPECTED = "expected"
    COMPUTING = "computing"
    WRITING = "writing"
    DONE = "done"
    FAILED = "failed"


class Pushed(Message, frozen=True, tag="pushed"):
    """State of one push, with the reason if it failed. `terminal`: nothing of it is written from now on.

    `moved` is what was moved, with DONE; with WRITING its `descriptors` are the parts of transfers that have ended, and
    grow as long as bytes move.
    `request_id` is the prefill's, once it is known, for logs and traces. `lease` is set with DONE if what was written
    can be compared with the blocks that it holds, as was asked for: it then waits for `ReadDone` or `Release`.
    """

    state: PushState
    reason: Text
    terminal: bool
    late_starts: FirstValidTokens = field(default_factory=dict)
    moved: Moved = Moved()
    request_id: Text = ""
    lease: LeaseRef | None = None


class AwaitCommands(Message, frozen=True, tag="await_orders"):
    """From a worker to its own scheduler half: the commands after number `seen`, as soon as there are any.

    `token` was drawn by the worker and given to its scheduler half by way of vLLM, so that nobody else gets commands.
    """

    token: Nonce
    worker: Worker
    seen: Annotated[int, Meta(ge=0)]


class BeginCommand(Message, frozen=True, tag="begin"):
    """Command to a worker: a push begins, of which other commands tell by its attempt. It comes before all of them, so
    that the destination's blocks are told once and not with every step."""

    into: PushInto


class WriteCommand(Message, frozen=True, tag="write"):
    """Command to a worker: write what is missing of tokens below `ready`, when its forward of `step` is done.

    Block ids in `source` are the prefill side's. Only with `final` or `whole` are the last partial block, windows and
    states written; before, only blocks that are complete. `whole`: the step computes the last of the prompt, `source`
    has the tables of all groups, and no other step of the request follows.
    """

    attempt: Nonce
    source: Tables
    ready: Tokens
    step: Annotated[int, Meta(ge=0)]
    final: bool
    whole: bool = False


class CancelCommand(Message, frozen=True, tag="give_up"):
    """Command to a worker: start no more writes of this attempt, and report its end."""

    attempt: Nonce
    reason: Text


Command = BeginCommand | WriteCommand | CancelCommand


class Commands(Message, frozen=True, tag="orders"):
    """The commands up to number `last`, oldest first; none if nothing came for a while."""

    last: Annotated[int, Meta(ge=0)]
    orders: tuple[Command, ...]


class PushEnded(Message, frozen=True, tag="push_ended"):
    """From a worker to its own scheduler half: its part of a push is written, has failed, or (`ok`, not `terminal`)
    goes on: the `descriptors` of `moved` then are as in `Pushed`.

    A failure that is not `terminal` may still write; another report follows when it cannot any more.
    `first_valid_tokens` are those of `geometry.bind`: destination groups whose first block in the window holds tokens
    only from there on.
    """

    token: Nonce
    worker: Worker
    attempt: Nonce
    ok: bool
    reason: Text
    terminal: bool
    late_starts: FirstValidTokens = field(default_factory=dict)
    moved: Moved = Moved()
