"""vLLM's own names and order of calls, other connectors beside this one, and its end."""

from __future__ import annotations

from tests.guarantees.guarantee import Guarantee

# fmt: off
GUARANTEES = [
    # Names that are used again
    Guarantee(
        "the decode leg of a next attempt is not told how the last one ended",
        "Rendezvous", "(registration.began < over.at or registration.into.reading in over.readings)", "True",
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
        "TransferLoop", "            self._receives.fail(request,", "            raise\n            self._receives.fail(request,",
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
        "Producer", "tokens >= self._unfinished[name].num_prompt_tokens", "False",
        "test_the_step_that_completes_a_prefill_for_a_decode_instance_says_so",
    ),
    Guarantee(
        "parameters that are no object do not end the engine",
        "SchedulerHalf", "            drop_other_params(request)\n", "            pass\n",
        "test_parameters_that_are_no_object_fail_their_request_alone",
    ),
    # Other connectors in the engine
    Guarantee(
        "what another connector has yet to copy is not loaded over",
        "Beside", "self._stores = [one.connector_scheduler for one in beside]", "pass",
        "test_what_a_store_copies_of_an_ended_request_is_copied_before_it_is_loaded_over",
    ),
    Guarantee(
        "who notes a request's blocks forgets those of a load that is not used",
        "Beside", "                del trackers[request_id]\n", "                pass\n",
        "test_who_notes_a_request_s_blocks_forgets_those_of_a_load_that_is_not_used",
    ),
    Guarantee(
        "a prefill that is still computed in part is not handed over",
        "Producer", "if reason := computed_again(request):", "if False:",
        "test_a_prefill_that_ends_while_a_part_of_it_is_computed_again_is_not_handed_over",
    ),
    Guarantee(
        "where vLLM would fail over unequal hits they are not taken",
        "SchedulerHalf", "self.fills_unequal_hits = not fails_over_unequal_hits(manager)", "pass",
        "test_a_prompt_that_came_before_comes_again_where_hits_end_inside_of_blocks",
    ),
    Guarantee(
        "a part of a window is kept by no other connector as whole",
        "SchedulerHalf", "if self.beside.any:", "if False:",
        "test_a_window_that_came_in_part_is_kept_by_no_store",
    ),
    Guarantee(
        "what a store holds of former weights is not handed over after vLLM alone has forgotten it",
        "SchedulerHalf", "if not self.beside.any:", "if True:",
        "test_what_a_store_holds_of_former_weights_is_not_handed_over_until_it_is_reset",
    ),
    Guarantee(
        "nor where vLLM had forgotten it before",
        "Epochs", "or (self._stored and self._beside())", "or False",
        "test_what_a_store_holds_of_former_weights_is_not_handed_over_until_it_is_reset",
    ),
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
        "Quarantine", "        self._pool.touch(more)\n", "",
        "test_quarantined_blocks_stay_out_of_the_pool_until_every_rank_has_drained",
    ),
    Guarantee(
        "held blocks stay out of vLLM's pool",
        "HeldBlocks", "        self._pool.touch(more)\n", "",
        "test_held_blocks_stay_out_of_the_pool_until_the_lease_ends",
    ),
    Guarantee(
        "a failed receive gives its lease back",
        "Receives", "            ending.give_back(active, self._calls)\n", "            pass\n",
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
        "TransferLoop", '            self._end_all("this instance is shutting down", time.monotonic())\n', "",
        "test_a_decode_worker_that_ends_gives_its_leases_back",
    ),
    Guarantee(
        "caches that a worker lets go of are not copied from any more",
        "TransferLoop", "            self._pushes.fail_all(reason, now)\n", "            pass\n",
        "test_a_loop_that_is_closed_waits_for_the_copies_of_its_pushes",
    ),
    Guarantee(
        "a decode instance that ends gives back what queues there",
        "LeaseRenewer", "                self._give_back(address, partial(m.Release, batch))", "                pass",
        "test_a_decode_instance_that_ends_gives_back_what_queues_there",
    ),
    Guarantee(
        "a transport is not taken from whichever of two packages is found first",
        "find", "    if len(found) > 1:", "    if False:",
        "test_a_name_that_two_distributions_bring_is_refused_with_both",
    ),
    Guarantee(
        "an engine with an unknown transport does not start",
        "parse_config", "    registry.find(config.transport)\n", "",
        "test_an_unknown_name_is_refused_with_those_that_are_known",
    ),
    Guarantee(
        "no descriptor of another is written to by who wakes a thread that has ended",
        "Wake", "            if not self._closed:\n                self._is_set = True", "            if True:\n                self._is_set = True",
        "test_who_sets_it_after_its_end_writes_to_no_descriptor_of_others",
    ),
]
# fmt: on
