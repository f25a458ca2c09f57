"""What the transports' libraries leave running, and who reaches them."""

from __future__ import annotations

from tests.guarantees.guarantee import Guarantee

# fmt: off
GUARANTEES = [
    Guarantee(
        "a lost peer's transfer is reported when nothing of it lands any more",
        "Settling", "time.monotonic() >= self.until and self.left <= 0", "True",
        "test_a_disconnect_is_reported_when_nothing_lands_any_more",
    ),
    Guarantee(
        "what was being written when its connection was lost is not over",
        "NixlTransport", "transfer.failure if transfer.reads else may_arrive(transfer.failure)", "transfer.failure",
        "test_what_was_written_when_its_connection_was_lost_may_still_arrive",
    ),
    Guarantee(
        "a short transfer stays in registered memory as a long one does",
        "few", "if index < 0 or max(addresses) + most > stops[index]:", "if False:",
        "test_few_runs_that_are_wrong_are_left_to_be_refused",
    ),
    Guarantee(
        "a post that failed in the middle is not over",
        "translate", "terminal=not started", "terminal=True",
        "test_a_post_that_failed_in_the_middle_may_still_write",
    ),
    Guarantee(
        "what a network device wrote into a GPU is visible before it is reported",
        "settle", "copier.arrived()", "pass",
        "test_what_was_written_is_visible_when_it_is_reported",
    ),
    Guarantee(
        "what is ended for a lost peer fails no other link to its port",
        "Openings", "opening.disturbed = True", "pass",
        "test_a_step_that_was_ended_for_another_link_is_taken_again",
    ),
    Guarantee(
        "what ended after its peer was lost is not believed",
        "MooncakeTransport", "elif peer.liveness.state is LivenessState.LOST:", "elif rest and peer.liveness.state is LivenessState.LOST:",
        "test_what_ended_after_the_line_did_is_not_believed",
    ),
    Guarantee(
        "a peer that does not answer the library is torn from it",
        "MooncakeTransport", "self._openings.end_exchanges(peer.opening, now)", "pass",
        "test_a_peer_that_does_not_answer_for_its_queue_pairs_does_not_hold_up_the_others",
    ),
    Guarantee(
        "the library uses the protocol that was asked for",
        "start_engine", "used = check_started(found, options, protocol)", "used = protocol",
        "test_an_engine_that_fell_back_to_tcp_is_refused_where_rdma_was_asked_for",
    ),
    Guarantee(
        "Mooncake's ports are reached at the advertised address alone",
        "start_engine", "restrict_listeners({port, found.tcp_data_port} - {0}, address if serves else None)", "pass",
        "test_the_librarys_ports_are_reached_at_the_advertised_address_alone",
    ),
    Guarantee(
        "nobody serves other hosts without authentication unless it is allowed",
        "check_reachability", "if serves and not address.is_loopback and not options.allow_unauthenticated_peers:", "if False:",
        "test_the_library_is_not_reached_from_other_hosts_unless_that_is_allowed",
    ),
]
# fmt: on
