"""One client request at the router: read and checked, and what is not answered refused.

An error has the form of the OpenAI API. vLLM puts failures also into answers with status 200: as the reason why a
choice ended, and as a stream's first event. So a stream is read event by event: each is looked at before the client
gets it, and one that broke off in the middle never reaches it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import web

from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.proxy.choice import PromptPrefix, prompt_prefix
from vllm_pd_connector.proxy.conversations import Turn
from vllm_pd_connector.proxy.instance import (
    MAX_ANSWER_BYTES,
    Aborted,
    InstanceRefusal,
    LegError,
    NothingHandedOver,
    refusal_kind,
    require_short,
)
from vllm_pd_connector.routing.handoff import Body, check_client_body, decode_body
from vllm_pd_connector.routing.prompt_ids import PromptIds

if TYPE_CHECKING:
    from vllm_pd_connector.proxy.instance import InstanceRole
    from vllm_pd_connector.proxy.legs import Headers
    from vllm_pd_connector.proxy.tracing import Untraced

logger = logging.getLogger(__name__)

END_OF_EVENT = re.compile(rb"\n\n|\r\n\r\n|\r\r")
LONGEST_END = 4
UNKNOWN_TYPE = "application/octet-stream"
PASSED_ON = ("traceparent", "tracestate", "X-Vllm-Priority", "X-Session-ID")
"""What vLLM reads besides: the headers of a trace (W3C, `vllm/tracing/utils.py`), so that both legs belong to the
client's; a priority and a session that go before the body's (`vllm/entrypoints/generate/base/serving.py`)."""
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,200}")
_FINISHED = re.compile(rb'"finish_reason"\s*:\s*"')
"""A choice has one. What a model wrote cannot look so: JSON puts a backslash before its quotes."""
_MOST_HELD = 64 << 10


@dataclass(slots=True)
class Exchange:
    """One client request on its way through the router."""

    request: web.Request
    request_id: str
    body: Body
    prefix: PromptPrefix
    headers: Headers
    started: float
    trace: Untraced
    turn: Turn = field(default_factory=Turn)
    """What is known of its conversation."""
    ids: PromptIds = field(default_factory=PromptIds)
    prefilled_at: str = ""
    """URL of the instance that got the first leg."""
    answer: web.StreamResponse | None = None
    """Set when the first byte goes to the client."""
    told: bool = False
    """An error event of the instance's own has said to the client that the request failed."""

    @property
    def path(self) -> str:
        return self.request.path


def error_object(status: int, message: str) -> Body:
    """An error in the form of the OpenAI API."""
    return {"error": {"message": message, "type": "router_error", "param": None, "code": status}}


async def read_exchange(request: web.Request, request_id: str, started: float, trace: Untraced) -> Exchange:
    """The client's request.

    Raises:
        ProtocolError: what it says cannot be handed over.
    """
    if not REQUEST_ID.fullmatch(request_id):
        raise ProtocolError(f"X-Request-Id: {request_id!r:.80}; use up to 200 letters, digits, '.', '_', ':' and '-'")
    body, prefix = read_body(await _content(request))
    passed = {name: ",".join(request.headers.getall(name)) for name in PASSED_ON if name in request.headers}
    headers = {"X-Request-Id": request_id, **credentials(request), **passed}
    return Exchange(request, request_id, body, prefix, headers, started, trace)


async def _content(request: web.Request) -> bytearray:
    """The body; unlike aiohttp's `read`, the request does not keep it until it has been answered.

    Raises:
        ProtocolError: it is not compressed, or cut into chunks, as its headers say.
        HTTPRequestEntityTooLarge: as aiohttp's.
    """
    content, most = bytearray(), request.client_max_size
    try:
        async for chunk in request.content.iter_any():
            content += chunk
            if len(content) > most:
                raise web.HTTPRequestEntityTooLarge(max_size=most, actual_size=len(content))
        return content
    except web.RequestPayloadError as error:
        raise ProtocolError(f"the request body is not JSON: {error}") from error


def credentials(request: web.Request) -> Headers:
    """By what the client is known to the instances (`vllm serve --api-key`)."""
    name = "Authorization"
    return {name: request.headers[name]} if name in request.headers else {}


def read_body(content: bytes | bytearray) -> tuple[Body, PromptPrefix]:
    """A client's body, and by what its prompt's beginning is known. JSON has no charset (RFC 8259, 8.1 and 11): as
    vLLM's server does, none that a header names is looked at, and besides UTF-8 with or without a mark UTF-16 and
    UTF-32 are read.

    Raises:
        ProtocolError: no JSON that Python can read (also not numbers of thousands of digits), or not to be handed over.
    """
    try:
        body = check_client_body(json.loads(content))
        return body, prompt_prefix(body)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the request body is not JSON: {error}") from error


def check_finished(answer: object, who: str) -> None:
    """An answer with status 200 whose engine request failed, or was cut off by its engine's end, is an error; `who`
    gave it.

    Raises:
        Aborted: it was cut off.
        LegError: it failed.
    """
    choices = answer.get("choices") if isinstance(answer, dict) else None
    for choice in choices if isinstance(choices, list) else ():
        # vLLM answers "abort" to what still runs when it is told to end; a client of ours that left is not answered.
        if isinstance(choice, dict) and (reason := choice.get("finish_reason")) in ("error", "abort"):
            kind = Aborted if reason == "abort" else LegError
            raise kind(502, f"{who} could not finish the request (finish_reason: {reason}); see its log")


def whole_answer(content: bytes, who: str) -> Body:
    """What `who` answered in one piece, with status 200.

    Raises:
        Aborted, LegError: as `check_finished`, or it is no JSON object.
    """
    answer = parsed_json(content)
    if not isinstance(answer, dict):
        raise LegError(502, f"{who} answered 200 without a JSON object: {content[:100]!r}; is it a vLLM server?")
    check_finished(answer, who)
    return answer


def require_handed_over(answer: Body, who: str) -> None:
    """Raises:
    NothingHandedOver: a prefill instance's answer does not say where its caches are.
    """
    try:
        decode_body({}, answer)
    except ProtocolError as error:
        raise NothingHandedOver(502, f"{who}: {error}") from error


def for_client(content: bytes, answer: object, who: str) -> bytes:
    """A decode instance's answer in one piece, without what it says of its caches: that is for the next turn's prefill.

    Raises:
        LegError: it is nested too deeply to be written, though it could be read.
    """
    if not isinstance(answer, dict) or answer.get("kv_transfer_params") is None:
        return content
    try:
        return json.dumps({key: value for key, value in answer.items() if key != "kv_transfer_params"}).encode()
    except RecursionError as error:
        raise LegError(502, f"{who} gave an answer that is nested too deeply to be passed on") from error


def event_for_client(event: bytes, who: str) -> bytes:
    """The same for an event of a stream: vLLM 0.33 says it with the last of a choice.

    Raises:
        LegError: as `for_client`.
    """
    if b"kv_transfer_params" not in event:
        return event
    content = event.strip().removeprefix(b"data:").strip()
    bare = for_client(content, parsed_json(content), who)
    return event if bare is content else b"data: " + bare + b"\n\n"


def is_end(event: bytes | bytearray) -> bool:
    """Whether an event is the last of a stream; what it says may look the same within another."""
    return event.strip().removeprefix(b"data:").strip() == b"[DONE]"


async def whole_events(chunks: AsyncIterator[bytes], who: str = "an instance") -> AsyncIterator[bytes]:
    """The events of a stream, however it was cut into reads; each with the blank line that ends it.

    What follows the last blank line of a stream that came to its end is one if it says so, and else half of one. How
    the connection ends behind the last event is of no interest: the answer is there.

    Raises:
        LegError: an event of more than MAX_ANSWER_BYTES.
    """
    rest, looked_at, ended = bytearray(), 0, False
    while True:
        try:
            chunk = await anext(chunks)
        except StopAsyncIteration:
            break
        except (aiohttp.ClientError, TimeoutError):
            if not ended:
                raise
            return
        rest += chunk
        begin = 0
        while (end := END_OF_EVENT.search(rest, max(begin, looked_at - LONGEST_END + 1))) is not None:
            event = bytes(rest[begin : end.end()])
            ended |= is_end(event)
            yield event
            begin = end.end()
        del rest[:begin]
        looked_at = len(rest)
        require_short(who, 200, looked_at, MAX_ANSWER_BYTES)
    if is_end(rest):
        yield bytes(rest)


def check_event(event: bytes, first: bool, who: str) -> bool:
    """Refuse an event of a stream of `who` that says that the request failed.

    Only the first can still become a status: later, an instance's own error event is passed on as it is. Returns
    whether it is one.

    Raises:
        InstanceRefusal: the first event is an error. vLLM counts its queue twice, and the second time it has said
            200 (`--max-num-queued-reqs`); of a pause it learns after that.
        LegError: a choice ended as in `check_finished`.
    """
    if b"error" not in event and b"abort" not in event:
        return False  # nearly all of them: not worth reading
    content = event.strip().removeprefix(b"data:").strip()
    found = parsed_json(content)
    error = found.get("error") if isinstance(found, Mapping) else None
    if first and error is not None:
        code = error.get("code") if isinstance(error, Mapping) else None
        status = code if isinstance(code, int) and 400 <= code < 600 else 502
        raise refusal_kind(status, content)(who, status, content, {"Content-Type": "application/json"})
    check_finished(found, who)
    return error is not None


def says_nothing(event: bytes) -> bool:
    """Whether an event is the opening of a chat or usage alone. vLLM writes the opening before it looks whether the
    engine's request has failed, at once with what says so."""
    found = parsed_json(event.strip().removeprefix(b"data:").strip())
    choices = found.get("choices") if isinstance(found, Mapping) else None
    return isinstance(choices, list) and all(map(_opens, choices))


def _opens(choice: object) -> bool:
    delta = choice.get("delta") if isinstance(choice, Mapping) and choice.get("finish_reason") is None else None
    return isinstance(delta, Mapping) and "role" in delta and not any(delta[key] for key in delta if key != "role")


class Passage:
    """What of a decode instance's stream goes to the client, event by event.

    What says nothing yet is held until something does: until then a failure can become a status, and another instance
    can be asked. Of a request that its engine aborts before the first token vLLM's stream has no more than the opening,
    usage and the end, and no word of the abort (`serving.py` of both kinds): so an end before a choice has a reason to
    be finished is no answer.
    """

    def __init__(self, who: str) -> None:
        self.ended = self.failed = False  # failed: an error's event has said so, behind others
        self.who, self._held, self._began, self._finished = who, b"", False, False

    def take(self, event: bytes) -> bytes:
        """What is to be passed on now; empty if nothing is.

        Raises:
            InstanceRefusal, Aborted, LegError: as `check_event`.
            Aborted: the end came too early.
        """
        self.failed |= check_event(event, not self._began, self.who)
        self._finished |= _FINISHED.search(event) is not None
        self.ended |= is_end(event)
        if self.ended and not (self._finished or self.failed):
            raise Aborted(502, f"{self.who} ended its stream before the answer had: it aborts the request; see its log")
        self._held += event_for_client(event, self.who)
        if not self._began and len(self._held) < _MOST_HELD and says_nothing(event):
            return b""
        passed, self._held, self._began = self._held, b"", True
        return passed


def parsed_json(content: bytes) -> Any:
    """What an instance said, None if it is not JSON."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def named(role: InstanceRole, response: aiohttp.ClientResponse) -> str:
    """Who answered, for messages."""
    return f"{role} instance {response.url.origin()}"


def passed_on(status: int, content: bytes, headers: Mapping[str, str], request_id: str = "") -> web.Response:
    """What an instance said, as it said it."""
    return web.Response(status=status, body=content, headers=_kept(headers, request_id))


def stream_for_client(headers: Mapping[str, str], request_id: str) -> web.StreamResponse:
    """The same of a stream, before its first event."""
    return web.StreamResponse(headers={**_kept(headers, request_id), "Cache-Control": "no-cache"})


def _kept(headers: Mapping[str, str], request_id: str) -> Headers:
    """Of an instance's headers its type, whole: of text without a charset clients guess one (`requests`: Latin-1).
    aiohttp reads more than it writes."""
    kind = headers.get("Content-Type", "")
    identity = {"X-Request-Id": request_id} if request_id else {}
    return {"Content-Type": kind if kind and kind.isascii() and kind.isprintable() else UNKNOWN_TYPE, **identity}


def refuse(request_id: str, status: int, message: str) -> web.Response:
    """The answer to a request that cannot be served."""
    logger.warning("request %.200r: %d: %s", request_id, status, message)
    return error_response(status, message, request_id)


def error_response(status: int, message: str, request_id: str = "") -> web.Response:
    """An error as the answer to a client; nothing is logged."""
    identity = {"X-Request-Id": request_id} if REQUEST_ID.fullmatch(request_id) else {}
    return web.json_response(error_object(status, message), status=status, headers=identity)


@asynccontextmanager
async def to_client(request: web.Request, silence: float) -> AsyncIterator[None]:
    """A client that has gone, or takes nothing for so many seconds, is a cancellation, not an error of the instance."""
    try:
        async with asyncio.timeout(silence):
            yield
    except TimeoutError as error:
        if request.transport is not None:
            request.transport.abort()  # to close it would wait until the client has taken what is on its way
        raise asyncio.CancelledError from error
    except ConnectionError as error:
        raise asyncio.CancelledError from error


async def not_here(request: web.Request) -> web.Response:
    """The answer to a path that is not handed over, or to a method that its path does not have."""
    status = 405 if request.path in {one.canonical for one in request.app.router.resources()} else 404
    said = (
        "POST /v1/completions and /v1/chat/completions are handed over; anything else an instance is asked itself, "
        "which then computes the whole prompt: nothing is handed over there (/v1/messages, /v1/responses, "
        "/inference/v1/generate), unless a gateway does so with kv_transfer_params"
    )
    return error_response(status, f"{request.method} {request.path:.200}: {said}")


def told_if_it_failed(task: asyncio.Task[Any]) -> None:
    """For a task that nobody waits for before the end."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("%s has ended", task.get_coro(), exc_info=error)


async def end(task: asyncio.Task[Any]) -> None:
    """Cancel a task if it runs, and wait until it has let go of its connection."""
    # Looked at, also where this is cancelled itself, so that asyncio does not report its error as forgotten.
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    task.cancel()
    await asyncio.wait({task})


async def read_to_its_end(prefill: asyncio.Task[Any], request_id: str) -> None:
    """The answer is complete; the prefill's is read to its end, so that it is not taken for an abort."""
    try:
        await prefill
    except (LegError, InstanceRefusal) as error:
        logger.warning("request %s: prefill, after the answer was sent: %s", request_id, error)
