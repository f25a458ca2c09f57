"""What the prefill side writes."""

from __future__ import annotations

from tests.guarantees.guarantee import Guarantee

# fmt: off
GUARANTEES = [
    Guarantee(
        "what is written from blocks that were given back has failed",
        "PushTable", "        self._fail_prefill(prefill, reason)\n        self._rendezvous.remove(prefill)",
        "        self._rendezvous.remove(prefill)",
        "test_every_order_of_events_ends_with_every_answer_given_and_every_block_free",
    ),
    Guarantee(
        "blocks of a running prefill are referenced before anybody may write from them",
        "PrefillProgress", "                blocks.hold_ids(request_id, added)\n", "                blocks.hold_ids(request_id, ())\n",
        "test_a_prefill_that_is_preempted_is_written_from_blocks_that_nobody_else_has",
    ),
    Guarantee(
        "blocks of a running prefill that somebody was told to write from are not taken back",
        "Prefill", "        if self.finished or (self.registrations and not self.failure):", "        if self.finished:",
        "test_a_prefill_that_is_preempted_is_written_from_blocks_that_nobody_else_has",
    ),
    Guarantee(
        "a running prefill that nobody has asked for is preempted with all its blocks",
        "SchedulerHalf", "        self.producer.progress.take_back()", "        pass",
        "test_a_running_prefill_that_nobody_has_asked_for_is_preempted_with_all_its_blocks",
    ),
    Guarantee(
        "a preempted prefill that is written from keeps nobody out of the pool who goes before it",
        "PrefillProgress", "        if now < self._stuck_since + STUCK_S or", "        if True or",
        "test_a_preempted_prefill_that_is_written_from_is_in_nobodys_way",
    ),
    Guarantee(
        "a push is done when every worker of the prefill instance has written its part",
        "PushTable", "            if not registration.ordered:\n                self._settle", "            if True:\n                self._settle",
        "test_without_failures_every_order_is_served",
    ),
    Guarantee(
        "a push that has failed is over when every worker has said that it writes no more",
        "Draining", "        if push.writing:\n            return None\n", "",
        "test_every_order_of_events_ends_with_every_answer_given_and_every_block_free",
    ),
    Guarantee(
        "a push is not over while one of its chunks may be written, whichever failed first",
        "InFlight", "        if stream.may_write:\n            self.stuck", "        if error and self.writes and not error.terminal:\n            self.stuck",
        "test_a_write_is_over_only_if_all_of_its_chunks_are",
    ),
    Guarantee(
        "a worker that hears no more of what it writes does not say later that it is over",
        "ActivePush", "return self.cancelled and self.machine.failed and", "return self.machine.failed and",
        "test_a_write_that_may_go_on_keeps_the_decode_sides_blocks_alone_and_costs_the_prefill_side_nothing",
    ),
    Guarantee(
        "a cache is written for the prompt that it was computed for",
        "contradiction", " or into.prompt_digest != prefill.prompt_digest:", ":",
        "test_another_prompt_is_not_written",
    ),
    Guarantee(
        "a write by way of the staging buffer touches nothing but what was asked for",
        "_gap", "return 0 if writes or pairing.kind is", "return 0 if pairing.kind is",
        "test_a_rank_that_writes_its_heads_between_others_writes_them_token_by_token",
    ),
    Guarantee(
        "a write by way of the staging buffer touches no token that another rank writes",
        "chunks", "not writes or spans.source_token[1:] == (spans.source_token + spans.tokens)[:-1]", "True",
        "test_nothing_is_written_between_tokens_where_other_ranks_write_theirs",
    ),
    Guarantee(
        "a push is not over while its slots may still be written from",
        "InFlight", "if self.staged and not self.stager.holds(self.owner):", "if self.staged:",
        "test_after_a_push_was_given_up_its_slots_stay_out_until_nothing_is_written",
    ),
    Guarantee(
        "a push that was cancelled is not over while its slots may still be written from",
        "InFlight", "{*direct, *self.staged, *self.stuck}", "{*direct, *self.stuck}",
        "test_a_worker_that_was_told_to_cancel_says_that_it_is_over_when_its_slots_are_back",
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
        "orders are given to the instance's own workers alone",
        "refusal", "if not known or not hmac.compare_digest(", "if not known and not hmac.compare_digest(",
        "test_orders_are_only_for_who_knows_the_workers_secret",
    ),
    Guarantee(
        "a push of which bytes still move has no deadline on the prefill side",
        "Push", "        if moved:\n            self._deadline = now + self._limit_s\n            return []\n", "",
        "test_a_push_of_which_something_has_moved_gets_more_time",
    ),
    Guarantee(
        "a push of which bytes still move has no deadline on the decode side",
        "Receive", "if arrived is None or arrived != self._arrived:", "if arrived is None:",
        "test_a_push_that_computes_or_writes_for_long_is_waited_for_and_one_of_which_nothing_moves_is_not",
    ),
]
# fmt: on
