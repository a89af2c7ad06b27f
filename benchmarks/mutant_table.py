"""The mutants of `benchmarks.mutants`: the replaced texts, and the tests that should notice."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A deliberate fault: one text in one source file replaced by another."""

    name: str
    file: str
    """Path of the source file below the root of the checkout."""
    old: str
    """The text that is replaced. It has to occur exactly once in the file."""
    new: str
    tests: tuple[str, ...]
    """Files of tests, at least one of which should fail."""
    equivalent: str = ""
    """Why no test can fail, if the fault does not change the behaviour."""


_METHOD, _ENGINE = "paravt_jax/method", "rollout/engine"
_GRPO = ("tests/paravt_jax/test_grpo.py", "tests/golden/test_golden_grpo.py")
_STRUCTURE = ("tests/paravt_jax/test_structure.py",)
_REWARDS = ("tests/paravt_jax/test_rewards.py",)
_TEXT = ("tests/paravt_jax/test_world_text.py",)
_PACKING = ("tests/train/test_packing.py",)
_PACKED = ("tests/train/test_conversation_rows.py",)
_PAGES = ("tests/rollout/engine/test_pages.py",)
_SAMPLING = ("tests/rollout/engine/test_sampling.py",)
_LAYOUT = ("tests/rollout/engine/test_layout.py",)
_SCHEDULE = ("tests/rollout/engine/test_schedules.py", "tests/rollout/engine/test_engine.py")
_BATCH = ("tests/train/test_batch.py",)
_STEP = ("tests/train/test_step.py", "tests/train/test_rl.py")
_CHECKPOINT = ("tests/train/test_checkpoint.py",)
_POOL = ("tests/train/test_rollout_pool.py",)
_UPDATES = ("tests/train/test_updates_per_batch.py",)
_EPISODE = ("tests/rollout/test_episode.py", "tests/rollout/engine/test_under_fire.py")
_SERVE = "rollout/serve"
_FILES = ("tests/rollout/serve/test_files.py",)
_EPISODES = ("tests/rollout/serve/test_episodes.py",)
_PLAIN = ("tests/rollout/serve/test_plain.py",)
_QUEUE = ("tests/rollout/serve/test_owner.py",)

_TABLE: dict[tuple[str, tuple[str, ...]], dict[str, tuple[str, str]]] = {
    ("paravt_jax/world/text.py", _TEXT): {
        "hindsight": (
            "answer = self._guess()",
            'answer = f" {_digit(self.scene)}"',
        ),
        "guess_among_the_right": (
            "self.habits.choice(self.question.options)",
            "self.question.answer",
        ),
        "calls_without_tools": ("if looks and tools:", "if looks:"),
        "always_both_halves": (
            "self.habits.random() >= self.settings.both",
            "self.habits.random() > 1",
        ),
    },
    (f"{_METHOD}/grpo/advantages.py", _GRPO): {
        "guard_ignored": ("out = scale * out", "out = out"),
        "guard_grows_updates": (
            "jnp.minimum(1.0, (1.0 - silent) / settings.min_signal)",
            "(1.0 - silent) / settings.min_signal",
        ),
        "reward_bias_added": (
            "(rewards - settings.reward_bias) *",
            "(rewards + settings.reward_bias) *",
        ),
        "reward_at_the_clip_is_not_clipped": (
            "clipped = scaled >= (settings",
            "clipped = scaled > (settings",
        ),
        "reward_clip_above_only": (
            "jnp.clip(shaped, -settings.reward_clip, settings.reward_clip)",
            "jnp.minimum(shaped, settings.reward_clip)",
        ),
        "group_and_batch_swapped": ('return 1 if level == "group"', 'return 1 if level == "batch"'),
        "leave_one_out_divides_by_all": (
            "(total - values) / jnp.maximum(n - 1, 1)",
            "(total - values) / jnp.maximum(n, 1)",
        ),
        "equal_values_leave_rounding": (
            "mask & varied(x, mask, how.mean), x - mean",
            "mask, x - mean",
        ),
        "std_biased": (
            ".sum(axis, keepdims=True) / jnp.maximum(n - 1, 1)",
            ".sum(axis, keepdims=True) / jnp.maximum(n, 1)",
        ),
        "epsilon_is_a_floor": ("centred / (std + epsilon)", "centred / jnp.maximum(std, epsilon)"),
        "k2_not_halved": ("kl = d**2 / 2", "kl = d**2"),
        "k3_of_the_inverse": ("kl = jnp.exp(-d) - 1 + d", "kl = jnp.exp(d) - 1 - d"),
        "kl_clamp_removed": (
            "return kl if clamp is None else jnp.clip(kl, -clamp, clamp)",
            "return kl",
        ),
        "kl_rewarded": ("jnp.where(mask, -coefficient * kl", "jnp.where(mask, coefficient * kl"),
        "kl_summed_backwards": (
            "jnp.flip(jnp.cumsum(jnp.flip(penalties, 1), axis=1), 1)",
            "jnp.cumsum(penalties, axis=1)",
        ),
        "token_groups_by_member": (
            "advantages.reshape(rows, -1)",
            "advantages.reshape(-1, rows).T",
        ),
        "silent_tokens_blown_up": (
            "varied(rewards, batch.valid, how.std),",
            "jnp.ones_like(varied(rewards, batch.valid, how.std)),",
        ),
        "invalid_tokens_normalised": (
            "mask = batch.trained\n    # One row",
            "mask = batch.mask\n    # One row",
        ),
        "credit_over_the_batch": (
            'in_groups = NORMALISATIONS["group"]',
            'in_groups = NORMALISATIONS["batch"]',
        ),
    },
    (f"{_METHOD}/grpo/anchor.py", _GRPO): {
        "tags_of_invalid_rollouts": (
            "jnp.take_along_axis(batch.trained, structure.positions, axis=1)",
            "jnp.take_along_axis(batch.mask, structure.positions, axis=1)",
        ),
        "likelihood_of_tags_of_a_part": (
            "probability[n] / jnp.maximum(totals[n], 1)",
            "probability[n] / jnp.maximum(count[n], 1)",
        ),
        "violations_rewarded": (
            "masked_mean(weighed, tags, total) - gamma *",
            "masked_mean(weighed, tags, total) + gamma *",
        ),
        "tags_of_any_rollout": ("token_mask(is_tag & compliant)", "token_mask(is_tag)"),
        "credit_for_violations": (
            "credit.reshape(-1, 1), -gamma)",
            "credit.reshape(-1, 1), gamma)",
        ),
        "credit_unweighted": ("batch.structure, weight * values,", "batch.structure, values,"),
        "padding_is_structure": ("jnp.where(structure.valid, values, 0.0)", "values"),
        "last_value_of_a_token_counts": (
            ".at[trajectories, structure.positions].add(",
            ".at[trajectories, structure.positions].set(",
        ),
        "answer_close_is_no_tag": (
            "structure.kinds != Kind.VIOLATION",
            "structure.kinds < Kind.ANSWER_CLOSE",
        ),
    },
    (f"{_METHOD}/grpo/loss.py", _GRPO): {
        "lower_clip_wider": ("(ratio, 1 - settings.clip,", "(ratio, 1 - 2 * settings.clip,"),
        "loss_optimistic": (
            "jnp.maximum(-advantages * ratio, -advantages * clipped)",
            "jnp.minimum(-advantages * ratio, -advantages * clipped)",
        ),
        "dual_clip_from_below": (
            "loss = jnp.minimum(loss, settings.dual_clip",
            "loss = jnp.maximum(loss, settings.dual_clip",
        ),
        "clip_above_as_below": (
            "1 + settings.clip_above)\n    loss",
            "1 + settings.clip)\n    loss",
        ),
        "anchor_weighed_by_the_proximal": (
            "weight = behaviour_weight(logprobs, batch.behaviour",
            "weight = behaviour_weight("
            "logprobs if batch.proximal is None else batch.proximal, batch.behaviour",
        ),
        "cap_excludes_itself": ("jnp.where(weight <= cap,", "jnp.where(weight < cap,"),
        "capped_tokens_count_once": (
            "jnp.where(weight <= cap, weight, 0.0))",
            "jnp.where(weight <= cap, weight, 1.0))",
        ),
        "gradient_through_the_weight": (
            "return jax.lax.stop_gradient(jnp.where(weight <= cap, weight, 0.0))",
            "return jnp.where(weight <= cap, weight, 0.0)",
        ),
        "gradient_through_the_proximal": (
            "    proximal = jax.lax.stop_gradient(proximal)\n",
            "",
        ),
        "sequence_mean_over_padding": (
            "x.sum(1, keepdims=True) / jnp.maximum(mask.sum(1, keepdims=True), 1)",
            "x.sum(1, keepdims=True) / x.shape[1]",
        ),
        "likelihood_repelled": (
            "loss - settings.anchor_weight * likelihood",
            "loss + settings.anchor_weight * likelihood",
        ),
        "invalid_rows_in_the_loss": (
            "    mask = batch.trained\n    proximal",
            "    mask = batch.mask\n    proximal",
        ),
        "parts_divide_by_their_own_tokens": (
            "masked_mean(loss * weight, mask, tokens), metrics",
            "masked_mean(loss * weight, mask), metrics",
        ),
    },
    (f"{_METHOD}/grpo/settings.py", _GRPO): {
        "cap_slightly_higher": (
            "behaviour_cap: float | None = 5.0",
            "behaviour_cap: float | None = 5.05",
        ),
    },
    (f"{_METHOD}/grpo/batch.py", _GRPO): {
        "invalid_rollouts_trained": (
            "return self.mask & self.valid.reshape(-1, 1)",
            "return self.mask",
        ),
        "rows_of_other_rollouts": ("self.valid.reshape(-1, 1)", "self.valid.T.reshape(-1, 1)"),
        "masked_nan_spreads": ("jnp.where(mask, x, 0.0).sum()", "(x * mask.astype(x.dtype)).sum()"),
    },
    (f"{_METHOD}/structure.py", _STRUCTURE): {
        "any_closing_tag_closes": (
            "if name == open_block:",
            "if open_block is not None and name in _KINDS:",
        ),
        "unclosed_block_is_fine": ("yield len(text), len(text) + 1, Kind.VIOLATION", "return"),
        "nested_block_is_fine": ("yield match.start(), match.end(), Kind.VIOLATION", "pass"),
        "pinned_tokens_marked": ("np.maximum(low, pinned_bytes)", "np.maximum(low, 0)"),
        "violation_on_the_whole_tag": (
            "np.where(kinds == Kind.VIOLATION, np.minimum(high, low + 1), high)",
            "high",
        ),
        "violation_on_the_first_token": (
            "np.repeat(np.arange(first, end), lengths), end - 1",
            "np.repeat(np.arange(first, end), lengths), first",
        ),
        "one_pinned_token_at_most": ('re.compile(b"%c*(%c+)"', 're.compile(b"%c?(%c+)"'),
        "marks_not_unique": ("np.unique(np.concatenate(marks))", "np.sort(np.concatenate(marks))"),
        "structure_cut_to_whole_multiples": (
            "max(1, math.ceil(longest / multiple))",
            "max(1, longest // multiple)",
        ),
        "violations_are_padding": (
            "padded.valid[index, :n] = True",
            "padded.valid[index, :n] = kinds != Kind.VIOLATION",
        ),
    },
    (f"{_METHOD}/rewards.py", _REWARDS): {
        "think_worth_less": ("0.4 * _closes_think(turn.text)", "0.3 * _closes_think(turn.text)"),
        "open_think_rewarded": (
            "- gamma * _leaves_think_open(turn.text)",
            "+ gamma * _leaves_think_open(turn.text)",
        ),
        "cut_off_turn_keeps_its_anchor": ("return min(mean, 0.0)", "return mean"),
        "calls_side_by_side_cost_twice": (
            "sum(turn.executed_calls > 0 for turn in turns)",
            "sum(turn.executed_calls for turn in turns)",
        ),
        "refused_calls_cost": (
            "turn.executed_calls > 0 for turn in turns",
            "bool(turn.calls) for turn in turns",
        ),
        "discount_becomes_a_penalty": ("discount = max(0.0, 1.0 -", "discount = (1.0 -"),
        "order_paid_to_an_open_think": (
            "in_order = [_thinks_then_answers(texts[-1])]",
            "in_order = [True]",
        ),
        "order_setting_ignored": (
            "settings.answer_suffix, settings.tool_turn_cost > 0)",
            "settings.answer_suffix)",
        ),
        "calls_wanted_last": (
            "for turn in turns[:-1]]",
            "for turn in turns[1:]]",
        ),
        "cut_off_turn_keeps_its_format": (
            "if not turns or any(turn.truncated for turn in turns):",
            "if not turns:",
        ),
        "answer_of_the_first_turn": (
            "(extract_answer(texts[-1]) is not None)",
            "(extract_answer(texts[0]) is not None)",
        ),
        "balance_alone_is_paid": (
            "if base > 0:",
            "if base >= 0:",
        ),
        "every_call_has_to_run": (
            "0.3 if any(outcome.status.executed",
            "0.3 if all(outcome.status.executed",
        ),
        "tool_bonus_for_wrong_answers": ("+ 0.5 * right, 1.0)", "+ 0.5, 1.0)"),
        "format_below_zero": ("min(max(uncapped, 0.0), 1.0)", "min(uncapped, 1.0)"),
        "format_weight_ignored": ("settings.format_weight * r_fmt", "r_fmt"),
        "cut_off_answer_counts": (
            "if not turns or turns[-1].truncated:",
            "if not turns:",
        ),
    },
    ("train/learn/rollouts.py", _POOL): {
        "groups_of_the_first_step_reuse_seeds": (
            "seed_of(seed, step, first + n, g)",
            "seed_of(seed, step, n, g)",
        ),
    },
    ("train/learn/rl.py", _UPDATES): {
        "proximal_of_the_latest_update": (
            "settings.updates_per_batch > 1 and here.proximal is None:",
            "settings.updates_per_batch > 1:",
        ),
    },
    ("train/rl.py", ("tests/train/test_rl.py",)): {
        "version_counts_updates": (
            "int(state.step) // settings.updates_per_batch",
            "int(state.step)",
        ),
    },
    ("train/learn/packing.py", _PACKING): {
        "sample_as_long_as_a_row_left_out": ("if tokens > length:", "if tokens >= length:"),
        "exact_fit_passed_over": ("+ 1] >= tokens", "+ 1] > tokens"),
        "rows_are_never_full": ("free[row] -= tokens", "free[row] -= 0"),
    },
    ("train/learn/conversation_rows.py", _PACKED): {
        "conversations_see_one_another": (
            "write(arrays, r, begin, begin, segment, tokens)",
            "write(arrays, r, begin, begin, 1, tokens)",
        ),
        "later_frames_overwrite": (
            "vectors += [] if cached is None else [cached]",
            "vectors = vectors if cached is None else [cached]",
        ),
        "every_row_shows_the_first_frames": ("slot += visual", "slot += 0"),
        "all_tokens_in_every_micro_batch": ("index[:, number] = tokens", "index[:] = tokens"),
        "tool_tokens_trained": (
            "[r, begin:end] = trajectory.authors == Author.MODEL",
            "[r, begin:end] = trajectory.authors != Author.PROMPT",
        ),
    },
    (f"{_ENGINE}/pages.py", _PAGES): {
        "users_not_counted": ("node.users += 1", "node.users = 1"),
        "starts_older_than_their_ends": ("for node in reversed(path):", "for node in list(path):"),
        "youngest_evicted": ("next(iter(self.evictable))", "next(reversed(self.evictable))"),
        "nothing_evicted": (
            "if len(self.free_pages) + len(self.evictable) < count:",
            "if len(self.free_pages) < count:",
        ),
        "inserted_pages_not_held": ("self.hold([node])", "self.hold([])"),
        "duplicate_page_lost": (
            "self.free_pages.append(page)\n            self.hold",
            "pass\n            self.hold",
        ),
        "held_pages_evictable": ("self.evictable.pop(node, None)", "pass"),
        "last_full_page_not_matched": (
            "while end + self.size <= len(tokens)",
            "while end + self.size < len(tokens)",
        ),
        "dropped_pages_stay": ("if self._is_dropped(node):", "if node.page < 0:"),
        "part_page_added_beside_a_longer_one": (
            "_common_length(node.tokens, tokens) == len(tokens)",
            "_common_length(node.tokens, tokens) > len(tokens)",
        ),
    },
    (f"{_ENGINE}/sampling.py", _SAMPLING): {
        "every_draw_the_same": (
            "jax.random.fold_in(jax.random.key(seed), number)",
            "jax.random.key(seed)",
        ),
        "rounding_draws_impossible_words": (
            "jnp.where(sums > 0, jnp.cumsum(sums, -1), 0)",
            "jnp.cumsum(sums, -1)",
        ),
        "zero_share_draws_the_first_word": ("ends > target[:, None]", "ends >= target[:, None]"),
        "logprob_not_normalised": ("- jnp.log(total)", "- jnp.log(jnp.ones_like(total))"),
        "greedy_at_its_temperature": (
            "jnp.where(greedy, jnp.argmax(scores, -1), token), lambda: token",
            "token, lambda: token",
        ),
    },
    (f"{_ENGINE}/layout.py", _LAYOUT): {
        "family_takes_one_more": ("max(0, end - most)", "max(0, end - most - 1)"),
        "strangers_join": ("len(common) * (end - begin - 1)", "end - begin"),
        "smallest_savings_first": ("key=lambda family: -len(", "key=lambda family: len("),
    },
    (f"{_ENGINE}/sequences.py", _SCHEDULE): {
        "frames_look_alike": (
            "content[visual] = -1 - np.concatenate(pieces)",
            "content[visual] = -1",
        ),
    },
    (f"{_ENGINE}/engine.py", _SCHEDULE): {
        "last_page_missing": (
            "page_count(longest, size) - len(sequence.shared_pages)",
            "longest // size - len(sequence.shared_pages)",
        ),
        "last_prompt_token_matched": (
            "wanted = prompt.content[: prompt.prefill_length]",
            "wanted = prompt.content",
        ),
        "part_pages_not_reused": (
            "len(pages) * self.settings.page + matching",
            "len(pages) * self.settings.page",
        ),
        "common_prefix_computed_twice": (
            "if batch.computes(sequence):",
            "if batch.computes(sequence) and not sequence.missing:",
        ),
        "one_token_too_many_published": (
            "sequence.computed = sequence.prompt.prefill_length + len(sequence.drawn)",
            "sequence.computed = sequence.prompt.prefill_length + len(sequence.drawn) + 1",
        ),
        "deadline_one_look_late": (
            "if now >= sequence.prompt.deadline",
            "if now > sequence.prompt.deadline",
        ),
        "forgotten_sequences_published": ("if not sequence.forgotten:", "if sequence.prompt:"),
        "old_keys_under_new_weights": (
            "self.forget()\n        self.weights = (",
            "self.weights = (",
        ),
        "begun_tokens_of_the_new_version": (
            "np.concatenate([begun.versions, versions])",
            "np.concatenate([begun.versions * 0 + self.version, versions])",
        ),
        "frames_of_the_page_before": ('side="right"', 'side="left"'),
        "lent_pages_lost": ("self.tree.free(sequence.own_pages)", "pass"),
        "copied_page_still_held": (
            "self.tree.release([sequence.copy_source])\n"
            "                sequence.copy_source = None",
            "sequence.copy_source = None",
        ),
    },
    (f"{_ENGINE}/runner.py", _SCHEDULE): {
        "positions_stand_still": (
            "sequence.prompt.positions[0, -1] + drawn",
            "sequence.prompt.positions[0, -1]",
        ),
        "limit_counted_anew_each_step": (
            "rows.left[row] = sequence.left",
            "rows.left[row] = sampling.max_new_tokens",
        ),
        "one_seed_for_all_samples": ("request.seed % 2**32", "1"),
        "shared_pages_read_twice": ("sequence.computed - shared_tokens", "sequence.computed"),
        "guests_read_shared_pages": (
            "if beginnings[n][: len(shared)] == shared else 0",
            "",
        ),
    },
    (f"{_ENGINE}/programs.py", _SCHEDULE): {
        "written_one_offset_late": (
            "rows.offsets[:, None] + fed",
            "rows.offsets[:, None] + fed + 1",
        ),
        "draws_of_a_step_the_same": (
            "(rows.drawn[:, None] + fed)",
            "(rows.drawn[:, None] + 0 * fed)",
        ),
        "drafts_outlive_the_limit": (" & (fed < rows.left[:, None])", ""),
        "drafts_outlive_a_stop": ("jnp.cumsum(stops, axis=1) - stops == 0", "True"),
    },
    (f"{_ENGINE}/drafts.py", ("tests/rollout/engine/test_drafts.py",)): {
        "earliest_match": ("size - 1 - jnp.argmax(matching[::-1])", "jnp.argmax(matching)"),
        "later_drafts_accepted": ("jnp.cumprod(equal, axis=1)", "equal"),
    },
    ("models/attention/paged.py", ("tests/models/test_paged.py",)): {
        "token_does_not_see_itself": ("cache.offsets + 1, 0)", "cache.offsets, 0)"),
        "beyond_the_table_seen": ("jnp.where(exists, cache.offsets + 1, 0)", "cache.offsets + 1"),
        "padding_written": ("(cache.offsets >= 0) & (columns", "(columns"),
        "unseen_values_count": (
            "jnp.where(anywhere, gathered(numbers + 1), 0)",
            "gathered(numbers + 1)",
        ),
        "tokens_that_see_nothing_see_all": (
            "jnp.where(mask, jnp.exp(scores - top[..., None]), 0)",
            "jnp.exp(scores - top[..., None])",
        ),
    },
    ("train/learn/batch.py", _BATCH): {
        "rows_one_position_late": (
            "next_position(prompt.positions) + np.arange(len(ids))",
            "next_position(prompt.positions) + 1 + np.arange(len(ids))",
        ),
        "rollouts_see_each_other": (
            "write(arrays, row, end, begin, segment, suffix)",
            "write(arrays, row, end, 0, segment, suffix)",
        ),
    },
    ("train/learn/rl_batch.py", _STEP): {
        "tool_tokens_scored": (
            "trajectory.authors[first:] == Author.MODEL",
            "trajectory.authors[first:] != Author.PROMPT",
        ),
    },
    ("train/learn/update.py", _STEP): {
        "a_token_predicts_itself": ("jnp.roll(batch.ids.reshape(-1), -1)", "batch.ids"),
        "logprobs_one_to_the_left": (
            "jnp.maximum(batch.index - 1, 0)",
            "jnp.maximum(batch.index, 0)",
        ),
        "prompts_not_shared": (
            "batch.layout,",
            "batch.replace(shared=jnp.zeros_like(batch.shared)).layout,",
        ),
        "trainer_ignores_the_temperature": (
            "following, temperature, chunk",
            "following, 1.0, chunk",
        ),
    },
    ("train/learn/update.py", (*_STEP, *_PACKED)): {
        "only_the_last_part_counts": (
            "total = grads if total is None else jax.tree.map(jnp.add, total, grads)",
            "total = grads",
        ),
        "steps_not_counted": ("state.step + 1", "state.step"),
        "grad_norm_of_the_weights": (
            "optax.global_norm(grads)",
            "optax.global_norm(state.weights)",
        ),
    },
    ("train/durable/checkpoint.py", _CHECKPOINT): {
        "another_runs_checkpoint_read": (
            'record["identity"], self._identity)',
            "self._identity, self._identity)",
        ),
        "another_state_read": ("stored, described)", "described, described)"),
    },
    ("paravt_jax/data/stored.py", _CHECKPOINT): {
        "new_leaves_not_noticed": ("for name in old | new", "for name in old"),
    },
    ("rollout/agent/episode.py", _EPISODE): {
        "pinned_tokens_shared": (
            "np.flatnonzero(trajectory.authors != Author.PROMPT)",
            "np.flatnonzero(trajectory.authors == Author.MODEL)",
        ),
        "turns_share_a_seed": ("state.seed + len(state.turns)", "state.seed"),
        "sub_agents_continue_the_turns_seeds": (
            "_SEEDS_PER_TURN * (len(state.turns) + 1)",
            "len(state.turns) + 1",
        ),
        "one_call_more_carried_out": ("if number >= max_calls:", "if number > max_calls:"),
        "one_tool_turn_more": (
            "offered = len(state.turns) < state.tool_turns",
            "offered = len(state.turns) <= state.tool_turns",
        ),
        "turns_outgrow_the_trajectory": (
            "min(room, limits.turn_tokens)",
            "limits.turn_tokens",
        ),
        "prompt_cut_one_token_late": (
            "return ids[: length - 1], ids[length - 1 :]",
            "return ids[:length], ids[length:]",
        ),
    },
    (f"{_SERVE}/guard.py", ("tests/rollout/serve/test_guard.py",)): {
        "foreign_origins_only": ("[2].lower() != host.lower()", "[2].lower() == host.lower()"),
    },
    (f"{_SERVE}/files.py", _FILES): {
        "paths_outside_the_folder": ("path.is_relative_to(self._videos) and ", ""),
        "uploads_of_other_keys": ("upload is None or upload.client != client", "upload is None"),
        "uploads_in_use_expire": ("        upload.used = time.time()\n", ""),
        "pictures_in_use_make_room": ("left < 0 and upload.used < answered and", "left < 0 and"),
    },
    (f"{_SERVE}/app.py", _FILES): {
        "beginnings_of_keys": (
            "hmac.compare_digest(key, other.encode())",
            "other.encode().startswith(key)",
        ),
        "bodies_without_end": ("if size > most:", "if size > most * 1000:"),
    },
    (f"{_SERVE}/owner.py", _QUEUE): {
        "cancelled_jobs_go_on": ("self._scheduler.drop(job.number)", "pass"),
        "one_more_waits": ("if self._open >= self._episodes", "if self._open > self._episodes"),
    },
    (f"{_SERVE}/service.py", _EPISODES): {
        "ready_before_compiled": ("self.ready.is_set() and self.owner", "self.owner"),
    },
    (f"{_SERVE}/service.py", _PLAIN): {
        "stop_text_told": ("min((end for end", "min((end + 1 for end"),
        "last_logprobs": ("sample.logprobs[: len(ids)]", "sample.logprobs[-len(ids) :]"),
    },
    (f"{_SERVE}/chat_reply.py", _PLAIN): {
        "cut_replies_are_whole": ('"length" if stop in _CUT else "stop"', '"stop"'),
        "prompt_counted_per_reply": (
            "_usage(self.prompt_tokens,",
            "_usage(self.prompt_tokens * len(value),",
        ),
    },
    (f"{_SERVE}/chat_reply.py", _EPISODES): {
        "episodes_of_other_keys": ("kept is None or kept.client != client", "kept is None"),
        "replies_counted_as_prompts": (
            "for trajectory in trajectories) - written, written",
            "for trajectory in trajectories), written",
        ),
    },
    (f"{_SERVE}/chat.py", _PLAIN): {
        "seeds_ignored": ("if request.seed is None else request.seed", ""),
    },
    (f"{_SERVE}/files.py", _PLAIN): {
        "pairs_at_their_first_frame": ("times.reshape(-1, 2).mean(1)", "times[::2]"),
    },
}

_EQUIVALENT: dict[str, str] = {}
"""The reasons `Mutant.equivalent`, by name."""

MUTANTS: tuple[Mutant, ...] = tuple(
    Mutant(name, file, old, new, tests, _EQUIVALENT.get(name, ""))
    for (file, tests), faults in _TABLE.items()
    for name, (old, new) in faults.items()
)
