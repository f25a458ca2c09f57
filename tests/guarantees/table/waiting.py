"""Steps that wait, and what ends the wait."""

from __future__ import annotations

from tests.guarantees.guarantee import Guarantee

# fmt: off
GUARANTEES = [
    Guarantee(
        "a step that is held goes on when a receive has ended",
        "StepHold", "        elif said == ENDED:\n            self.ask()", "        elif said == ENDED:\n            pass",
        "test_a_bell_ends_the_wait",
    ),
    Guarantee(
        "no step is held while a request is computed",
        "StepHold", "computes or self._loop.computes()", "computes",
        "test_no_step_is_held_while_a_request_is_computed",
    ),
    Guarantee(
        "no step is held before the results of an end were looked at",
        "StepHold", "waiting and not busy and not self._due", "waiting and not busy",
        "test_nothing_is_held_until_the_results_of_an_end_were_looked_at",
    ),
    Guarantee(
        "nor before those of an end beside the last token of a request",
        "StepHold", "        if ended:\n", "        if ended and not busy:\n",
        "test_what_ended_beside_the_last_token_of_a_request_is_looked_at_without_a_hold",
    ),
    Guarantee(
        "workers are ready for the step that takes up an end",
        "StepHold", "bool(self._due and self._loop.has_others(0))", "False",
        "test_workers_are_ready_for_the_step_after_an_end",
    ),
    Guarantee(
        "nothing follows a lease that ended in an idle engine that steps in time with others",
        "StepHold", "(busy and not idle)", "busy",
        "test_no_step_is_held_that_other_engines_wait_for",
    ),
    Guarantee(
        "an engine that ends is held for a moment alone",
        "EngineLoop", "not self._core.is_running()", "False",
        "test_an_engine_that_ends_is_not_held_for_long",
    ),
    Guarantee(
        "vLLM waits for nothing between a receive's end and the step that computes its request",
        "StepHold", "            self._loop.go_on()", "            pass",
        "test_vllm_does_not_sleep_between_steps_that_wait_here",
    ),
    Guarantee(
        "a step is held long only if all that could end it shows itself",
        "StepHold", "LONGEST_S if self._sees_all(waiting) else SHORT_S", "LONGEST_S",
        "test_what_shows_no_sign_is_looked_at_soon",
    ),
    Guarantee(
        "strangers do not wake the engine",
        "StepHold", "        if token not in self._workers:", "        if False:",
        "test_a_stranger_rings_in_vain",
    ),
    Guarantee(
        "a worker rings when a receive has ended",
        "Outbox", "        self._ring(attempt + request_id", "        str(attempt + request_id",
        "test_a_worker_says_that_it_hears_and_rings_at_every_end",
    ),
    Guarantee(
        "the engine is held between its steps",
        "StepHold", "            self._loop.between_steps(self._between)", "            pass",
        "test_the_engine_is_held_when_a_step_is_over_and_before_its_queue_is_looked_at",
    ),
    Guarantee(
        "what was rung for is forgotten with the workers' reports",
        "SchedulerHalf", "            self.hold.forget(request_id)", "            pass",
        "test_a_decode_instance_holds_its_steps_from_the_order_to_the_report",
    ),
    Guarantee(
        "vLLM is told of a receive when every worker has rung for it",
        "StepHold", "            whole = rung == self._workers", "            whole = True",
        "test_what_went_well_on_some_workers_is_waited_for_shortly_and_then_asked_for",
    ),
    Guarantee(
        "a ring for an ended request is not heard for another of its name",
        "Consumer", " and attempt in (b\"\", receive.attempt)", "",
        "test_a_ring_for_an_ended_request_is_not_heard_for_another_of_its_name",
    ),
    Guarantee(
        "a worker that rings behind its report is not heard",
        "StepHold", "            if not self._loads(request_id, attempt):", "            if False:",
        "test_a_message_that_comes_behind_the_reports_changes_nothing",
    ),
    Guarantee(
        "what a report says of a receive is known before vLLM is told of it",
        "Outbox", "if ok and not quarantined and not unshareable else", "if ok else",
        "test_a_worker_says_that_it_hears_and_rings_at_every_end",
    ),
    Guarantee(
        "what workers report of a receive of which vLLM was told changes nothing",
        "SchedulerHalf", "            output.finished_recving -= again", "            pass",
        "test_what_every_worker_rang_for_is_computed_in_the_next_step_and_their_reports_change_nothing",
    ),
    Guarantee(
        "an idle engine gives back the blocks of leases that ended",
        "SideChannelServer", "self._tell_freed() if freed else 0.0", "0.0",
        "test_an_idle_engine_is_asked_to_give_back_what_was_read",
    ),
    Guarantee(
        "what nobody waits for is given back later, and not never",
        "StepHold", " and now < until", "",
        "test_an_idle_engine_is_asked_to_give_back_what_was_read",
    ),
    Guarantee(
        "a step that gives back what was put off is followed by one that can use it",
        "StepHold", "self._asked or self._gathers_until > 0, False", "self._asked, False",
        "test_a_step_that_gives_back_what_was_put_off_is_not_held",
    ),
    Guarantee(
        "who wakes a thread that takes the event back is heard",
        "Wake", "            self._is_set = False  #", "            pass  #",
        "test_who_sets_it_while_it_is_taken_back_is_heard_then_and_later",
    ),
    Guarantee(
        "a step looks for what has ended without waiting for who is served",
        "Producer", "or not (self._server.has_news() or self._traced)", "",
        "test_a_step_without_news_waits_for_nobody_who_is_served",
    ),
    Guarantee(
        "a step hears of leases that ended by themselves",
        "SideChannelServer", "freed, self._news = bool(self._freed), True", "freed = bool(self._freed)",
        "test_it_is_news_once_that_something_may_have_ended",
    ),
    Guarantee(
        "no deadline ends a read of which parts still arrive",
        "Receive", "        if moved:\n", "        if False:\n",
        "test_a_read_of_which_something_has_moved_gets_more_time",
    ),
    Guarantee(
        "no deadline ends a receive that waits for this worker's own thread alone",
        "Receives", "active.links.connects(active.link)", "False",
        "test_a_request_does_not_fail_by_its_deadline_while_its_peer_is_connected",
    ),
    Guarantee(
        "what was given up and still moves is no reason to link its peer anew",
        "Links", "if left != entry.seen:", "if False:",
        "test_reads_that_were_given_up_and_move_are_given_more_time",
    ),
    Guarantee(
        "of a peer that is being connected the life counts that has answered",
        "Links", "self._connecting.incarnation(other) or other.machine.key.incarnation", "other.machine.key.incarnation",
        "test_of_a_peer_that_is_being_connected_the_life_counts_that_has_answered",
    ),
]
# fmt: on
