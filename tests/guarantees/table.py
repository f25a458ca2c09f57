"""What this connector guarantees, the line that does it, and the test that fails without the line.

`code` stands exactly once in `file` (under vllm_pd_connector/); `without` takes its place when `test_guarantees` shows
that `test` (a node of the suite) then fails. Whoever moves such a line moves it here too.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Guarantee:
    says: str
    file: str
    code: str
    without: str
    test: str


LEASE, PEER, RECEIVE = "protocol/lease.py", "protocol/peer.py", "protocol/receive.py"
LOOP, RECEIVES = "worker/loop.py", "worker/receiving.py"
T_LEASE, T_PEER, T_RECEIVE = "protocol/test_lease.py", "protocol/test_peer.py", "protocol/test_receive.py"
T_LINKS = "worker/test_links.py"
T_LOOP, T_LEAVE, T_HALF = "worker/test_loop.py", "worker/test_leave.py", "scheduler/test_half.py"
T_SIDE, T_KEYS, T_PARAMS = "sidechannel/test_sidechannel.py", "sidechannel/test_keys.py", "protocol/test_params.py"

# fmt: off
GUARANTEES = [
    # Stale references
    Guarantee(
        "a stale nonce is not vouched for",
        LEASE, "lease is not None and lease.nonce == ref.nonce else None", "lease is not None else None",
        f"{T_LEASE}::test_a_stale_nonce_is_refused_while_the_request_is_held_again",
    ),
    Guarantee(
        "bytes are used only after the prefill side's verdict",
        RECEIVE, "        if not held:\n", "        if False:\n",
        f"{T_LOOP}::test_a_read_that_the_prefill_side_does_not_vouch_for_fails",
    ),
    Guarantee(
        "an expired lease is not vouched for",
        LEASE, "deadline <= now:\n            self._end(", "False:\n            self._end(",
        f"{T_LEASE}::test_a_lease_that_was_read_in_part_still_expires",
    ),
    Guarantee(
        "a lease past its deadline is not revived by a late renewal",
        LEASE, "        self.tick(now)\n        gone = []", "        gone = []",
        f"{T_LEASE}::test_a_lease_past_its_deadline_is_not_revived_by_whatever_comes_first",
    ),
    Guarantee(
        "an ended lease is vouched for to nobody but the reader that was told so",
        LEASE, "ended.reported.get(report.reader) == report.attempt", "report.reader in ended.reported",
        f"{T_LEASE}::test_another_instance_that_reads_an_ended_lease_is_told_so",
    ),
    Guarantee(
        "other blocks than those handed over are not vouched for",
        "protocol/params.py", "encode((read, whose))", "encode(whose)",
        f"{T_LOOP}::test_other_blocks_than_those_that_were_handed_over_are_not_vouched_for",
    ),
    Guarantee(
        "a cache is read for the prompt that it was computed for",
        "scheduler/consumer.py", "or digest != remote.pd_connector.prompt_digest", "or False",
        f"{T_HALF}::test_parameters_of_another_prompt_are_refused",
    ),
    Guarantee(
        "block ids outside the cache reach no transport",
        "geometry/bind.py", "(ids < NULL_BLOCK) | (ids >= group.num_blocks)", "ids < NULL_BLOCK",
        "geometry/test_bind.py::test_bounds_are_those_of_each_side",
    ),
    # Deadlines and leases
    Guarantee(
        "every phase of a receive has a deadline",
        RECEIVE, "if self._deadline is None or now < self._deadline:", "if True:",
        f"{T_RECEIVE}::test_each_phase_has_its_deadline",
    ),
    Guarantee(
        "leases are renewed while a request queues, whatever the engine does",
        "scheduler/keeper.py", "                self._send(address, Renew(batch))", "                pass",
        f"{T_HALF}::test_a_lease_lives_as_long_as_the_request_queues_and_ends_when_it_leaves",
    ),
    Guarantee(
        "a sleeping server expires leases by itself",
        "sidechannel/server.py", "moments = [self._leases.next_deadline(), ", "moments = [None, ",
        f"{T_SIDE}::test_a_sleeping_server_expires_leases_by_itself",
    ),
    # Peers
    Guarantee(
        "another incarnation at the address is another peer",
        PEER, "        if incarnation != self.key.incarnation:", "        if False:",
        f"{T_PEER}::test_another_incarnation_means_that_the_peer_is_gone_for_ever",
    ),
    Guarantee(
        "a dead peer's memory is let go of at once",
        PEER, "            actions.append(Disconnect(reason, gone))", "            pass",
        f"{T_PEER}::test_a_suspicion_that_is_confirmed_disconnects",
    ),
    Guarantee(
        "attempts back off",
        PEER, "self.base_s * 2.0 ** min(failures - 1, 60)", "self.base_s",
        f"{T_PEER}::test_the_back_off_is_capped_and_spread",
    ),
    Guarantee(
        "attempts are spread by jitter",
        PEER, "(0.5 + random / 2)", "1.0",
        f"{T_PEER}::test_the_back_off_is_capped_and_spread",
    ),
    Guarantee(
        "another engine at the address is told apart",
        "sidechannel/server.py", "        if engine_id != self._engine_id:", "        if False:",
        f"{T_SIDE}::test_a_foreign_engine_id_is_refused_naming_both",
    ),
    Guarantee(
        "what a lost peer may still have written ends with its connection",
        RECEIVES, "            for index in sorted(active.stuck if gone else ()):", "            for index in ():",
        f"{T_LOOP}::test_a_transfer_that_may_still_write_keeps_its_blocks_until_the_peer_is_known_dead",
    ),
    Guarantee(
        "a peer that only stopped answering may still write",
        RECEIVES, "active.stuck if gone else ()", "active.stuck",
        f"{T_LINKS}::test_a_peer_that_only_leaves_may_still_write_until_another_life_answers_there",
    ),
    Guarantee(
        "one order that cannot begin costs no other",
        LOOP, "            self._receives.fail(order.request_id,", "            raise\n            self._receives.fail(order.request_id,",
        f"{T_LINKS}::test_an_order_that_cannot_begin_costs_no_other",
    ),
    Guarantee(
        "a peer whose reads stand still though it answers is linked anew",
        "worker/links.py", "if doubted and link.stalled and", "if False and",
        "worker/test_stalled.py::test_a_peer_whose_reads_stand_still_though_it_answers_is_linked_anew",
    ),
    # Draining
    Guarantee(
        "blocks that may still be written are quarantined",
        RECEIVE, "        quarantined = bool(self._writing)", "        quarantined = False",
        f"{T_LOOP}::test_a_frozen_peer_fails_the_request_in_time_and_its_blocks_wait_in_quarantine",
    ),
    Guarantee(
        "a quarantine lasts until the last transfer is terminal, also when a sibling failed first",
        RECEIVE, "        self._writing.discard(index)\n        if self._writing:", "        self._writing.clear()\n        if self._writing:",
        f"{T_RECEIVE}::test_one_failed_transfer_is_reported_at_once_and_the_others_are_waited_for",
    ),
    Guarantee(
        "quarantined blocks stay out of vLLM's pool",
        "compat/blocks.py", "            self._pool.touch(blocks)\n            self._blocks[request_id] = blocks\n        self._ranks", "            self._blocks[request_id] = blocks\n        self._ranks",
        f"{T_HALF}::test_quarantined_blocks_stay_out_of_the_pool_until_every_rank_has_drained",
    ),
    Guarantee(
        "held blocks stay out of vLLM's pool",
        "compat/blocks.py", "        self._pool.touch(list(blocks.values()))\n", "",
        f"{T_HALF}::test_held_blocks_stay_out_of_the_pool_until_the_lease_ends",
    ),
    Guarantee(
        "a failed receive gives its lease back",
        RECEIVES, "            self._give_back(active)\n", "            pass\n",
        f"{T_LOOP}::test_block_ids_that_do_not_fit_fail_that_request_alone",
    ),
    Guarantee(
        "a prefill worker that ends waits for its readers",
        "worker/leave.py", "            if outcome == Standing(0):", "            if True:",
        f"{T_LEAVE}::test_a_worker_waits_for_its_readers",
    ),
    Guarantee(
        "an instance that ends tells its peers",
        "sidechannel/server.py", "        for client in self._clients:\n            self._send(", "        for client in ():\n            self._send(",
        f"{T_LEAVE}::test_requests_that_read_from_a_peer_that_leaves_end_at_once",
    ),
    Guarantee(
        "a decode worker that ends gives its leases back",
        LOOP, '            self._receives.fail_all("this instance is shutting down", time.monotonic())\n', "",
        f"{T_LEAVE}::test_a_decode_worker_that_ends_gives_its_leases_back",
    ),
    Guarantee(
        "a decode instance that ends gives back what queues there",
        "scheduler/keeper.py", "                self._send(address, Release(batch))", "                pass",
        f"{T_HALF}::test_a_decode_instance_that_ends_gives_back_what_queues_there",
    ),
    # Who may talk
    Guarantee(
        "with keys, only known clients get in",
        "sidechannel/server.py", "bound_router(self._context, host, port, keys)", "bound_router(self._context, host, port)",
        f"{T_KEYS}::test_a_client_without_keys_gets_no_answer",
    ),
    Guarantee(
        "a server whose authenticator is gone lets nobody in",
        "sidechannel/keys.py", "        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)\n", "",
        f"{T_KEYS}::test_without_its_authenticator_a_server_lets_nobody_in",
    ),
    Guarantee(
        "without keys, no instance listens where others reach it",
        "scheduler/producer.py", "            require_private_address(self._host", "            (lambda *_: None)(self._host",
        "scheduler/test_half_keys.py::test_a_producer_without_keys_does_not_listen_where_others_reach_it",
    ),
    Guarantee(
        "without keys, no instance on another host is asked",
        "scheduler/consumer.py", "        require_known_server(\n", "        (lambda *_: None)(\n",
        "scheduler/test_half_keys.py::test_a_consumer_without_keys_asks_nobody_on_another_host",
    ),
    Guarantee(
        "with a secret, only parameters that a prefill instance made are used",
        "protocol/answer.py", "if not hmac.compare_digest(found, sign(remote, secret)):", "if False:",
        f"{T_PARAMS}::test_another_secret_does_not_do",
    ),
    Guarantee(
        "parameters name no endpoint but a host",
        "protocol/fields.py", r'pattern=r"^[A-Za-z0-9._:%-]+\Z"', r'pattern=r".*"',
        f"{T_PARAMS}::test_a_field_that_is_not_as_declared_is_refused_by_name",
    ),
    Guarantee(
        "with verification, a receive that differs fails",
        RECEIVE, 'self._fail(f"verification: {problem}") if problem else self._confirm(now)', "self._confirm(now)",
        "worker/test_verify.py::test_a_difference_fails_the_receive_and_gives_the_lease_back",
    ),
    Guarantee(
        "with verification, what was written is compared before it is used",
        RECEIVE, "        if self._verify and comparable:\n", "        if False:\n",
        f"{T_RECEIVE}::test_what_was_written_is_compared_if_the_prefill_side_keeps_it_for_that",
    ),
    Guarantee(
        "blocks that are compared with what was written are kept until then",
        "protocol/push.py", "            if lease is not None:\n", "            if False:\n",
        "protocol/test_push_table.py::test_a_reader_who_compares_is_given_the_lease_and_not_taken_for_served",
    ),
    Guarantee(
        "requests are bounded before they are in memory",
        "sidechannel/sockets.py", "    socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_FRAME)\n", "",
        f"{T_SIDE}::test_ten_megabytes_of_junk_never_reach_the_server",
    ),
    Guarantee(
        "requests under way are bounded",
        "sidechannel/client.py", "        if len(link.pending) >= MAX_PENDING:", "        if False:",
        "sidechannel/test_client.py::test_requests_under_way_are_bounded",
    ),
    Guarantee(
        "replies that nobody takes are bounded",
        "sidechannel/server.py", "isinstance(reply, Manifests) and not self._has_room(client)", "False",
        f"{T_SIDE}::test_a_client_that_takes_no_replies_cannot_make_the_server_hoard_them",
    ),
    Guarantee(
        "damaged metadata reaches no library",
        "transport/endpoint.py", "    if made.digest != expected:", "    if False:",
        "transport/test_transports.py::test_an_endpoint_with_any_wrong_byte_or_length_is_refused",
    ),
    Guarantee(
        "a defect that one request meets does not reach the others",
        RECEIVES, "        except Exception as error:  # a defect of ours that one request met", "        except ZeroDivisionError as error:  # a defect",
        f"{T_LOOP}::test_an_unexpected_error_fails_requests_and_not_the_thread",
    ),
    # Pushes
    Guarantee(
        "blocks that may still be written from are not given back",
        "protocol/push.py", "        if not prefill.closed or prefill.wants or ", "        if not prefill.closed or ",
        "protocol/test_push_table.py::test_every_order_of_events_ends_with_every_answer_given_and_every_block_free",
    ),
    Guarantee(
        "a push is done when every worker of the prefill instance has written its part",
        "protocol/push.py", "        if want.ordered:\n            return\n        self._settle", "        self._settle",
        "protocol/test_push_table.py::test_without_failures_every_order_is_served",
    ),
    Guarantee(
        "a cache is written for the prompt that it was computed for",
        "protocol/wants.py", " or into.prompt_digest != prefill.prompt_digest:", ":",
        "worker/test_pushing.py::test_another_prompt_is_not_written",
    ),
    Guarantee(
        "a write by way of the slab touches nothing but what was asked for",
        "geometry/stage.py", "return 0 if writes or family.kind is", "return 0 if family.kind is",
        "geometry/test_stage.py::test_a_rank_that_writes_its_heads_between_others_writes_them_token_by_token",
    ),
    Guarantee(
        "a push is not over while its slots may still be written from",
        "worker/pushing.py", "or push.stuck or self._stager.holds(push)", "or push.stuck",
        "worker/test_push_convert.py::test_after_a_push_was_given_up_its_slots_stay_out_until_nothing_is_written",
    ),
    Guarantee(
        "orders are given to the instance's own workers alone",
        "sidechannel/workers.py", "if not known or not hmac.compare_digest(", "if not known and not hmac.compare_digest(",
        "scheduler/test_push_halves.py::test_orders_are_only_for_who_knows_the_workers_secret",
    ),
]
# fmt: on
