"""A peer: examples of each rule, and any order of events with a driver that does what the actions say."""

from __future__ import annotations

from math import inf

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vllm_pd_connector.protocol import peer as p

KEY = p.PeerKey("10.0.0.1", 5600, "ab" * 16)
OTHER = "cd" * 16
BACKOFF = p.Backoff(base_s=1.0, cap_s=8.0, max_failures=3)


def make() -> p.Peer:
    return p.Peer(KEY, lambda: 0.0, BACKOFF)


def ready() -> p.Peer:
    peer = make()
    assert peer.handle(p.Wanted("r0"), 0.0) == [p.FetchManifests(1)]
    assert peer.handle(p.ManifestsArrived(1, KEY.incarnation), 0.0) == [p.Connect()]
    assert peer.handle(p.Connected(), 0.0) == [p.StartRequests(("r0",))]
    assert peer.state is p.PeerState.READY
    return peer


def test_requests_wait_for_one_handshake_and_start_in_order():
    peer = make()
    assert peer.handle(p.Wanted("a"), 0.0) == [p.FetchManifests(1)]
    assert peer.handle(p.Wanted("b"), 0.0) == []
    assert peer.handle(p.Wanted("c"), 0.0) == []
    assert peer.handle(p.Unwanted("b"), 0.0) == []
    assert peer.handle(p.ManifestsArrived(1, KEY.incarnation), 0.0) == [p.Connect()]
    assert peer.handle(p.Connected(), 0.0) == [p.StartRequests(("a", "c"))]
    assert peer.handle(p.Wanted("d"), 1.0) == [p.StartRequests(("d",))]


def test_a_refusal_is_remembered_with_its_text():
    peer = make()
    peer.handle(p.Wanted("a"), 0.0)
    peer.handle(p.ManifestsArrived(1, KEY.incarnation), 0.0)
    assert peer.handle(p.Refused("kv_cache_dtype: fp8 here"), 0.0) == [
        p.FailRequests(("a",), "kv_cache_dtype: fp8 here")
    ]
    assert peer.state is p.PeerState.REFUSED
    assert peer.handle(p.Wanted("b"), 1e9) == [p.FailRequests(("b",), "kv_cache_dtype: fp8 here")]


def test_another_incarnation_means_that_the_peer_is_gone_for_ever():
    peer = make()
    peer.handle(p.Wanted("a"), 0.0)
    [failed] = peer.handle(p.ManifestsArrived(1, OTHER), 0.0)
    assert failed.request_ids == ("a",) and "restarted" in failed.reason
    assert peer.state is p.PeerState.DEAD
    assert isinstance(peer.handle(p.Wanted("b"), 1e9)[0], p.FailRequests)


def test_without_an_incarnation_the_life_that_answers_after_the_last_one_is_meant():
    peer = p.Peer(p.PeerKey("10.0.0.1", 5600, ""), lambda: 0.0, BACKOFF)
    for attempt, incarnation in enumerate((KEY.incarnation, OTHER), start=1):
        assert peer.handle(p.Wanted("a"), 10.0 * attempt) == [p.FetchManifests(attempt)]
        assert peer.handle(p.ManifestsArrived(attempt, incarnation), 10.0 * attempt) == [p.Connect()]
        assert peer.handle(p.Connected(), 10.0 * attempt) == [p.StartRequests(("a",))]
        assert peer.key.incarnation == incarnation
        assert peer.handle(p.Dismissed("it ends"), 10.0 * attempt) == [p.Disconnect("it ends")]


def test_attempts_back_off_and_end_in_an_error_that_later_requests_get_at_once():
    peer = make()
    assert peer.handle(p.Wanted("a"), 0.0) == [p.FetchManifests(1)]
    assert peer.handle(p.FetchFailed(1, "no reply"), 1.0) == []
    assert peer.next_deadline() == 1.5
    assert peer.handle(p.PeerTick(), 1.4) == []
    assert peer.handle(p.PeerTick(), 1.5) == [p.FetchManifests(2)]
    assert peer.handle(p.FetchFailed(2, "no reply"), 2.0) == []
    assert peer.next_deadline() == 3.0
    assert peer.handle(p.PeerTick(), 3.0) == [p.FetchManifests(3)]
    (failed,) = peer.handle(p.FetchFailed(3, "no reply"), 4.0)
    assert failed.request_ids == ("a",) and "3 attempts" in failed.reason and "no reply" in failed.reason
    assert peer.handle(p.Wanted("b"), 4.1) == [p.FailRequests(("b",), failed.reason)]
    # After the back-off one attempt decides.
    assert peer.handle(p.Wanted("c"), 6.0) == [p.FetchManifests(4)]
    assert isinstance(peer.handle(p.FetchFailed(4, "no reply"), 6.0)[0], p.FailRequests)
    assert peer.state is p.PeerState.DEAD


def test_that_there_was_no_room_to_ask_ends_no_peer():
    peer = make()
    peer.handle(p.Wanted("a"), 0.0)
    peer.handle(p.ManifestsArrived(1, KEY.incarnation), 0.0)
    peer.handle(p.Connected(), 0.0)
    assert peer.handle(p.Suspected("silence"), 0.0) == [p.FetchManifests(2)]
    for attempt in range(2, 20):
        assert peer.handle(p.FetchFailed(attempt, "no socket is left", here=True), float(attempt)) == []
        assert peer.handle(p.PeerTick(), attempt + 0.5) == [p.FetchManifests(attempt + 1)]
    assert peer.state is p.PeerState.SUSPECT


def test_nor_does_it_fail_who_wants_one_that_could_not_be_reached_before():
    peer = make()
    for attempt in (1, 2, 3):
        peer.handle(p.Wanted("a") if attempt == 1 else p.PeerTick(), 100.0 * attempt)
        peer.handle(p.FetchFailed(attempt, "no reply"), 100.0 * attempt)
    assert peer.state is p.PeerState.DEAD
    assert peer.handle(p.Wanted("b"), 400.0) == [p.FetchManifests(4)]
    assert peer.handle(p.FetchFailed(4, "no socket is left", here=True), 400.0) == []
    assert peer.handle(p.PeerTick(), 500.0) == [p.FetchManifests(5)]


def test_a_late_answer_to_an_earlier_attempt_changes_nothing():
    peer = make()
    peer.handle(p.Wanted("a"), 0.0)
    peer.handle(p.FetchFailed(1, "no reply"), 0.0)
    assert peer.handle(p.ManifestsArrived(1, KEY.incarnation), 0.1) == []
    assert peer.handle(p.FetchFailed(1, "no reply"), 0.1) == []
    assert peer.next_deadline() == 0.5


def test_a_suspicion_is_settled_by_a_probe_and_new_requests_wait_for_it():
    peer = ready()
    assert peer.handle(p.Suspected("verdict timed out"), 5.0) == [p.FetchManifests(2)]
    assert peer.handle(p.Wanted("a"), 5.0) == []
    assert peer.handle(p.ManifestsArrived(2, KEY.incarnation), 5.1) == [p.StartRequests(("a",))]
    assert peer.state is p.PeerState.READY


def test_a_connection_that_took_all_the_time_that_requests_have_fails_them_at_once():
    machine = make()
    assert machine.handle(p.Wanted("a"), 0.0) == [p.FetchManifests(1)]
    assert machine.handle(p.ManifestsArrived(1, machine.key.incarnation), 0.0) == [p.Connect()]
    [failed] = machine.handle(p.ConnectFailed("rank 7", late=True), 30.0)
    assert failed.request_ids == ("a",) and "answers and cannot be connected to: rank 7" in failed.reason
    assert machine.state is p.PeerState.DEAD and not machine.over
    assert isinstance(machine.handle(p.Wanted("b"), 30.0)[0], p.FailRequests), "the back-off has not passed"
    assert machine.handle(p.Wanted("c"), 60.0) == [p.FetchManifests(2)]


def test_a_suspicion_that_is_confirmed_disconnects():
    peer = ready()
    assert peer.handle(p.Suspected("verdict timed out"), 5.0) == [p.FetchManifests(2)]
    (disconnect,) = peer.handle(p.ManifestsArrived(2, OTHER), 5.1)
    assert isinstance(disconnect, p.Disconnect) and "restarted" in disconnect.reason
    assert peer.state is p.PeerState.DEAD


def test_a_lost_transport_is_disconnected_and_made_anew_only_for_someone():
    peer = ready()
    assert peer.handle(p.Lost("reset"), 5.0) == [p.Disconnect("reset")]
    assert peer.next_deadline() is None
    assert peer.handle(p.Wanted("a"), 9.0) == [p.FetchManifests(2)]
    assert peer.handle(p.ManifestsArrived(2, KEY.incarnation), 9.0) == [p.Connect()]


def test_requests_that_wait_for_a_probe_fail_before_the_transport_goes():
    peer = ready()
    peer.handle(p.Suspected("verdict timed out"), 5.0)
    peer.handle(p.Wanted("a"), 5.0)
    failed, disconnect = peer.handle(p.ManifestsArrived(2, OTHER), 5.1)
    assert isinstance(failed, p.FailRequests) and failed.request_ids == ("a",)
    assert isinstance(disconnect, p.Disconnect)


def test_requests_that_wait_for_a_probe_outlive_a_lost_transport():
    peer = ready()
    peer.handle(p.Suspected("verdict timed out"), 5.0)
    peer.handle(p.Wanted("a"), 5.0)
    assert peer.handle(p.Lost("reset"), 5.0) == [p.Disconnect("reset")]
    assert peer.handle(p.ManifestsArrived(2, KEY.incarnation), 5.1) == [p.Connect()]
    assert peer.handle(p.Connected(), 5.1) == [p.StartRequests(("a",))]


def test_a_dismissed_peer_can_be_had_again():
    peer = ready()
    assert peer.handle(p.Dismissed("idle"), 5.0) == [p.Disconnect("idle")]
    assert peer.handle(p.Wanted("a"), 5.0) == [p.FetchManifests(2)]


def test_a_refusal_stands_for_ever_and_is_outdated_for_those_who_mean_anybody():
    peer = make()
    peer.handle(p.Wanted("a"), 0.0)
    peer.handle(p.ManifestsArrived(1, KEY.incarnation), 0.0)
    peer.handle(p.Refused("dtype"), 5.0)
    assert not peer.outdated(5.0 + p.REFUSAL_S - 0.1) and peer.outdated(5.0 + p.REFUSAL_S)
    assert isinstance(peer.handle(p.Wanted("b"), 1e9)[0], p.FailRequests)


def test_a_peer_that_is_unreachable_is_disconnected_once():
    peer = ready()
    peer.handle(p.Suspected("no verdict"), 5.0)
    actions = []
    for attempt in range(2, 2 + BACKOFF.max_failures):
        actions += peer.handle(p.FetchFailed(attempt, "no reply"), 100.0 * attempt)
        peer.handle(p.PeerTick(), 100.0 * attempt + 50)
    assert [type(action) for action in actions] == [p.Disconnect] and peer.state is p.PeerState.DEAD
    assert peer.handle(p.Replaced("another answers"), 1e4) == [] and peer.over
    assert peer.handle(p.Replaced("another answers"), 1e4) == []


def test_the_back_off_is_capped_and_spread():
    for failures in range(1, 2000):
        low, high = BACKOFF.delay(failures, 0.0), BACKOFF.delay(failures, 0.999)
        assert 0.5 <= low < high <= 8.0
    assert BACKOFF.delay(1000, 0.5) == 6.0


class Peers(RuleBasedStateMachine):
    """The driver: knows which requests wait, whether the transport is connected and which fetch is under way."""

    @initialize(random=st.floats(0, 1, exclude_max=True))
    def start(self, random):
        self.peer = p.Peer(KEY, lambda: random, BACKOFF)
        self.now = 0.0
        self.waiting: set[str] = set()
        self.connected = False
        self.connect_asked = False
        self.fetch: int | None = None
        self.fetches = self.count = 0
        self.final: p.PeerState | None = None

    def tell(self, event):
        asked, self.connect_asked = self.connect_asked, False
        for action in self.peer.handle(event, self.now):
            match action:
                case p.FetchManifests(attempt):
                    assert self.fetch is None and attempt == self.fetches + 1
                    assert self.final is None
                    self.fetches = self.fetch = attempt
                case p.Connect():
                    assert not self.connected and not asked
                    self.connect_asked = True
                case p.Disconnect():
                    assert self.connected
                    self.connected = False
                case p.StartRequests(request_ids):
                    assert request_ids and self.connected and self.peer.state is p.PeerState.READY
                    self.settle(request_ids)
                case p.FailRequests(request_ids, reason):
                    assert request_ids and reason
                    self.settle(request_ids)

    def settle(self, request_ids):
        assert len(set(request_ids)) == len(request_ids) and set(request_ids) <= self.waiting
        self.waiting -= set(request_ids)

    free = precondition(lambda self: not self.connect_asked)

    @free
    @rule()
    def want(self):
        self.count += 1
        self.waiting.add(f"r{self.count}")
        self.tell(p.Wanted(f"r{self.count}"))

    @free
    @rule(data=st.data())
    def give_up(self, data):
        if self.waiting:
            gone = data.draw(st.sampled_from(sorted(self.waiting)))
            self.waiting.discard(gone)
            self.tell(p.Unwanted(gone))

    @free
    @rule(same=st.sampled_from([True, True, True, False]))
    def fetch_answered(self, same):
        if self.fetch is not None:
            attempt, self.fetch = self.fetch, None
            self.tell(p.ManifestsArrived(attempt, KEY.incarnation if same else OTHER))
            if not same:
                self.finish(p.PeerState.DEAD)

    @free
    @rule(here=st.booleans())
    def fetch_failed(self, here):
        if self.fetch is not None:
            attempt, self.fetch = self.fetch, None
            self.tell(p.FetchFailed(attempt, "no reply", here))

    @free
    @rule(attempt=st.integers(0, 3))
    def stale_answer(self, attempt):
        if attempt < self.fetches and attempt != self.fetch:
            before = self.peer.state
            self.tell(p.ManifestsArrived(attempt, OTHER))
            self.tell(p.FetchFailed(attempt, "late"))
            assert self.peer.state is before

    @precondition(lambda self: self.connect_asked)
    @rule(how=st.sampled_from(["ok", "ok", "failed", "refused"]))
    def connect_answered(self, how):
        if how == "ok":
            self.connected = True
            self.tell(p.Connected())
        elif how == "failed":
            self.tell(p.ConnectFailed("no route"))
        else:
            self.tell(p.Refused("dtype differs"))
            self.finish(p.PeerState.REFUSED)

    @free
    @rule(event=st.sampled_from([p.Suspected("slow"), p.Suspected("slow"), p.Lost("reset"), p.Dismissed("idle")]))
    def trouble(self, event):
        self.tell(event)
        if isinstance(event, p.Dismissed):
            self.fetch = None  # its answer, if any, is stale now

    @free
    @rule()
    def replaced(self):
        if self.count > 3:
            self.tell(p.Replaced("another engine"))
            self.finish(p.PeerState.DEAD)

    @free
    @rule(step=st.sampled_from([0.0, 0.3, 1.0, 5.0, 20.0]))
    def time_passes(self, step):
        self.now += step
        self.tell(p.PeerTick())

    def finish(self, state):
        self.final = self.final or state
        self.fetch = None

    @invariant()
    def the_transport_is_connected_exactly_in_ready_and_suspect(self):
        if hasattr(self, "peer"):
            assert self.connected == (self.peer.state in (p.PeerState.READY, p.PeerState.SUSPECT))

    @invariant()
    def what_is_final_stays(self):
        if hasattr(self, "peer") and self.final is not None:
            assert self.peer.state is self.final and not self.waiting and self.peer.next_deadline() is None

    @invariant()
    def nobody_waits_for_nothing(self):
        if hasattr(self, "peer") and self.waiting:
            under_way = self.fetch is not None or self.connect_asked
            assert under_way != (self.peer.next_deadline() is not None)
            assert under_way or self.now <= self.peer.next_deadline() < inf
        if hasattr(self, "peer") and self.peer.state in (p.PeerState.REFUSED, p.PeerState.DEAD, p.PeerState.READY):
            assert not self.waiting


TestPeers = Peers.TestCase
TestPeers.settings = settings(
    deadline=None, max_examples=150, stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow]
)
