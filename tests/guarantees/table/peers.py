"""Peers that fail, return, or differ."""

from __future__ import annotations

from tests.guarantees.guarantee import Guarantee

# fmt: off
GUARANTEES = [
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
        "medium_name", "        content.update(chunk)\n", "        pass\n",
        "test_prompts_of_the_same_tokens_and_other_contents_are_told_apart",
    ),
    Guarantee(
        "a hash that vLLM makes of its own counter is no name of a medium",
        "medium_name", "if named and local is None:", "if local is None:",
        "test_a_hash_of_a_counter_is_no_name_of_a_medium",
    ),
    Guarantee(
        "an engine registers on its own host only if the first engine is there",
        "answer_proxies", " if is_own_address(first_engine) else ()", "",
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
        "the memory of a peer whose process has ended is let go of though nobody asks for it",
        "Links", "if reason := link.ended():", "if (reason := link.ended()) and False:",
        "test_a_peer_that_is_killed_is_let_go_of_without_a_request",
    ),
    Guarantee(
        "a peer whose lines were reset is kept",
        "ProcessWatch", "return self._closed_at if self._direct and not self.here else None", "return self._dialled_at if self.lost else None",
        "test_a_peer_whose_lines_were_reset_is_kept_and_watched_again",
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
        "InFlight", "            if self._has_ended(index, now):", "            if False:",
        "test_a_transfer_that_may_still_write_keeps_its_blocks_until_the_worker_has_ended",
    ),
    Guarantee(
        "blocks of a push stay in quarantine when the decode worker falls asleep",
        "Receives", "DRAINING and not active.question:", "DRAINING:",
        "test_blocks_that_a_prefill_instance_may_still_write_stay_in_quarantine",
    ),
    Guarantee(
        "what an ended worker had sent is in memory before blocks are given back",
        "has_ended", " and has_settled(transport, peer)", "",
        "test_blocks_come_back_when_the_transport_has_taken_in_what_the_worker_had_sent",
    ),
    Guarantee(
        "blocks are kept whichever slice of a transfer failed first, if another may still write",
        "_Direct", "        self.stuck |= not error.terminal", "        self.stuck = not error.terminal",
        "test_blocks_that_are_read_into_stay_in_quarantine_whichever_slice_failed_first[errors1]",
    ),
    Guarantee(
        "another life at a peer's address does not end what its workers write",
        "InFlight", "            if self._has_ended(index, now):", "            if self.link.machine.over or not self.link.ranks:",
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
        "ProcessWatch", "            if link.closed_at is not None:\n                self._closed_at, self._direct = link.closed_at, link.direct is not False", "            if link.ended:\n                self._closed_at = self._closed_at or now",
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
    Guarantee(
        "what a proxy has closed is no proof that a process has ended",
        "ProcessWatch", "link.closed_at, link.direct is not False", "link.closed_at, True",
        "test_what_a_proxy_closes_is_no_end_though_it_is_dialled_in_vain",
    ),
    Guarantee(
        "who sends more than a name on a liveness link is hung up on",
        "IncomingLink", "        if len(said) > length:", "        if False:",
        "test_who_sends_more_than_the_name_is_hung_up_on_and_others_stay",
    ),
]
# fmt: on
