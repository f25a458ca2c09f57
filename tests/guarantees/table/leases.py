"""How long blocks are held, by whom, and when they are given back."""

from __future__ import annotations

from tests.guarantees.guarantee import Guarantee

# fmt: off
GUARANTEES = [
    # Deadlines and leases
    Guarantee(
        "every phase of a receive has a deadline",
        "Receive", "if self._deadline is None or now < self._deadline:", "if True:",
        "test_each_phase_has_its_deadline",
    ),
    # Several readers of one lease
    Guarantee(
        "the workers of two decode requests are not taken for those of one",
        "LeaseTable", "lease.attempt(report.attempt, now)", 'lease.attempt(b"", now)',
        "test_the_workers_of_two_instances_are_not_taken_for_those_of_one",
    ),
    Guarantee(
        "a second reader that gives up ends nothing under the first",
        "LeaseTable", "if not all(other.over for other in lease.attempts.values()):", "if False:",
        "test_a_second_reader_that_fails_releases_nothing_under_the_first",
    ),
    Guarantee(
        "a renewal that its request's end overtook keeps nothing",
        "LeaseTable", "            if attempt is not None and not attempt.over:", "            if True:",
        "test_a_renewal_that_was_overtaken_by_the_end_of_its_request_keeps_nothing",
    ),
    Guarantee(
        "a choice of a request that comes late finds the lease held",
        "LeaseTable", "        if not lease.shared:\n", "        if True:\n",
        "test_a_choice_that_comes_when_the_others_are_done_finds_the_lease_held",
    ),
    Guarantee(
        "the choices of a request are announced before one of them has read",
        "LeaseRenewer", "        elif reading.shared:", "        elif False:",
        "test_the_choices_of_a_request_read_under_one_lease_which_ends_with_the_last",
    ),
    Guarantee(
        "the choices of a request are read, for only one of them could be written for",
        "Sources", "if shared or not self._config.pushes:", "if not self._config.pushes:",
        "test_the_choices_of_a_request_are_read_also_where_its_prefill_would_be_asked_to_write",
    ),
    Guarantee(
        "the choices of two legs that are sent at once pair off one by one",
        "pairing_name", "return choice + transfer_id", "return transfer_id",
        "test_the_choices_of_two_legs_that_are_sent_at_once_pair_off_one_by_one",
    ),
    Guarantee(
        "of several choices only the one whose parameters the router gets keeps its blocks",
        "Producer", "self._server.drop(older)", "pass",
        "test_only_the_choice_that_ended_last_keeps_its_blocks_for_the_router",
    ),
    # Blocks that nobody will read
    Guarantee(
        "what a request came for that vLLM refused is given back",
        "Consumer", "self._renewer.drop(*reading_of(remote, refused), release=True)", "pass",
        "test_the_lease_of_a_request_that_vllm_refused_is_given_back_and_one_line_says_so",
    ),
    Guarantee(
        "a stranger is told nothing of a request that vLLM refused",
        "Sources", "self._require_known(remote.remote_host, remote.pd_connector.server_key)", "pass",
        "test_a_stranger_is_not_told_of_a_request_that_vllm_refused",
    ),
    Guarantee(
        "a request that is refused here gives its lease back",
        "Consumer", "self._renewer.drop(address, reading, release=True)\n            raise", "raise",
        "test_a_refused_request_gives_its_lease_back_in_one_line",
    ),
    Guarantee(
        "a request that failed is not said to be refused once more",
        "Consumer", "if was_refused(request):  # it has failed", "if False:  # it has failed",
        "test_a_request_whose_parameters_are_none_is_refused_in_one_line",
    ),
    Guarantee(
        "what is given back is sent again when there was no room for it",
        "Errands", "            self._put_off(errand, error, now)", "            pass",
        "test_what_finds_no_room_here_is_sent_again_while_a_lease_may_live",
    ),
    # The share of the pool
    Guarantee(
        "leases leave room for an engine's other requests",
        "LeaseShare", "if need is None or blocks is None or request_id in self._begun:", "if True:",
        "test_leases_never_take_more_than_their_share_and_prefills_begin_in_order",
    ),
    Guarantee(
        "vLLM is told which prefills wait for leases to end",
        "SchedulerHalf", "and not self.share.admits(", "and False and (lambda *_: None)(",
        "test_an_engine_s_own_requests_find_room_beside_leases_that_nobody_reads",
    ),
    Guarantee(
        "small prefills do not pass one that is held back",
        "LeaseShare", "if not self._held_back:", "if True:",
        "test_small_prefills_do_not_pass_one_that_is_held_back",
    ),
    Guarantee(
        "no request is preempted for blocks that a lease has given back",
        "PDConnector", "self._scheduler is not None and self._scheduler.frees_blocks()", "False",
        "test_a_running_request_is_not_preempted_for_blocks_that_a_lease_has_just_given_back",
    ),
    Guarantee(
        "no decode instance keeps blocks for longer than kv_lease_limit",
        "_Lease", "max(self.deadline, min(until, self.limit))", "max(self.deadline, until)",
        "test_no_renewal_keeps_a_lease_for_longer_than_the_limit",
    ),
    Guarantee(
        "kv_lease_limit reaches the leases",
        "Producer", "            lease_limit_s=self._config.kv_lease_limit,\n", "",
        "test_no_decode_instance_keeps_blocks_for_longer_than_the_limit",
    ),
    Guarantee(
        "leases are renewed while a request queues, whatever the engine does",
        "LeaseRenewer", "                self._send(address, m.Renew(batch))", "                pass",
        "test_a_lease_lives_as_long_as_the_request_queues_and_ends_when_it_leaves",
    ),
    Guarantee(
        "a sleeping server expires leases by itself",
        "SideChannelServer", "moments = [self._leases.next_deadline(), ", "moments = [None, ",
        "test_a_sleeping_server_expires_leases_by_itself",
    ),
    Guarantee(
        "addresses that never answer stop no renewal at those that do",
        "SideChannelClient", "if not (link.answered and link.pending)", "if not link.pending",
        "test_addresses_that_never_answer_stop_no_renewal_at_those_that_do",
    ),
]
# fmt: on
