"""What a reference to a cache may be used for, and blocks that are whole."""

from __future__ import annotations

from tests.guarantees.guarantee import Guarantee

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
        "Sources", "or digest != remote.pd_connector.prompt_digest", "or False",
        "test_parameters_of_another_prompt_are_refused",
    ),
    Guarantee(
        "a cache is read for the weights that it was computed with",
        "model_facts", "weights=weights_of(model, config.load_config) if version is None", 'weights="" if version is None',
        "test_weights_are_told_by_their_content_wherever_they_lie",
    ),
    Guarantee(
        "a cache is read for the configuration that it was computed with",
        "model_facts", 'f"{model.architecture}{options}"', "model.architecture",
        "test_overrides_of_the_configuration_are_told",
    ),
    Guarantee(
        "a cache is read for the configuration files that it was computed with",
        "instance_differences", "        if mine_told[name] != theirs_told[name]", "        if False",
        "test_weights_that_another_configuration_computes_with_are_refused",
    ),
    Guarantee(
        "a cache is read for the quantization that it was computed with",
        "model_facts", '"mixed" if mixed else quantization_of(model)', '"mixed"',
        "test_a_quantization_is_its_method_and_its_settings",
    ),
    Guarantee(
        "a quantization that decides the order of a key's channels is equal on both sides",
        "model_facts", "own.allow_mixed_quantization and not orders_keys(model)", "own.allow_mixed_quantization",
        "test_no_other_quantization_is_allowed_where_it_orders_the_channels_of_keys",
    ),
    Guarantee(
        "a build of vLLM between two releases is none of them",
        "vllm_release", "return found[1] if found is not None else version", "return '.'.join(version.split('.')[:2])",
        "test_a_build_between_two_releases_is_neither",
    ),
    Guarantee(
        "what was read in some releases of vLLM is not said of others",
        "_opaque", "anywhere=anywhere and facts.vllm_release() in facts.READ", "anywhere=anywhere",
        "test_what_was_read_in_two_releases_is_not_said_of_others",
    ),
    Guarantee(
        "a prefill of another instance with this one's name is not taken for this one's own",
        "Consumer", "            self.sources.require_own(remote)\n", "",
        "test_only_what_comes_from_this_instances_own_place_is_its_own",
    ),
    Guarantee(
        "a cache is read for the adapter that it was computed with",
        "prompt_digest", "adapter_of(request)", '""',
        "test_adapters_of_one_name_are_told_apart_by_their_files",
    ),
    Guarantee(
        "an adapter that workers may have read again from other files is nobody's",
        "Adapters", "if self._may_be_another(lora):", "if False:",
        "test_an_adapter_for_which_there_was_no_place_may_be_what_its_files_became",
    ),
    Guarantee(
        "block ids outside the cache reach no transport",
        "_check_ids", "(ids < NULL_BLOCK) | (ids >= group.num_blocks)", "ids < NULL_BLOCK",
        "test_bounds_are_those_of_each_side",
    ),
    Guarantee(
        "bytes that are no block ids are refused where they are decoded",
        "BlockTable", "if self.first_block < 0 or len(self.packed) % _ID_BYTES:", "if False:",
        "test_what_is_no_table_is_refused_when_it_is_decoded",
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
        "Receives", "        if ok and (reason := ending.settle(active, self._stager.copier)):", "        if False:",
        "test_a_read_puts_the_logical_elements_in_place_and_ends_the_lease",
    ),
    Guarantee(
        "slots that nobody writes are zeroed in what the prefill side wrote, too",
        "AskLink", "        self.plan = yield from planning(local, remote)", "        self.plan = Plan((yield from planning(local, remote)).destination, ())",
        "test_a_decode_instance_that_asks_first_is_served_when_the_prefill_comes",
    ),
    Guarantee(
        "slots before what came of a window are zeroed",
        "blanks", "max(start, late), stop)", "start, stop)",
        "test_slots_before_what_came_of_a_window_are_blank",
    ),
    Guarantee(
        "what was written of a window is all that is looked at",
        "PushRequester", "            if late > (needed := window_start(", "            if 0 > (needed := window_start(",
        "test_a_window_of_which_too_little_was_written_fails_the_request",
    ),
    Guarantee(
        "nothing is known across a gap in what an instance announces",
        "Announcements", "            self._forget(Loss.GAP)", "            pass",
        "test_without_a_replay_a_gap_makes_all_forgotten",
    ),
    Guarantee(
        "what another life of an instance announced is not known",
        "Announcements", "            self._forget(Loss.RESTART)", "            pass",
        "test_an_instance_that_was_started_anew_is_heard_again_and_known_by_what_it_says_then",
    ),
    Guarantee(
        "a batch that cannot be read makes all forgotten",
        "Announcements", "            self._forget(Loss.UNREADABLE)", "            pass",
        "test_a_batch_that_cannot_be_read_makes_all_forgotten",
    ),
    Guarantee(
        "an announced block is held only behind a parent that is known",
        "HeldBlocks", "if not copies or len(", "if len(",
        "test_what_hangs_on_an_unknown_parent_is_not_held",
    ),
    # Conversations
    Guarantee(
        "of a conversation nothing is read for another prompt",
        "Sources", "                if digest == own:", "                if True:",
        "test_what_is_not_this_conversation_is_computed[one step-prompt]",
    ),
    Guarantee(
        "a conversation is asked for by name of those alone whose keys are known",
        "Sources", "self._require_known(named.remote_host, named.server_key)", "pass",
        "test_with_keys_a_conversation_is_found_by_its_name_and_the_key_that_the_instance_says[one step]",
    ),
    Guarantee(
        "a decode instance reads no turns",
        "Sources", "if not self.prefills:", "if False:",
        "test_a_decode_instance_reads_no_turns[one step-push]",
    ),
    Guarantee(
        "changed prefixes of a conversation name a lease that is not held",
        "Conversation", "(bare.nonce, self.pd_connector.prefixes)", "(bare.nonce, ())",
        "test_a_change_of_any_field_that_is_read_names_another_lease",
    ),
    Guarantee(
        "a state that drafts may have taken further than the answer is not offered",
        "Lending", "if self._advanced:", "if False:",
        "test_a_state_that_drafts_have_advanced_is_kept_for_no_next_turn[none]",
    ),
    Guarantee(
        "a state that a step under way takes further is not offered",
        "Lending", "if self._states and steps_beyond(request, known_tokens(request)):", "if False:",
        "test_what_a_step_under_way_computes_is_not_offered[overlapping steps-states]",
    ),
    Guarantee(
        "a turn that could not be received is computed",
        "Turns", "        receive.outdated = True\n", "",
        "test_a_turn_that_could_not_be_received_is_computed_whatever_the_policy[one step]",
    ),
    Guarantee(
        "a window offers no prefix that ends before what it holds",
        "Lending", "least = max(least, prefix_behind(kind, window, table.begin * tokens))", "pass",
        "test_windows_serve_prefixes_that_end_behind_them[one step]",
    ),
    Guarantee(
        "a block of a window that came in part is lent to nobody",
        "LeasedTables", "begin = max(BlockTable.of(0, ids).begin, first)", "begin = BlockTable.of(0, ids).begin",
        "test_a_block_that_came_in_part_is_lent_to_nobody[one step-in part]",
    ),
    Guarantee(
        "a turn is computed whose decode needs a block that came in part",
        "Producer", "if prefill is None or least <= prefill.num_prompt_tokens:", "if True:",
        "test_a_turn_whose_decode_needs_a_block_that_came_in_part_is_computed[one step]",
    ),
    Guarantee(
        "a window that drafts have moved beyond the answer ends no engine",
        "Producer", "if not (prefixes := self.lending.prefixes(request, tables, num_tokens)):", "if (prefixes := self.lending.prefixes(request, tables, num_tokens)) is None:",
        "test_a_conversation_of_which_nothing_can_be_read_is_not_kept[one step]",
    ),
    Guarantee(
        "a state offers the prefix at whose end it stands and no other",
        "Lending", "least = num_tokens if self._states else 1", "least = 1",
        "test_a_state_serves_the_prefix_at_whose_end_it_stands[one step]",
    ),
    Guarantee(
        "a request that waits for blocks takes those of a conversation",
        "SchedulerHalf", "            self.producer.make_room(self.producer.lending.blocks_for(request))\n", "",
        "test_a_request_that_needs_the_blocks_gets_them[one step]",
    ),
    Guarantee(
        "nobody who runs is preempted for a conversation",
        "SchedulerHalf", "        while self._quarantine.num_free_blocks <= before and self.producer.give_up_oldest():", "        while False:",
        "test_nobody_who_runs_is_preempted_for_a_conversation[one step-begun after 8 steps]",
    ),
    Guarantee(
        "what vLLM keeps back for others is not a conversation's",
        "SchedulerHalf", "            if name in self._without_blocks:", "            if False:",
        "test_a_new_request_gets_what_vllm_keeps_back_for_others_too[one step]",
    ),
    Guarantee(
        "of conversations the oldest gives way",
        "Lending", "next(iter(self._held), None)", "next(reversed(self._held), None)",
        "test_the_oldest_conversation_gives_way_to_the_newest[one step]",
    ),
    Guarantee(
        "a conversation is forgotten when the prefix cache is",
        "SchedulerHalf", "        self.producer.make_room()\n", "",
        "test_a_conversation_is_forgotten_with_all_that_is_cached[one step]",
    ),
]
# fmt: on
