"""What this connector guarantees, the line that does it, and the test that fails without the line.

`code` stands exactly once in the top-level definition `holder` of the package, wherever that is; `without` takes its
place when `test_guarantees` shows that `test`, a function of the suite, then fails (`file::test` where two files have one of
that name). Files may move: no row names a folder.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Guarantee:
    says: str
    holder: str
    code: str
    without: str
    test: str


# fmt: off
GUARANTEES = [
    # Stale references
    Guarantee(
        "a stale nonce is not vouched for",
        "LeaseTable", "lease is not None and lease.nonce == ref.nonce else None", "lease is not None else None",
        "test_a_stale_nonce_is_refused_while_the_request_is_held_again",
    ),
    Guarantee(
        "bytes are used only after the prefill side's verdict",
        "Receive", "        if not held:\n", "        if False:\n",
        "test_a_read_that_the_prefill_side_does_not_vouch_for_fails",
    ),
    Guarantee(
        "an expired lease is not vouched for",
        "LeaseTable", "deadline <= now:\n            request_id = ", "False:\n            request_id = ",
        "test_a_lease_that_was_read_in_part_still_expires",
    ),
    Guarantee(
        "a lease past its deadline is not revived by a late renewal",
        "LeaseTable", "        self.tick(now)\n        gone = []", "        gone = []",
        "test_a_lease_past_its_deadline_is_not_revived_by_whatever_comes_first",
    ),
    Guarantee(
        "an ended lease is vouched for to nobody but the reader that was told so",
        "LeaseTable", "if (attempt := ended.attempts.get(report.attempt)) is not None and report.reader in attempt.reported:", "if any(report.reader in attempt.reported for attempt in ended.attempts.values()):",
        "test_another_instance_that_reads_an_ended_lease_is_told_so",
    ),
    Guarantee(
        "other blocks than those handed over are not vouched for",
        "RemotePrefill", "encode((read, whose))", "encode(whose)",
        "test_other_blocks_than_those_that_were_handed_over_are_not_vouched_for",
    ),
    Guarantee(
        "a cache is read for the prompt that it was computed for",
        "Consumer", "or digest != remote.pd_connector.prompt_digest", "or False",
        "test_parameters_of_another_prompt_are_refused",
    ),
    Guarantee(
        "a cache is read for the weights that it was computed with",
        "model_facts", "weights=weights_of(model, config.load_config) if version is None", 'weights="" if version is None',
        "test_weights_are_told_by_their_content_wherever_they_lie",
    ),
    Guarantee(
        "a cache is read for the quantization that it was computed with",
        "model_facts", '"mixed" if own.allow_mixed_quantization else quantization_of(model)', '"mixed"',
        "test_a_quantization_is_its_method_and_its_settings",
    ),
    Guarantee(
        "a cache is read for the adapter that it was computed with",
        "prompt_digest", "adapter_of(request, adapter_ids)", '""',
        "test_adapters_of_one_name_are_told_apart_by_their_files",
    ),
    Guarantee(
        "block ids outside the cache reach no transport",
        "_check_ids", "(ids < NULL_BLOCK) | (ids >= group.num_blocks)", "ids < NULL_BLOCK",
        "test_bounds_are_those_of_each_side",
    ),
    # Blocks that are whole
    Guarantee(
        "each group gets what it has lost of a prefix",
        "first_lacking", "(i < hit_blocks and block.block_hash is not None)", "i < hit_blocks",
        "test_each_group_gets_what_it_has_lost_of_a_prefix",
    ),
    Guarantee(
        "a block that nothing is written into is not taken for received",
        "require_filled", "        if begin < start:\n", "        if False:\n",
        "test_blocks_that_a_group_names_before_the_range_are_not_reported_as_received",
    ),
    Guarantee(
        "slots that nobody writes are zeroed before a receive is reported",
        "Receives", "        if ok and (reason := blank(active, self._stager.copier)):", "        if False:",
        "test_a_read_puts_the_logical_elements_in_place_and_ends_the_lease",
    ),
    Guarantee(
        "slots that nobody writes are zeroed in what the prefill side wrote, too",
        "AskLink", "        self.plan = make_plan(local, remote)", "        self.plan = replace(make_plan(local, remote), edges=())",
        "test_a_decode_instance_that_asks_first_is_served_when_the_prefill_comes",
    ),
    Guarantee(
        "slots before what came of a window are zeroed",
        "blanks", "max(start, late), stop)", "start, stop)",
        "test_every_slot_of_a_request_s_blocks_is_written_or_blank",
    ),
    Guarantee(
        "what was written of a window is all that is looked at",
        "PushRequester", "            if late > (needed := window_start(", "            if 0 > (needed := window_start(",
        "test_a_window_of_which_too_little_was_written_fails_the_request",
    ),
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
        "LeaseTable", "if attempt is None or not attempt.over:", "if True:",
        "test_a_renewal_that_was_overtaken_by_the_end_of_its_request_keeps_nothing",
    ),
    Guarantee(
        "a choice of a request that comes late finds the lease held",
        "LeaseTable", "        if not lease.shared:\n", "        if True:\n",
        "test_a_choice_that_comes_when_the_others_are_done_finds_the_lease_held",
    ),
    Guarantee(
        "the choices of a request are announced before one of them has read",
        "LeaseRenewer", "        if reading.shared:", "        if False:",
        "test_the_choices_of_a_request_read_under_one_lease_which_ends_with_the_last",
    ),
    Guarantee(
        "the choices of a request are read, for only one of them could be written for",
        "Consumer", "if self._config.pushes and not reading.shared else None", "if self._config.pushes else None",
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
        "Consumer", "self._renewer.drop(_address(remote), _reading(remote, refused), release=True)", "pass",
        "test_the_lease_of_a_request_that_vllm_refused_is_given_back_and_one_line_says_so",
    ),
    Guarantee(
        "a stranger is told nothing of a request that vLLM refused",
        "Consumer", "self._require_trusted(remote)\n            if self._known", "if self._known",
        "test_a_stranger_is_not_told_of_a_request_that_vllm_refused",
    ),
    Guarantee(
        "a request that is refused here gives its lease back",
        "Consumer", "self._renewer.drop(_address(remote), reading, release=True)\n                raise", "raise",
        "test_a_refused_request_gives_its_lease_back_in_one_line",
    ),
    Guarantee(
        "a request that failed is not said to be refused once more",
        "Consumer", "if was_refused(request):  # it has failed", "if False:  # it has failed",
        "test_a_request_whose_parameters_are_none_is_refused_in_one_line",
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
        "LeaseRenewer", "                self._send(address, Renew(batch))", "                pass",
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
    # Peers
    Guarantee(
        "an address where nobody listens is told at once",
        "Dial", "and self._lookup is None and not self._trying:", "and False:",
        "test_a_peer_that_nobody_listens_for_fails_the_request_at_once_and_is_named_once",
    ),
    Guarantee(
        "who waits for a server hears at once that it ended",
        "Watch", "                        self._lost.add(name)\n", "                        pass\n",
        "test_who_waits_hears_at_once_that_a_server_ended",
    ),
    Guarantee(
        "every address of a name is tried",
        "Dial", "found[:MAX_ADDRESSES]", "found[:1]",
        "test_every_address_of_a_name_is_tried",
    ),
    Guarantee(
        "a name that is not resolved holds nobody else",
        "Dial", "_addresses(host, port, socket.AI_NUMERICHOST)", "_addresses(host, port, 0)",
        "test_a_name_that_is_not_resolved_holds_nobody_else",
    ),
    Guarantee(
        "a message without end is cut off",
        "Watch", "connection.shutdown(socket.SHUT_RDWR)", "pass",
        "test_who_sends_a_server_a_message_without_end_is_cut_off",
    ),
    Guarantee(
        "a prefill instance cannot fill a decode instance's memory with a message without end",
        "dealer", "watch.add(socket, allowance(QUEUED_REPLIES, MAX_REPLY_FRAME))", '""',
        "test_who_asked_a_server_that_was_cut_off_hears_why",
    ),
    Guarantee(
        "who ends each message may send any number: a server counts from the last one",
        "SideChannelServer", "            self._watch.took(frames[-1] if frames else first)\n", "",
        "test_whoever_ends_each_message_may_send_any_number[with keys]",
    ),
    Guarantee(
        "who ends each message may send any number: a client counts from the last one",
        "SideChannelClient", "            self._watch.took(parts[0])\n", "",
        "test_whoever_ends_each_message_may_send_any_number[with keys]",
    ),
    Guarantee(
        "media that vLLM has not hashed are told apart by their content",
        "_medium", "        content.update(chunk)\n", "        pass\n",
        "test_prompts_of_the_same_tokens_and_other_contents_are_told_apart",
    ),
    Guarantee(
        "an engine registers on its own host only if the first engine is there",
        "Producer", " if is_own_address(self._first_engine) else ()", "",
        "test_an_engine_registers_on_its_own_host_only_if_the_first_engine_is_there",
    ),
    Guarantee(
        "another incarnation at the address is another peer",
        "Peer", "        if incarnation != self.key.incarnation:", "        if False:",
        "test_another_incarnation_means_that_the_peer_is_gone_for_ever",
    ),
    Guarantee(
        "a dead peer's memory is let go of at once",
        "Peer", "            actions.append(Disconnect(reason))", "            pass",
        "test_a_suspicion_that_is_confirmed_disconnects",
    ),
    Guarantee(
        "attempts back off",
        "Backoff", "self.base_s * 2.0 ** min(failures - 1, 60)", "self.base_s",
        "test_the_back_off_is_capped_and_spread",
    ),
    Guarantee(
        "attempts are spread by jitter",
        "Backoff", "(0.5 + random / 2)", "1.0",
        "test_the_back_off_is_capped_and_spread",
    ),
    Guarantee(
        "another engine at the address is told apart",
        "SideChannelServer", "        if engine_id != self._engine_id:", "        if False:",
        "test_a_foreign_engine_id_is_refused_naming_both",
    ),
    Guarantee(
        "what may still be written ends with the worker's process",
        "InFlight", "            if watch.over:", "            if False:",
        "test_a_transfer_that_may_still_write_keeps_its_blocks_until_the_worker_has_ended",
    ),
    Guarantee(
        "another life at a peer's address does not end what its workers write",
        "InFlight", "            if watch.over:", "            if self.link.machine.over or not self.link.ranks:",
        "test_another_life_at_its_address_says_nothing_of_the_workers_of_the_last",
    ),
    Guarantee(
        "blocks of a push are given back when all workers that may write have ended",
        "PushRequester", "        if all(watch.over for watch in active.watches):", "        if any(watch.closed for watch in active.watches):",
        "test_a_push_fails_at_once_when_a_worker_has_ended",
    ),
    Guarantee(
        "nothing is asked of workers whose end would not be noticed",
        "PushRequester", "        if len(active.watches) < len(watches):", "        if False:",
        "test_nothing_is_asked_of_workers_that_cannot_be_watched",
    ),
    Guarantee(
        "another life of an instance does not answer for a push of the last",
        "SideChannelServer", 'if request.incarnation not in ("", self._incarnation):', "if False:",
        "test_another_life_at_the_address_says_nothing_of_the_workers_of_the_last",
    ),
    Guarantee(
        "a reset is no proof that a process has ended",
        "ProcessWatch", "            if link.closed_at is not None:\n                self._closed_at = link.closed_at", "            if link.ended:\n                self._closed_at = self._closed_at or now",
        "test_a_reset_and_refusals_are_no_end",
    ),
    Guarantee(
        "a process that has ended is over only when what it had sent has arrived",
        "ProcessWatch", "self._dialled_at >= self._closed_at + SETTLE_S", "True",
        "test_a_process_that_ended_is_over_when_what_it_sent_has_arrived",
    ),
    Guarantee(
        "a line that is answered again was not closed by its process's end",
        "ProcessWatch", "            self._closed_at = None\n            return", "            return",
        "test_a_closed_line_that_is_answered_again_was_closed_by_somebody_in_between",
    ),
    # Names that are used again
    Guarantee(
        "the decode leg of a next attempt is not told how the last one ended",
        "Rendezvous", "if over is not None and registration.began < over.at:", "if over is not None:",
        "test_a_name_is_used_again_at_once_in_either_order",
    ),
    Guarantee(
        "what is declined is the prefill of its own attempt, before the next one's comes",
        "Rendezvous", " and (over is None or began >= over.at)", "",
        "test_what_a_request_declines_is_the_prefill_of_its_own_attempt",
    ),
    Guarantee(
        "what is declined is the prefill of its own attempt, after the next one's came",
        "PushTable", "(ref.nonce is not None or began >= prefill.follows_at)", "True",
        "test_what_a_request_declines_is_the_prefill_of_its_own_attempt",
    ),
    Guarantee(
        "a failed prefill does not stand for the next attempt's",
        "Rendezvous", "prefill is not None and began < prefill.failed_at", "prefill is not None",
        "test_a_failed_prefill_that_is_still_written_from_does_not_stand_for_the_next_attempt",
    ),
    Guarantee(
        "one order that cannot begin costs no other",
        "TransferLoop", "            self._receives.fail(request.request_id,", "            raise\n            self._receives.fail(request.request_id,",
        "test_an_order_that_cannot_begin_costs_no_other",
    ),
    Guarantee(
        "a peer whose reads stand still though it answers is linked anew",
        "Links", "if doubted and link.stalled and", "if False and",
        "test_a_peer_whose_reads_stand_still_though_it_answers_is_linked_anew",
    ),
    # vLLM's order of calls
    Guarantee(
        "a push waits for what a step writes after its hook before the forward",
        "WorkerHalf", "        self._unmarked = metadata\n", "        self._unmarked = metadata\n        self.step_launched()\n",
        "test_a_push_waits_for_everything_that_the_step_writes[runner_v1-last-synchronous]",
    ),
    Guarantee(
        "a push waits for the drafter",
        "WorkerHalf", "        if not self._last_stage:\n", "        if True:\n",
        "test_a_push_waits_for_everything_that_the_step_writes[runner_v1-drafts-last-alone]",
    ),
    Guarantee(
        "a stage that is not told of the end of a step marks it all the same",
        "WorkerHalf", "        if not self._last_stage:\n            self.step_launched()", "        if False:\n            pass",
        "test_a_push_waits_for_everything_that_the_step_writes[runner_v1-drafts-first-alone]",
    ),
    Guarantee(
        "a prefill with drafts is answered when they are written",
        "WorkerHalf", "            mark.synchronize()", "            pass",
        "test_a_prefill_with_drafts_is_answered_when_they_are_written[runner_v2-drafts-last-alone-pull-True]",
    ),
    Guarantee(
        "the step that completes a prefill says so",
        "Producer", "computed >= self._unfinished.get(request_id, inf)", "False",
        "test_the_step_that_completes_a_prefill_for_a_decode_instance_says_so",
    ),
    # Other connectors in the engine
    Guarantee(
        "a prefill is handed over beside a connector that knows one group only",
        "PDConnector", "        return self.request_finished_all_groups(request, (block_ids,))", "        return False, None",
        "test_a_finished_prefill_is_handed_over",
    ),
    Guarantee(
        "another connector's handshake metadata is no manifest",
        "PDConnector", "        if len(found) < len(metadata):", "        if False:",
        "test_another_connectors_handshake_metadata_is_refused[by stage and rank-kv_producer]",
    ),
    Guarantee(
        "another connector's end of a request does not free the blocks that this one's bytes land in",
        "SchedulerHalf", "output.finished_sending -= self.consumer.ended_while_loading(output.finished_sending)", "pass",
        "test_a_request_that_is_received_and_sent_is_freed_once_and_when_it_was_received[sent, received]",
    ),
    Guarantee(
        "what was written of blocks that another connector failed to load is not used",
        "SchedulerHalf", "            self.producer.loads_failed(output.invalid_block_ids)", "            pass",
        "test_blocks_that_another_connector_failed_to_load_fail_the_push_that_wrote_from_them",
    ),
    Guarantee(
        "who cannot hear of failed receives is not told of good ones",
        "PDConnector", "        raise PDConnectorError(\n", "        return None, None\n        raise PDConnectorError(\n",
        "test_who_cannot_hear_of_failures_is_not_told_of_successes",
    ),
    # Draining
    Guarantee(
        "blocks that may still be written are quarantined",
        "Receive", "        quarantined = bool(self._writing)", "        quarantined = False",
        "test_a_frozen_peer_fails_the_request_in_time_and_its_blocks_wait_in_quarantine",
    ),
    Guarantee(
        "a quarantine lasts until the last transfer is terminal, also when a sibling failed first",
        "Receive", "        self._writing.discard(index)\n        if self._writing:", "        self._writing.clear()\n        if self._writing:",
        "test_one_failed_transfer_is_reported_at_once_and_the_others_are_waited_for",
    ),
    Guarantee(
        "quarantined blocks stay out of vLLM's pool",
        "Quarantine", "            self._pool.touch(blocks)\n            self._blocks[request_id] = blocks\n        self._ranks", "            self._blocks[request_id] = blocks\n        self._ranks",
        "test_quarantined_blocks_stay_out_of_the_pool_until_every_rank_has_drained",
    ),
    Guarantee(
        "held blocks stay out of vLLM's pool",
        "HeldBlocks", "        self._pool.touch(list(blocks.values()))\n", "",
        "test_held_blocks_stay_out_of_the_pool_until_the_lease_ends",
    ),
    Guarantee(
        "a failed receive gives its lease back",
        "Receives", "            give_back(active, self._calls)\n", "            pass\n",
        "test_block_ids_that_do_not_fit_fail_that_request_alone",
    ),
    Guarantee(
        "a prefill worker that ends waits for its readers",
        "wait_for_readers", "            if outcome == LeaseCount(0):", "            if True:",
        "test_a_worker_waits_for_its_readers",
    ),
    Guarantee(
        "an instance that ends tells its peers",
        "SideChannelServer", "        for client in self._clients:\n            self._send(", "        for client in ():\n            self._send(",
        "test_requests_that_read_from_a_peer_that_leaves_end_at_once",
    ),
    Guarantee(
        "a decode worker that ends gives its leases back",
        "TransferLoop", '            self._receives.fail_all("this instance is shutting down", time.monotonic())\n', "",
        "test_a_decode_worker_that_ends_gives_its_leases_back",
    ),
    Guarantee(
        "a decode instance that ends gives back what queues there",
        "LeaseRenewer", "                self._send(address, Release(batch))", "                pass",
        "test_a_decode_instance_that_ends_gives_back_what_queues_there",
    ),
    # Who may talk
    Guarantee(
        "with keys, only known clients get in",
        "SideChannelServer", "bound_router(self._context, host, port, self._watch, keys)", "bound_router(self._context, host, port, self._watch)",
        "test_a_client_without_keys_gets_no_answer",
    ),
    Guarantee(
        "with keys, an instance has its own blocks written into and no other's",
        "SideChannelServer", "isinstance(request, PushInto) and request.home.server_key != asker", "False",
        "test_an_instance_has_its_own_blocks_written_into_and_no_other_s",
    ),
    Guarantee(
        "a server whose authenticator is gone lets nobody in",
        "secure_server", "        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)\n", "",
        "test_without_its_authenticator_a_server_lets_nobody_in",
    ),
    Guarantee(
        "without keys, no instance listens where others reach it",
        "Producer", "            require_private_address(self._host", "            (lambda *_: None)(self._host",
        "test_a_producer_without_keys_does_not_listen_where_others_reach_it",
    ),
    Guarantee(
        "without keys, no instance on another host is asked",
        "Consumer", "        require_known_server(\n", "        (lambda *_: None)(\n",
        "test_a_consumer_without_keys_asks_nobody_on_another_host",
    ),
    Guarantee(
        "with a secret, only parameters that a prefill instance made are used",
        "require_signature", "if not hmac.compare_digest(found, sign(remote, secret)):", "if False:",
        "test_another_secret_does_not_do",
    ),
    Guarantee(
        "parameters name no endpoint but a host",
        "Host", r'pattern=r"^[A-Za-z0-9._:%-]+\Z"', 'pattern=r".*"',
        "test_parse::test_a_field_that_is_not_as_declared_is_refused_by_name",
    ),
    Guarantee(
        "with verification, a receive that differs fails",
        "Receive", 'self._fail(f"verification: {problem}") if problem else self._confirm(now)', "self._confirm(now)",
        "test_a_difference_fails_the_receive_and_gives_the_lease_back",
    ),
    Guarantee(
        "with verification, what was written is compared before it is used",
        "Receive", "        if self._verify and comparable:\n", "        if False:\n",
        "test_what_was_written_is_compared_if_the_prefill_side_keeps_it_for_that",
    ),
    Guarantee(
        "blocks that are compared with what was written are kept until then",
        "PushTable", "            if answer.lease is not None:\n", "            if False:\n",
        "test_a_reader_who_compares_is_given_the_lease_and_not_taken_for_served",
    ),
    Guarantee(
        "requests are bounded before they are in memory",
        "bound_router", "    socket.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_FRAME)\n", "",
        "test_ten_megabytes_of_junk_never_reach_the_server",
    ),
    Guarantee(
        "requests under way are bounded",
        "SideChannelClient", "        if len(link.pending) >= MAX_PENDING:", "        if False:",
        "test_requests_under_way_are_bounded",
    ),
    Guarantee(
        "replies that nobody takes are bounded",
        "SideChannelServer", "isinstance(reply, Manifests) and not self._has_room(client)", "False",
        "test_a_client_that_takes_no_replies_cannot_make_the_server_hoard_them",
    ),
    Guarantee(
        "damaged metadata reaches no library",
        "unseal", "    if made.digest != expected:", "    if False:",
        "test_an_endpoint_with_any_wrong_byte_or_length_is_refused",
    ),
    Guarantee(
        "a defect that one request meets does not reach the others",
        "Receives", "        except Exception as error:  # a defect of ours that one request met", "        except ZeroDivisionError as error:  # a defect",
        "test_an_unexpected_error_fails_requests_and_not_the_thread",
    ),
    # Pushes
    Guarantee(
        "blocks that may still be written from are not given back",
        "PushTable", "        if not prefill.closed or prefill.registrations or ", "        if not prefill.closed or ",
        "test_every_order_of_events_ends_with_every_answer_given_and_every_block_free",
    ),
    Guarantee(
        "a push is done when every worker of the prefill instance has written its part",
        "PushTable", "        if registration.ordered:\n            return\n        self._settle", "        self._settle",
        "test_without_failures_every_order_is_served",
    ),
    Guarantee(
        "a worker's part of a push is over when none of its transfers may write any more",
        "Push", "        if self._writing or self._phase not in", "        if self._phase not in",
        "test_every_order_of_events_reports_the_end_once_and_truthfully",
    ),
    Guarantee(
        "what comes of an event waits until it has been handled",
        "EventQueue", "        if self._handling:\n            return\n", "",
        "test_what_comes_of_an_event_waits_until_it_has_been_handled",
    ),
    Guarantee(
        "a cache is written for the prompt that it was computed for",
        "contradiction", " or into.prompt_digest != prefill.prompt_digest:", ":",
        "test_another_prompt_is_not_written",
    ),
    Guarantee(
        "a write by way of the slab touches nothing but what was asked for",
        "_gap", "return 0 if writes or pairing.kind is", "return 0 if pairing.kind is",
        "test_a_rank_that_writes_its_heads_between_others_writes_them_token_by_token",
    ),
    Guarantee(
        "a push is not over while its slots may still be written from",
        "InFlight", "if self.staged and not self.stager.holds(self.owner):", "if self.staged:",
        "test_after_a_push_was_given_up_its_slots_stay_out_until_nothing_is_written",
    ),
    Guarantee(
        "a push that was cancelled is not over while its slots may still be written from",
        "InFlight", "{*self.transfers, *self.staged, *self.stuck}", "{*self.transfers, *self.stuck}",
        "test_a_worker_that_was_told_to_cancel_says_that_it_is_over_when_its_slots_are_back",
    ),
    Guarantee(
        "orders are given to the instance's own workers alone",
        "refusal", "if not known or not hmac.compare_digest(", "if not known and not hmac.compare_digest(",
        "test_orders_are_only_for_who_knows_the_workers_secret",
    ),
    # Waiting
    Guarantee(
        "a step that is held goes on when a receive has ended",
        "StepHold", "            self._heard.add(token)\n            self.ask()", "            self._heard.add(token)",
        "test_a_bell_ends_the_wait",
    ),
    Guarantee(
        "no step is held while a request is computed",
        "StepHold", "or computes or self._loop.computes():", "or computes:",
        "test_no_step_is_held_while_a_request_is_computed",
    ),
    Guarantee(
        "no step is held before the results of an end were looked at",
        "StepHold", "not ended and not self._due:", "not ended:",
        "test_nothing_is_held_until_the_results_of_an_end_were_looked_at",
    ),
    Guarantee(
        "a step is held long only if all that could end it shows itself",
        "StepHold", "LONGEST_S if self._sees_all(loading) else SHORT_S", "LONGEST_S",
        "test_what_shows_no_sign_is_looked_at_soon",
    ),
    Guarantee(
        "strangers do not wake the engine",
        "StepHold", "        if token in self._workers:", "        if True:",
        "test_a_stranger_rings_in_vain",
    ),
    Guarantee(
        "a worker rings when a receive has ended",
        "Outbox", "            self._hand_over()\n        self._ring()", "            self._hand_over()",
        "test_a_worker_says_that_it_hears_and_rings_at_every_end",
    ),
    Guarantee(
        "an idle engine gives back the blocks of leases that ended",
        "SideChannelServer", "                    self._tell_freed()", "                    pass",
        "test_an_idle_engine_is_asked_to_give_back_what_was_read",
    ),
    Guarantee(
        "no deadline ends a read of which parts still arrive",
        "Receive", "if moved and self._state is ReceiveState.READING:", "if False:",
        "test_a_read_of_which_something_has_moved_gets_more_time_and_no_other_phase_does",
    ),
]
# fmt: on
