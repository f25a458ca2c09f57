"""NIXL agents: how one is started with the memory that it moves, and how one ends.

Registering the memory of a device with RDMA devices takes seconds, and so does giving it back. Both release the GIL, so
what is not needed at the start runs in a thread of its own: transfers of the other agents go on meanwhile.
"""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_pd_connector.errors import PeerLost, TransferError
from vllm_pd_connector.transport.nixl.bindings import NixlOptions, backend_parameters, bindings, net_devices, translate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vllm_pd_connector.transport.ranges import Ranges

logger = logging.getLogger(__name__)

# A call returns within milliseconds: so long it waits for a thread that may have little to do.
_WAIT_S = 0.005
_GLANCE_S = 0.0005


@dataclass(eq=False, slots=True)
class Agent:
    """An agent of ours: the library's object, what is registered with it, and how often each peer is connected. The
    library forgets a peer at a disconnect: those are `lost` until they are met again."""

    name: str
    library: Any
    registered: list[Any] = field(default_factory=list)
    peers: Counter[str] = field(default_factory=Counter)
    lost: set[str] = field(default_factory=set)


class Library:
    """NIXL's bindings, and agents with one set of options. `prepare_thread` is called first in every thread that this
    starts (a thread that registers device memory makes its device current).

    Raises:
        InvalidConfig: NIXL is not installed.
    """

    def __init__(self, options: NixlOptions, prepare_thread: Callable[[], None] = lambda: None) -> None:
        self.options = options
        self.nixl = bindings()
        self.errors = tuple(
            kind
            for kind in vars(self.nixl).values()
            if isinstance(kind, type) and issubclass(kind, Exception) and kind is not Exception
        )
        self._prepare_thread = prepare_thread
        self._ending: list[threading.Thread] = []
        self._unended: list[Callable[[], None]] = []
        self._meeting: Meeting | None = None
        self._warned = False

    def start(self, *, threaded: bool) -> Agent:
        """An agent with no memory. `threaded`: it has a progress thread, which options may give to all.

        Raises:
            TransferError: NIXL cannot start its backend.
        """
        name = f"pd-{uuid.uuid4().hex}"
        config = self.nixl.nixlAgentConfig()
        config.useProgThread = threaded or self.options.progress_thread
        config.syncMode = self.nixl.NIXL_THREAD_SYNC_STRICT
        config.pthrDelay = self.options.progress_interval_us
        with self.translated(f"starting NIXL with backend {self.options.backend}"):
            agent = self.nixl.nixlAgent(name, config)
            agent.createBackend(self.options.backend, backend_parameters(self.options, os.environ))
        return Agent(name, agent)

    def register(self, agent: Agent, ranges: Ranges) -> None:
        """Register memory with an agent.

        Raises:
            TransferError: the library refuses it.
        """
        for kind, cuda in ((self.nixl.DRAM_SEG, False), (self.nixl.VRAM_SEG, True)):
            index = np.flatnonzero(ranges.cuda == cuda)
            columns = (ranges.start[index], (ranges.stop - ranges.start)[index], ranges.device[index])
            described = [(*row, b"") for row in zip(*(column.tolist() for column in columns), strict=True)]
            if described:
                self._warn(cuda)
                hint = " (RDMA devices reach it with the kernel module nvidia-peermem or with DMA-BUF)" if cuda else ""
                what = f"registering {len(described)} segments of {'cuda' if cuda else 'cpu'} memory{hint}"
                with self.translated(what):
                    descriptors = self.nixl.nixlRegDList(kind, described)
                    agent.library.registerMem(descriptors, [])
                agent.registered.append(descriptors)

    def _warn(self, cuda: bool) -> None:
        """NIXL's thread of an agent that posts was seen to end in cuEventQuery (nixl#2102)."""
        if cuda and self.options.progress_thread and self.options.backend == "UCX" and not self._warned:
            self._warned = True
            logger.warning(
                "transport_options.progress_thread is true with backend UCX and caches on a GPU: NIXL's thread may end "
                "the process (SIGSEGV in cuEventQuery), and UCX needs none; leave it out"
            )

    def meet(self, agent: Agent, name: str, metadata: bytes) -> bool:
        """Begin to `load` an agent's first peer in a thread of its own; whether `load` is due. Later ones take 1 ms,
        and transfers may run by then, which would wait for that thread."""
        if self._meeting is None:
            if agent.peers:
                return True
            try:
                self._meeting = Meeting(agent, name, metadata, self._load_aside)
            except RuntimeError as error:
                logger.warning("agent %s is met in the transfer thread: %s", name, error)
                return True
        if not self._meeting.over():
            return bool(agent.peers)
        if not self._meeting.of(agent, name, metadata):
            self._part()
        return True

    def join(self, agent: Agent, name: str, metadata: bytes) -> None:
        """Have an agent know a peer, if it does not yet or lost it since, and count the connection.

        Raises:
            TransferError: the library does not take it, or `metadata` is another's.
        """
        if not agent.peers[name] or name in agent.lost:
            try:
                self.load(agent, name, metadata)
            except self.errors as error:
                if not agent.peers[name]:
                    self._forget(agent, name)
                raise TransferError(
                    f"adding agent {name}: {error}; its process ended, it cannot be reached from here, or the two "
                    f"sides run different versions of NIXL or different UCX settings{self._interfaces()}",
                    retryable=isinstance(error, self.nixl.nixlBackendError),
                ) from error
            agent.lost.discard(name)
        agent.peers[name] += 1

    def _interfaces(self) -> str:
        """Where nobody says which interfaces to take, UCX takes a bridge of containers for a way, too."""
        if self.options.backend != "UCX" or net_devices(self.options, os.environ):
            return ""
        return (
            ". UCX_NET_DEVICES is not set: UCX may have taken an interface that does not lead there, as docker0; "
            "set it on both sides to the interface of side_channel_host"
        )

    def leave(self, agent: Agent, name: str) -> None:
        """Count a connection out; with the last of a peer's the agent forgets it."""
        agent.peers[name] -= 1
        if agent.peers[name] <= 0:
            self._forget(agent, name)

    def _forget(self, agent: Agent, name: str) -> None:
        del agent.peers[name]
        agent.lost.discard(name)
        try:
            agent.library.invalidateRemoteMD(name)
        except self.errors as error:
            logger.debug("NIXL forgot agent %s before: %s", name, error)

    def load(self, agent: Agent, name: str, metadata: bytes) -> None:
        """Have an agent know a peer; what the library does not take it says by one of `errors`.

        Raises:
            TransferError: these are the metadata of another agent than `name`, which may be a peer's own.
        """
        meeting = self._meeting
        if meeting is None or not meeting.of(agent, name, metadata):
            return self._load(agent, name, metadata)
        self._meeting = None
        meeting.end()

    def _load(self, agent: Agent, name: str, metadata: bytes) -> None:
        if other := next((one for one in agent.peers if one != name and one.encode() in metadata), ""):
            raise TransferError(f"endpoint says agent {name}, its metadata {other}, which is connected")
        loaded = agent.library.loadRemoteMD(metadata)
        if loaded != name.encode():
            agent.library.invalidateRemoteMD(loaded.decode(errors="replace"))
            raise TransferError(f"endpoint says agent {name}, its metadata {loaded!r}; fetch the manifest again")

    def _load_aside(self, agent: Agent, name: str, metadata: bytes) -> None:
        self._prepare_thread()
        self._load(agent, name, metadata)

    def _part(self) -> None:
        """Forget whom an agent has met, and was not connected to since."""
        meeting, self._meeting = self._meeting, None
        if meeting is None:
            return
        try:
            meeting.end()
            if not meeting.agent.peers[meeting.name] and meeting.agent.library is not None:
                meeting.agent.library.invalidateRemoteMD(meeting.name)
        except Exception as error:  # whatever it is: nobody waits for this peer any more, and others do for theirs
            logger.debug("agent %s was met in vain: %s", meeting.name, error)

    def prepare(self, ranges: Ranges) -> Preparation:
        """Start an agent without a progress thread and register memory with it, in a thread of its own.

        Raises:
            TransferError: no thread is left; retryable.
        """

        def make() -> Agent:
            self._prepare_thread()
            agent = self.start(threaded=False)
            self.register(agent, ranges)
            return agent

        return Preparation(make)

    def end_in_background(self, agent: Agent) -> None:
        """End an agent that runs nothing any more. Its memory is given back first: the library's destructor, which does
        that too, keeps the GIL. Where no thread is left for it, the agent ends with `close`."""
        library, agent.library = agent.library, None
        registered = agent.registered

        def end() -> None:
            nonlocal library
            try:
                self._prepare_thread()
                for descriptors in registered:
                    library.deregisterMem(descriptors, [])
            except Exception as error:  # its end, which `close` may wait for, gives it back too
                logger.warning("NIXL does not give memory back: %s", error)
            library = None

        thread = threading.Thread(target=end, name="pd-nixl-end", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            logger.warning("NIXL agent %s ends with the transport: %s", agent.name, error)
            self._unended.append(end)
            return
        self._ending = [*(one for one in self._ending if one.is_alive()), thread]

    def close(self) -> None:
        """Wait for the agents that are ending, and end those that wait for it."""
        self._part()
        for thread in self._ending:
            thread.join()
        while self._unended:
            self._unended.pop()()

    @contextmanager
    def translated(self, action: str) -> Iterator[None]:
        """Raise the library's exceptions as ours; for calls that move nothing."""
        try:
            yield
        except self.errors as error:
            raise ours(error, action) from error


class Meeting:
    """A peer that an agent is made to know in a thread of its own. For the first connection of a kind UCX asks a TCP
    interface some hundred times what it can, which takes 10 ms (UCX 1.23, `uct_tcp_iface_query`, seen by strace).

    Raises:
        RuntimeError: no thread is left.
    """

    def __init__(self, agent: Agent, name: str, metadata: bytes, load: Callable[[Agent, str, bytes], None]) -> None:
        self.agent, self.name, self._metadata = agent, name, metadata
        self._error: Exception | None = None

        def run() -> None:
            try:
                load(agent, name, metadata)
            except Exception as error:
                self._error = error

        self._thread = threading.Thread(target=run, name="pd-nixl-meet", daemon=True)
        self._thread.start()

    def of(self, agent: Agent, name: str, metadata: bytes) -> bool:
        """Whether it is this agent's with that peer."""
        return self.agent is agent and self.name == name and self._metadata == metadata

    def over(self) -> bool:
        """Whether it has ended; waits for a moment."""
        self._thread.join(_GLANCE_S)
        return not self._thread.is_alive()

    def end(self) -> None:
        """Wait for it. Raises what it met with."""
        self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error


class Preparation:
    """An agent that is being made.

    Raises:
        TransferError: no thread is left to make it in; retryable.
    """

    def __init__(self, make: Callable[[], Agent]) -> None:
        self._made: Agent | Exception | None = None

        def run() -> None:
            try:
                self._made = make()
            except Exception as error:
                self._made = error

        self._thread = threading.Thread(target=run, name="pd-nixl-agent", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            raise TransferError(f"another NIXL agent cannot be made now: {error}", retryable=True) from error

    def agent(self) -> Agent | None:
        """The agent; None while it is not ready.

        Raises:
            TransferError: it could not be made.
        """
        self._thread.join(_WAIT_S)
        if isinstance(self._made, TransferError):
            raise self._made
        if isinstance(self._made, Exception):
            raise TransferError(f"another NIXL agent could not be made: {self._made}") from self._made
        return self._made

    def close(self) -> None:
        """Wait for its end, and end what was made."""
        self._thread.join()
        self._made = None


def ours(error: Exception, action: str, *, started: bool = False) -> TransferError:
    """The library's exception as ours. `started`: bytes may be moving when it comes."""
    made = translate(type(error).__name__, f"{action}: {error}", started)
    made.__cause__ = error.with_traceback(None)  # its frames hold the library's agent, which `close` must end
    return made


def may_arrive(lost: TransferError) -> PeerLost:
    """The outcome of a write that ran when its peer was lost. The process there may live (a packet filter's reset, one
    of several networks that broke), and over TCP the kernel here sends for minutes what a closed connection held.
    Whether TCP was among the ways UCX does not say."""
    reason = f"{lost}; what was written may still arrive there until one of the two processes ends"
    return PeerLost(reason, terminal=False)


def unexpected(error: Exception, name: str) -> TransferError:
    """What is no failure of the library's, out of a call that may have begun something."""
    logger.error("a transfer with agent %s", name, exc_info=error)
    return TransferError(f"unexpected {type(error).__name__}: {error}", terminal=False)
