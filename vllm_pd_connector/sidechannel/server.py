"""The prefill instance's end of the side channel: one thread, one ROUTER socket, the lease table.

The thread sleeps until a frame comes, a lease is due or another thread wakes it, so an idle
server costs nothing. It answers each frame where it stands; what is malformed gets a `Failure` that says why, what is
too large is cut off by zmq (see `net.sockets`), and nothing that a client sends ends the thread. Frames that wait to be
served are bounded per connection by zmq, and messages without end by `net.watch`; large replies that a slow client has
not taken yet are counted (`unsent`), and answered BUSY over the limit.

The scheduler's thread calls the public methods; a lock around the tables is all that the two share. What
concerns pushes alone is in `push_service`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING

import zmq
from zmq.auth.thread import ThreadAuthenticator

from vllm_pd_connector.bounded import Bounded
from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.protocol.lease import UNTOLD, End, Freed, Given, LeaseTable, Told
from vllm_pd_connector.protocol.verification import Verification
from vllm_pd_connector.protocol.wire import messages as m
from vllm_pd_connector.protocol.wire import push_messages as pm
from vllm_pd_connector.protocol.wire.fields import MAX_REPLY_FRAME, MAX_TEXT
from vllm_pd_connector.sidechannel.net.keys import ZAP_DOMAIN, Admission, Keys, proved_key
from vllm_pd_connector.sidechannel.net.sockets import bound_router, take
from vllm_pd_connector.sidechannel.net.watch import Watch
from vllm_pd_connector.sidechannel.push_service import PushService
from vllm_pd_connector.sidechannel.unsent import UnsentReplies
from vllm_pd_connector.sidechannel.worker_auth import refusal
from vllm_pd_connector.wake import Wake

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm_pd_connector.geometry.blocks import BlockTable
    from vllm_pd_connector.protocol.push.command_queue import Ticket

logger = logging.getLogger(__name__)

_LARGE = m.Manifests | m.FoundConversation  # whoever asks for these can do without, or ask again
_BATCH, _BATCH_S = 256, 0.05  # frames served, or seconds, before the leases are looked at again
_LONGEST_SLEEP_S = 3600.0
_LOG_EVERY_S = 10.0
_MAX_CLIENTS = 4096  # that are told when the instance ends
_GOODBYE_MS = 500


def _not_home(named: str | None, asker: object) -> str:
    return (
        f"home.server_key: {named or 'none'} there, the key of who asks is {asker or 'none'}: an instance can have "
        "its own blocks written into and no other's"
    )


class SideChannelServer:
    """Listens from construction until `close`; all methods may be called from any thread.

    Args:
        host, port: where to listen (IPv4, IPv6 or a name); port 0 takes a free one, see `port`.
        engine_id, incarnation: of the engine that it serves.
        clock: seconds, monotonic.
        verifies: this instance's workers make checksums of their caches for readers that ask.
        freed: called in the server's thread, perhaps more than once, when `take_freed` has something to give; after how
            many seconds it is to be called again if that was not taken, 0.0: when something else happens.
        lease_limit_s: the longest life of a lease.
        keys: talk only to clients with a key in their directory, and encrypt; None: to everybody.

    Raises:
        InvalidConfig: the address cannot be bound.
    """

    def __init__(
        self,
        host: str,
        port: int,
        engine_id: str,
        incarnation: str,
        clock: Callable[[], float] = time.monotonic,
        keys: Keys | None = None,
        verifies: bool = False,
        freed: Callable[[], float] = lambda: 0.0,
        lease_limit_s: float = math.inf,
    ) -> None:
        self._engine_id = engine_id
        self._incarnation = incarnation
        self._clock = clock
        self._lock = threading.Lock()
        self._leases = LeaseTable(lease_limit_s)
        self._wake = Wake()
        self.pushes = PushService(self._leases, self._lock, self._changed, clock)
        self._freed: list[Freed] = []
        self._news = False
        self._manifests: m.Manifests | None = None
        self._tokens: tuple[bytes, ...] = ()
        self._verifies = verifies
        self._keyed = keys is not None
        self._tell_freed = freed
        self._tell_at = math.inf
        self._verification: Verification[Ticket] = Verification(0)
        self._counts: Counter[str] = Counter()
        self._due: list[tuple[Ticket, m.Reply]] = []  # to others than the client that is being answered
        self._unsent = UnsentReplies()
        self._log_at = -math.inf
        self._closing = False
        self._clients: Bounded[bytes, None] = Bounded(_MAX_CLIENTS)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._watch = Watch(self._context)
        self._authenticator: ThreadAuthenticator | None = None
        try:
            if keys is not None:
                self._authenticator = ThreadAuthenticator(self._context, log=logger)
                self._authenticator.start()
                self._authenticator.configure_curve_callback(ZAP_DOMAIN, Admission(keys))
            self._router = bound_router(self._context, host, port, self._watch, keys)
        except BaseException:
            self._stop_authenticator()
            self._watch.close()
            self._context.term()
            self._wake.close()
            raise
        self.port = int(self._router.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._thread = threading.Thread(target=self._run, name="pd-side-channel", daemon=True)
        self._thread.start()

    def set_manifests(self, manifests: Sequence[bytes], tokens: Sequence[bytes] = ()) -> None:
        """Serve these encoded manifests, one per worker, from now on; until then clients are told NOT_READY. `tokens`
        are the workers' secrets, in the same order: without them no checksums are taken from anybody.

        Raises:
            ProtocolError: they do not fit one reply.
        """
        message = m.Manifests(self._engine_id, self._incarnation, tuple(manifests))
        try:
            m.encode(0, message)
        except ProtocolError as error:
            raise ProtocolError(
                f"the manifests of {len(manifests)} workers take {sum(map(len, manifests))} bytes, the limit of one "
                f"reply is {MAX_REPLY_FRAME}: serve the model as several instances with fewer workers each"
            ) from error
        with self._lock:
            self._manifests, self._tokens = message, tuple(tokens)
            self._verification.workers = len(manifests)

    def hold(
        self, request_id: str, nonce: bytes, duration: float, tables: Sequence[BlockTable] = (), told: Told = UNTOLD
    ) -> None:
        """Keep a finished request's blocks for `duration` seconds, and again from each renewal; `tables` are needed for
        checksums, `told` is a name and what is answered to who asks for it."""
        with self._lock:
            self._leases.hold(request_id, nonce, self._clock(), duration, tuple(tables), *told)
        self._changed()

    def drop(self, request_id: str) -> None:
        """End a lease from this side; it comes out of `take_freed` like any other."""
        with self._lock:
            self._leases.drop(request_id, self._clock())
        self._changed()

    def drop_all(self, reason: End) -> None:
        """End all leases from this side, for one reason that their readers are told."""
        with self._lock:
            self._leases.drop_all(self._clock(), reason)
        self._changed()

    def _changed(self) -> None:
        """Something was told here: what comes of it is to be looked at, by the thread too."""
        self._news = True
        self._wake.set()

    def has_news(self) -> bool:
        """Whether something may have ended or been given since the last call that said so. For each engine step: it
        waits for nobody."""
        if not self._news:
            return False
        self._news = False  # before its caller looks: what is news from now on is said the next time
        return True

    def take_freed(self) -> list[Freed]:
        """(request id, reason) of the leases that have ended since the last call; each exactly once, and not before
        the last write from its blocks has ended."""
        with self._lock:
            freed, self._freed = self._freed + self.pushes.settle(self._clock()), []
            self._due += self.pushes.take_replies()
            answers = bool(self._due)
        if answers:  # an engine asks in each step: nothing is woken for nothing
            self._wake.set()
        return freed

    def take_given(self) -> list[Given]:
        """See `LeaseTable.take_given`; asked after `take_freed`, it has all that the requests of that answer gave."""
        with self._lock:
            return self._leases.take_given()

    def counts(self) -> dict[str, int]:
        """How many requests were served, by message name, and how many failed, by "failure:" and its code."""
        with self._lock:
            return dict(self._counts)

    def close(self) -> None:
        """Refuse what is still asked for, tell every client that this instance leaves, and join the thread.

        Leases that are still held are dropped. May be called twice.
        """
        self._closing = True
        self._wake.set()
        self._thread.join()
        self._wake.close()
        self._stop_authenticator()
        self._watch.close()
        self._context.term()

    def _stop_authenticator(self) -> None:
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake.fileno(), zmq.POLLIN)
        while not self._closing:
            try:
                ready = dict(poller.poll(self._sleep_ms()))
                self._wake.clear()
                if self._router in ready:
                    self._serve_batch()
                with self._lock:
                    self.pushes.tick(self._clock())
                    self._freed += self.pushes.settle(self._clock())
                    answers, self._due = self._due + self.pushes.take_replies(), []
                    freed, self._news = bool(self._freed), True
                again = self._tell_freed() if freed else 0.0
                self._tell_at = self._clock() + again if again else math.inf
                for (client, seq), reply in answers:
                    self._send(client, seq, reply)
            except Exception as error:  # the thread outlives whatever this was; the pause keeps it from spinning
                self._log(f"side channel: unexpected {type(error).__name__}: {error}")
                time.sleep(0.1)
        self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._leases.drop_all(self._clock())
        for client in self._clients:
            self._send(client, 0, m.Failure(m.FailureCode.LEAVING, "the prefill instance is shutting down"))
        self._router.close(linger=_GOODBYE_MS)

    def _sleep_ms(self) -> int:
        with self._lock:
            moments = [self._leases.next_deadline(), self.pushes.next_deadline(), self._tell_at]
        deadline = min(moment for moment in moments if moment is not None)
        return max(0, math.ceil(min(_LONGEST_SLEEP_S, deadline - self._clock()) * 1000))

    def _serve_batch(self) -> None:
        until = time.monotonic() + _BATCH_S
        for _ in range(_BATCH):
            try:
                first, *frames = take(self._router, drain=True)
            except zmq.Again:
                return
            self._watch.took(frames[-1] if frames else first)
            client, parts = first.bytes, [frame.bytes for frame in frames]
            self._clients[client] = None
            seq = m.sequence_of(parts[0]) if parts else 0
            asker = proved_key(frames[-1]) if self._keyed and frames else None
            reply = self._answer(parts, (client, seq), asker)
            if reply is not None:
                self._send(client, seq, reply)
            if time.monotonic() >= until:  # leases and orders come first then
                return

    def _answer(self, parts: list[bytes], ticket: Ticket, asker: object) -> m.Reply | None:
        """The reply, or None if it comes later. `asker` is the client's key, None without keys."""
        try:
            if len(parts) != 1:
                raise ProtocolError(f"message parts: {len(parts)} or more there, 1 here; use a DEALER socket")
            _, request = m.decode_request(parts[0])
            if isinstance(request, pm.PushInto) and request.home.server_key != asker:
                return pm.Pushed(pm.PushState.FAILED, _not_home(request.home.server_key, asker), True)
            with self._lock:
                self._counts[type(request).__name__] += 1
                self._news = True
                return self._serve(request, ticket)
        except m.VersionMismatch as error:
            return self._failure(m.FailureCode.VERSION, str(error))
        except ProtocolError as error:
            return self._failure(m.FailureCode.MALFORMED, str(error))
        except Exception as error:  # a defect of ours must not take the other requests with it
            logger.exception("side channel: a request failed")
            return self._failure(m.FailureCode.INTERNAL, f"{type(error).__name__}: {error}")

    def _verify(self, request: m.GetChecksums | m.NextChecksumJob | m.JobChecksums, ticket: Ticket) -> m.Reply | None:
        """The reply to this request, if it is due; those to others that become due are sent after it."""
        answers: list[tuple[Ticket, m.Reply]] = []
        if (
            isinstance(request, m.NextChecksumJob | m.JobChecksums)
            and (failure := refusal(request, self._tokens)) is not None
        ):
            return failure
        match request:
            case m.NextChecksumJob():
                answers = self._verification.next_job(ticket, request.worker)
            case m.JobChecksums():
                answers = self._verification.add(ticket, request)
            case m.GetChecksums():
                tables = self._leases.tables_of(request.lease, self._clock())
                if not self._verifies:
                    text = "verify is off on the prefill instance: set it there too, or switch it off here"
                    return m.Failure(m.FailureCode.NOT_OFFERED, text)
                if tables is None:
                    return m.Failure(m.FailureCode.NOT_OFFERED, "the lease is not held any more")
                answers = self._verification.ask(ticket, request, tables)
        self._due += [(other, reply) for other, reply in answers if other != ticket]
        return dict(answers).get(ticket)

    def _serve(self, request: m.Request, ticket: Ticket) -> m.Reply | None:
        now = self._clock()
        match request:
            case m.GetManifests(engine_id):
                return self._describe(engine_id)
            case m.Describe():
                return self._describe(self._engine_id)
            case m.Renew(leases):
                return m.Renewed(tuple(self._leases.renew(leases, now)))
            case m.ReadDone():
                return self._leases.read_done(request, now)
            case m.Release(leases):
                self._leases.release(leases, now)
                return m.Released()
            case m.GetChecksums() | m.NextChecksumJob() | m.JobChecksums():
                return self._verify(request, ticket)
            case m.FindConversation(name):
                return m.FoundConversation(self._leases.answer_of(name, now))
            case m.GetLeaseCount():
                self._leases.tick(now)
                return m.LeaseCount(self._leases.awaited())
            case pm.PushInto() | pm.WithdrawPush() if request.incarnation not in ("", self._incarnation):
                return m.Failure(
                    m.FailureCode.FOREIGN_ENGINE,
                    f"incarnation: {request.incarnation} asked for, {self._incarnation} here; the prefill instance at "
                    "this address was restarted or replaced, and what its former workers do is not known here",
                )
            case (
                pm.PushInto()
                | pm.WithdrawPush()
                | pm.DeclinePush()
                | pm.KeepPrefills()
                | pm.AwaitCommands()
                | pm.PushEnded()
            ):
                return self.pushes.serve(request, ticket, now)

    def _describe(self, engine_id: str) -> m.Reply:
        if engine_id != self._engine_id:
            return m.Failure(
                m.FailureCode.FOREIGN_ENGINE,
                f"engine_id: {engine_id!r} asked for, {self._engine_id!r} here; the instance at this address was "
                "replaced, two instances share it, or it leads back to the host of who asks (side_channel_host)",
            )
        if self._manifests is None:
            return m.Failure(
                m.FailureCode.NOT_READY, "the prefill instance's workers have not described themselves yet"
            )
        return self._manifests

    def _failure(self, code: m.FailureCode, message: str) -> m.Failure:
        self._log(f"side channel: refused a request ({code}): {message}")
        return m.Failure(code, message[:MAX_TEXT])

    def _send(self, client: bytes, seq: int, reply: m.Reply) -> None:
        try:
            frame = m.encode(seq, reply)
            if isinstance(reply, _LARGE) and not self._unsent.has_room(client):
                reply = m.Failure(m.FailureCode.BUSY, "earlier replies were not taken yet; ask again later")
                frame = m.encode(seq, reply)
        except Exception as error:  # this client's answer alone is lost, and it is told so
            reply = self._failure(m.FailureCode.INTERNAL, f"{type(error).__name__}: {error}")
            frame = m.encode(seq, reply)
        if isinstance(reply, m.Failure):
            with self._lock:
                self._counts[f"failure:{reply.code}"] += 1
        try:
            tracker = self._router.send_multipart([client, frame], zmq.NOBLOCK, copy=False, track=True)
        except zmq.ZMQError:  # the client has gone or reads nothing; it will ask again if it lives
            return
        self._unsent.add(client, len(frame), tracker)

    def _log(self, message: str) -> None:
        now = time.monotonic()
        if now - self._log_at >= _LOG_EVERY_S:
            self._log_at = now
            logger.warning("%s (further messages of this kind are silent for %g s)", message, _LOG_EVERY_S)
