"""No option without a test that fails when it is ignored.

`TESTS` lists every public option with such a test, as `file::name` below `tests/`. A new option needs an entry. Seams (`clock`,
`connect`) are no options: they are what tests and the runtime put in the place of the world.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import lousho_ray
from lousho_ray import options
from lousho_ray.create import OPTIONS
from lousho_ray.errors import ConfigurationError
from lousho_ray.providers.base import HTTPProvider
from lousho_ray.tools import builtin, todo, workspace
from tests.unit.loop_support import agent_of

FOLDER = Path(__file__).parents[1]

SEAMS = frozenset({"self", "clock", "connect", "field", "unknown", "options"})

U, W = "unit/test_", "wire/test_"

RULES, AGENT, LIMITS, RETRY = (
    f"{U}option_rules.py::test_",
    f"{U}agent_options.py::test_",
    f"{U}loop_limits.py::test_",
    f"{U}retry.py::test_",
)
RUNS, STRATEGIES, DEFINE = f"{U}compaction_runs.py::test_", f"{U}compaction_strategies.py::test_", f"{U}tool_define.py::test_"
LIMITER, LIMITED, SUB = f"{U}limiter.py::test_", f"{U}limited.py::test_", f"{U}subagents_local.py::test_"
DURABLE = f"{U}durable_sessions.py::test_"
PERMISSIONS = f"{U}permissions.py::test_"
APPROVALS, SESSION_COMPACTION = f"{U}approvals.py::test_", f"{U}compaction_sessions.py::test_"
WEB, SHELL, FILES = f"{W}web_tools.py::test_", f"{U}workspace_shell.py::test_", f"{U}workspace_fs_tools.py::test_"
OPENAI, FAILURES, ANTHROPIC = f"{W}openai_calls.py::test_", f"{W}openai_failures.py::test_", f"{U}anthropic_wire.py::test_"

RUN_OPTIONS = {
    "model_settings": f"{AGENT}settings_of_a_call_win_key_by_key_for_that_run",
    "max_steps": f"{LIMITS}max_steps_of_option_and_limit",
    "instructions": f"{AGENT}instructions_of_a_call_extend_every_request_and_are_stored_nowhere",
    "reasoning": f"{AGENT}reasoning_of_a_call_replaces_the_agents",
    "metadata": f"{AGENT}functions_are_called_once_a_run_with_who_and_what",
    "principal": f"{AGENT}functions_are_called_once_a_run_with_who_and_what",
    "permission_mode": f"{PERMISSIONS}the_mode_of_one_call_is_for_that_run_alone",
    "cancel": f"{U}cancellation.py::test_a_token_gives_an_aborted_result",
}

SUMMARY = {
    "model": f"{STRATEGIES}the_turns_before_the_tail_become_one_user_message",
    "protected_tokens": f"{STRATEGIES}two_phases_only_summarize_when_pruning_was_not_enough",
    "prompt": f"{STRATEGIES}the_turns_before_the_tail_become_one_user_message",
    "max_summary_tokens": f"{STRATEGIES}the_turns_before_the_tail_become_one_user_message",
}

BROKER, SANDBOX = "wire/test_broker.py::test_", "wire/test_sandbox.py::test_"
FETCHING = {
    "timeout_ms": f"{WEB}time_covers_a_body_that_never_ends",
    "max_redirects": f"{WEB}redirects_are_followed_up_to_the_limit",
    "max_bytes": f"{WEB}body_is_cut_at_the_byte_limit",
    "max_chars": f"{WEB}page_is_cut_at_the_character_limit",
    "user_agent": f"{WEB}tools_say_who_they_are",
    "allow_private": f"{U}net_rules.py::test_listed_hosts_may_be_private",
    "allowed_hosts": f"{U}net_rules.py::test_blocked_and_allowed_hosts",
    "blocked_hosts": f"{WEB}every_hop_is_checked",
    "resolver": f"{WEB}rebinding_name_gets_no_second_lookup",
}

TOOL_OPTIONS = {
    "name": f"{DEFINE}options_are_taken_in_both_forms_of_the_decorator",
    "description": f"{DEFINE}options_are_taken_in_both_forms_of_the_decorator",
    "execute": f"{DEFINE}decorated_and_defined_tools_are_the_same_kind",
    "input": f"{DEFINE}decorated_and_defined_tools_are_the_same_kind",
    "display_name": f"{DEFINE}options_are_taken_in_both_forms_of_the_decorator",
    "needs_approval": f"{RULES}approve_decides_in_code",
    "annotations": f"{DEFINE}annotations_are_kept_as_mcp_metadata",
    "metadata": f"{DEFINE}annotations_are_kept_as_mcp_metadata",
    "edits_files": f"{DEFINE}options_are_taken_in_both_forms_of_the_decorator",
    "requires_sandbox": f"{U}tool_execute.py::test_tool_that_needs_a_sandbox_is_never_run_without_one",
    "sandbox_execute": f"{U}tool_execute.py::test_sandboxed_function_gets_arguments_sandbox_and_context",
    "max_calls_per_run": f"{U}hook_rules.py::test_a_capped_tool_is_denied_past_its_cap_and_told_to_use_what_it_has",
    "effect": f"{DURABLE}a_once_only_call_is_not_repeated_after_a_failure",
    "ray_options": "ray/test_tool_tasks.py::test_a_call_is_a_task_with_the_resources_that_were_asked_for",
}

TESTS: dict[str, dict[str, str]] = {
    "with_span": dict.fromkeys(
        ("exporter", "name", "attributes", "fn", "parent_id", "kind", "trace_id"),
        f"{U}spans.py::test_with_span_tells_of_a_span_around_a_function",
    ),
    "create_agent": {
        "model": f"{AGENT}a_model_next_to_a_provider_is_a_bare_id",
        "provider": f"{AGENT}a_model_next_to_a_provider_is_a_bare_id",
        "instructions": f"{RULES}shared_options_are_a_dict_and_later_keys_win",
        "prompt": f"{AGENT}prompt_is_a_deprecated_alias",
        "tools": f"{AGENT}forms_of_tools",
        "name": f"{RULES}a_name_may_hold_any_characters",
        "description": f"{SUB}the_prompt_lists_the_subagents_and_the_agent_itself_is_not_changed",
        "max_steps": f"{RULES}the_smaller_of_both_step_limits_wins",
        "model_settings": f"{RULES}every_model_setting_reaches_the_request",
        "limits": f"{LIMITS}a_limit_trips_when_it_is_reached",
        "tool_concurrency": f"{U}batch.py::test_tool_concurrency_caps_calls_in_flight",
        "subagents": f"{SUB}the_prompt_lists_the_subagents_and_the_agent_itself_is_not_changed",
        "max_subagent_depth": f"{SUB}the_top_levels_depth_rules_the_whole_tree",
        "store": f"{U}sessions_local.py::test_the_agents_store_is_the_default_and_a_sessions_own_wins",
        "auto_resume": "ray/test_sessions_ray.py::test_a_turn_of_a_killed_actor_waits_to_be_resumed_where_that_is_asked_for",
        "store_timeout_ms": f"{U}session_stores.py::test_a_save_that_hangs_is_tried_three_times_and_fails_the_turn",
        "session_wait_ms": f"{RULES}a_turn_waits_for_another_process_no_longer_than_session_wait_ms",
        "approval_store": f"{RULES}each_part_of_a_store_is_a_default_of_its_own",
        "permissions": f"{PERMISSIONS}the_first_rule_that_matches_decides",
        "permission_mode": f"{PERMISSIONS}plan_mode_reads_and_changes_nothing",
        "on_permission_decision": f"{PERMISSIONS}each_decision_is_told_once_and_before_the_call_runs",
        "on_permission_mode_change": f"{PERMISSIONS}switches_of_the_mode_are_told",
        "approval_ttl_ms": f"{RULES}an_approval_after_its_time_denies_the_call",
        "on_agent_drift": f"{DURABLE}a_drifted_agent_is_refused_under_error_and_the_right_one_can_still_take_the_turn",
        "approve": f"{RULES}approve_decides_in_code",
        "ask_question": f"{RULES}ask_question_offers_the_tool_and_pauses_for_the_answer",
        "project_instructions": f"{U}project_instructions.py::test_the_block_follows_the_instructions_and_is_read_once",
        "retry": f"{AGENT}another_provider_is_only_retried_when_asked",
        "fallback_models": f"{AGENT}fallbacks_are_tried_in_order_and_every_call_starts_at_the_first",
        "rate_limit": f"{SUB}a_hundred_children_share_the_leads_limiter",
        "reasoning": f"{AGENT}reasoning_of_a_call_replaces_the_agents",
        "prompt_caching": f"{RULES}prompt_caching_goes_with_every_request",
        "hooks": f"{U}hooks.py::test_hooks_run_in_list_order_each_awaited_before_the_next",
        "compaction": f"{U}hook_rules.py::test_compaction_sees_what_the_hooks_added_wherever_they_stand",
        "output": f"{RULES}output_gives_the_validated_object",
        "output_validate": f"{RULES}output_validate_sends_its_issues_back_once",
        "output_prompt": f"{RULES}output_prompt_decides_whether_the_schema_stands_in_the_prompt",
        "abort_grace_ms": f"{U}batch.py::test_abort_grace_leaves_a_stubborn_tool_behind",
        "max_tool_result_chars": f"{U}batch.py::test_results_are_encoded_and_capped",
        "spill_tool_results": f"{U}tool_spill.py::test_a_cut_result_names_a_handle_by_which_its_rest_is_read",
        "exporter": f"{U}run_spans.py::test_a_run_has_a_span_for_itself_each_model_call_and_each_tool",
        "capture_content": f"{U}run_spans.py::test_content_is_recorded_when_it_is_asked_for",
        "redact_content": f"{U}run_spans.py::test_arguments_are_in_decisions_unless_content_is_left_out",
        "on_run_end": f"{U}run_end.py::test_a_run_that_returns_is_told_with_its_result",
        "on_event": f"{U}loop_events.py::test_listeners_get_what_a_stream_gets_and_streams_what_send_does",
        "runtime": f"{AGENT}the_runtime_comes_from_the_option_then_the_environment",
    },
    "agent.send": {
        **RUN_OPTIONS,
        "session_id": f"{RULES}a_run_with_a_session_id_goes_on_where_it_was",
        "business_state": f"{U}durable_runs.py::test_business_state_of_an_unfinished_run",
    },
    "session.send": RUN_OPTIONS,
    "agent.session": {
        "id": f"{U}sessions_local.py::test_an_id_is_a_uuid_unless_given",
        "store": f"{U}sessions_local.py::test_the_agents_store_is_the_default_and_a_sessions_own_wins",
        "checkpoint_store": f"{U}session_stores.py::test_each_part_is_taken_from_the_nearest_that_has_it",
        "turn_policy": f"{U}sessions_local.py::test_a_queued_call_joins_the_running_turn",
        "compaction": f"{RULES}a_session_has_its_own_compaction",
        "limits": f"{U}session_limits.py::test_a_session_stops_at_its_limit_and_a_reopened_one_too",
        "permission_mode": f"{PERMISSIONS}a_switch_holds_from_the_next_call_of_a_running_turn",
    },
    "approvals.resolve": {
        "id": f"{APPROVALS}an_unknown_or_decided_approval_is_not_found",
        "approved": f"{APPROVALS}a_rejected_call_does_not_run_and_the_model_reads_the_note",
        "note": f"{APPROVALS}a_rejected_call_does_not_run_and_the_model_reads_the_note",
        "by": f"{APPROVALS}some_calls_are_decided_by_somebody_else",
        "args": f"{APPROVALS}edited_arguments_run_and_the_model_reads_the_edit",
        "remember": f"{APPROVALS}a_decision_may_count_for_later_calls",
    },
    "session.compact": {
        "strategy": f"{SESSION_COMPACTION}the_strategy_is_that_of_the_call_else_of_the_session_else_of_the_agent_else_pruning",
        "protected_tokens": f"{SESSION_COMPACTION}a_session_is_compacted_by_hand_whatever_its_size",
    },
    "session.fork": {
        "from_step": f"{U}durable_history.py::test_a_fork_keeps_what_was_up_to_a_step",
        "id": f"{U}durable_history.py::test_forks_get_the_first_free_id",
        "patch": f"{U}durable_history.py::test_a_fork_can_replace_a_result",
    },
    "agent.fork": {
        "id": f"{U}durable_runs.py::test_a_fork_runs_on_from_a_step_and_leaves_the_source_alone",
        "from_step": f"{U}durable_runs.py::test_a_fork_runs_on_from_a_step_and_leaves_the_source_alone",
        "patch": f"{U}durable_runs.py::test_a_fork_runs_on_from_a_step_and_leaves_the_source_alone",
        "new_session_id": f"{U}durable_runs.py::test_a_fork_runs_on_from_a_step_and_leaves_the_source_alone",
    },
    "ModelSettings": dict.fromkeys(options.ModelSettings.model_fields, f"{RULES}every_model_setting_reaches_the_request"),
    "Limits": {
        "max_tokens": f"{LIMITS}a_limit_trips_when_it_is_reached",
        "max_input_tokens": f"{LIMITS}a_limit_trips_when_it_is_reached",
        "max_output_tokens": f"{LIMITS}a_limit_trips_when_it_is_reached",
        "max_cost_usd": f"{LIMITS}cost_is_what_the_price_table_says",
        "max_duration_ms": f"{LIMITS}the_deadline_interrupts_a_model_call",
        "max_tool_errors": f"{LIMITS}tool_errors_stop_the_run_before_its_next_model_call",
        "max_steps": f"{RULES}the_smaller_of_both_step_limits_wins",
        "on_exceeded": f"{LIMITS}throw_raises_with_the_budget_and_the_usage",
        "reserve": f"{U}budget_reserve.py::test_parallel_subagents_do_not_pass_the_limit_at_all_when_the_estimate_holds",
    },
    "RateLimits": {
        "requests_per_minute": f"{LIMITER}calls_wait_for_the_window_and_start_when_it_opens",
        "tokens_per_minute": f"{LIMITER}settling_lower_admits_waiting_calls_at_once",
        "max_concurrent": f"{LIMITER}release_admits_the_next_at_once_and_once",
    },
    "Retry": {
        "max_retries": f"{AGENT}another_provider_is_only_retried_when_asked",
        "backoff": f"{RETRY}delays_double_up_to_the_cap_and_jitter_stays_within_a_quarter",
        "retry_on": f"{RETRY}retry_on_replaces_the_rule",
        "on_retry": f"{RETRY}the_notice_comes_before_the_delay_and_says_the_delay_really_used",
        "timeout_ms": f"{RETRY}timeout_bounds_each_attempt_of_generate",
        "idle_timeout_ms": f"{RETRY}idle_timeout_bounds_the_gap_between_chunks_and_is_retried_only_before_output",
        "cancel": f"{RETRY}the_cancel_option_ends_delay_attempt_and_stream",
    },
    "Backoff": {
        "initial_ms": f"{RETRY}delays_double_up_to_the_cap_and_jitter_stays_within_a_quarter",
        "max_ms": f"{RETRY}delays_double_up_to_the_cap_and_jitter_stays_within_a_quarter",
    },
    "Compaction": {
        "strategy": f"{U}hook_rules.py::test_compaction_sees_what_the_hooks_added_wherever_they_stand",
        "threshold_percent": f"{STRATEGIES}the_bounds_come_from_the_option_the_provider_or_the_model",
        "context_window": f"{STRATEGIES}the_bounds_come_from_the_option_the_provider_or_the_model",
        "protected_tokens": f"{STRATEGIES}the_bounds_come_from_the_option_the_provider_or_the_model",
        "reserve_output_tokens": f"{STRATEGIES}the_bounds_come_from_the_option_the_provider_or_the_model",
        "on_compaction": f"{RUNS}a_run_is_pruned_before_the_call_that_would_be_too_large",
        "summarizer": f"{RUNS}a_summary_is_a_side_call_of_the_run",
        "preview_chars": f"{RUNS}a_marker_shows_what_the_preview_option_says",
        "memoize_tools": f"{RUNS}a_repeated_read_is_answered_from_its_earlier_result_until_something_was_written",
    },
    "ReasoningOptions": {
        "effort": f"{U}options.py::test_reasoning_is_an_effort_or_a_dict",
        "budget_tokens": f"{ANTHROPIC}thinking_budgets_come_on_top_of_max_tokens",
        "summary": f"{RULES}a_reasoning_summary_is_asked_for_when_wanted",
        "force": f"{ANTHROPIC}models_that_do_not_think_are_not_asked_to_unless_forced",
    },
    "ProjectInstructionsOptions": {
        "cwd": f"{U}project_instructions.py::test_the_block_follows_the_instructions_and_is_read_once",
        "files": f"{RULES}project_instructions_are_read_from_the_files_named",
    },
    "HTTPProvider": {
        "api_key": f"{OPENAI}keys_and_client_headers_reach_the_server_and_the_client_never_retries",
        "base_url": f"{OPENAI}keys_and_client_headers_reach_the_server_and_the_client_never_retries",
        "default_model": f"{W}pi_calls.py::test_the_default_model_goes_to_its_provider",
        "max_retries": f"{W}resilience.py::test_two_retries_are_at_most_three_requests",
        "timeout_ms": f"{FAILURES}every_wait_has_a_limit",
        "connect_timeout_ms": f"{RULES}account_options_of_openai_and_the_wait_for_a_connection_reach_the_client",
        "idle_timeout_ms": f"{FAILURES}every_wait_has_a_limit",
        "progress_timeout_ms": f"{FAILURES}every_wait_has_a_limit",
        "headers": f"{OPENAI}keys_and_client_headers_reach_the_server_and_the_client_never_retries",
        "context_window": f"{RUNS}the_window_a_provider_states_counts",
        "unsupported_files": f"{OPENAI}a_file_the_server_cannot_carry_is_refused_before_any_request",
    },
    "OpenAIProvider": {
        "api": f"{OPENAI}a_turn_with_tools_passes_the_strict_rules_of_both_apis",
        "organization": f"{RULES}account_options_of_openai_and_the_wait_for_a_connection_reach_the_client",
        "project": f"{RULES}account_options_of_openai_and_the_wait_for_a_connection_reach_the_client",
    },
    "AnthropicProvider": {"structured_outputs": f"{ANTHROPIC}a_response_format_is_sent_only_with_structured_outputs"},
    "OllamaProvider": {},
    "OpenRouterProvider": {},
    "OpenAICompatibleProvider": {
        "name": f"{RULES}a_compatible_server_gets_the_response_format_that_it_enforces",
        "stream_usage": f"{RULES}a_compatible_server_is_asked_for_the_usage_of_streams_unless_it_refuses_that",
        "structured_outputs": f"{RULES}a_compatible_server_gets_the_response_format_that_it_enforces",
        "call_ids": f"{OPENAI}call_ids_of_other_providers_are_made_legal_and_stay_pairs",
    },
    "PiProvider": {},
    "MockProvider": {
        "responses": f"{U}mock.py::test_canned_texts_come_in_turn_and_again",
        "policy": f"{RULES}the_mock_provider_answers_by_its_policy_and_takes_its_time",
        "default_model": f"{U}mock.py::test_the_mock_provider_reports_the_model_it_was_asked_for",
        "delay_ms": f"{RULES}the_mock_provider_answers_by_its_policy_and_takes_its_time",
    },
    "with_retry": {
        "provider": f"{RETRY}two_retries_are_the_default",
        "retry": f"{RETRY}retry_on_replaces_the_rule",
        "jitter": f"{RETRY}delays_double_up_to_the_cap_and_jitter_stays_within_a_quarter",
    },
    "with_fallback": {
        "providers": f"{U}fallback.py::test_the_first_provider_that_answers_serves_the_call",
        "fallback_on": f"{U}fallback.py::test_fallback_on_decides_in_place_of_any_failure",
        "on_fallback": f"{U}fallback.py::test_the_first_provider_that_answers_serves_the_call",
    },
    "with_rate_limit": {
        "provider": f"{LIMITED}calls_share_the_slots_of_one_limiter_and_wait_their_turn",
        "limits": f"{LIMITED}calls_share_the_slots_of_one_limiter_and_wait_their_turn",
        "estimator": f"{LIMITED}the_estimator_can_be_replaced",
    },
    "create_rate_limiter": {
        "limits": f"{LIMITER}release_admits_the_next_at_once_and_once",
        "name": f"{LIMITER}equal_limits_share_nothing_and_equal_names_everything",
    },
    "memory_store": {"history_limit": f"{U}store_parts.py::test_history_limit_holds_for_every_store"},
    "file_store": {
        "dir": f"{U}file_stores.py::test_each_folder_appears_at_its_first_write",
        "history_limit": f"{U}store_parts.py::test_history_limit_holds_for_every_store",
        "fsync": f"{U}file_stores.py::test_saves_reach_the_disk_file_and_folder",
    },
    "SqliteStore": {
        "path": f"{U}sqlite_file.py::test_missing_folders_are_created_with_the_file",
        "history_limit": f"{U}store_parts.py::test_history_limit_holds_for_every_store",
    },
    "FileSessionStore": {
        "dir": f"{U}error_table.py::test_a_code_is_raised_with_its_class_and_fields_and_names_the_culprit",
        "fsync": f"{U}file_stores.py::test_saves_reach_the_disk_file_and_folder",
    },
    "ray_store": {
        "url": f"{U}store_parts.py::test_urls_name_files_and_memory",
        "history_limit": f"{U}store_parts.py::test_urls_name_files_and_memory",
    },
    "define_tool": TOOL_OPTIONS,
    "create_compaction_hook": {"more": f"{RUNS}the_hook_by_itself_does_what_the_option_does_and_keeps_runs_apart"},
    "prune_tool_results_strategy": {
        "protected_tokens": f"{RULES}a_pruning_strategy_protects_what_it_is_told_to",
        "preview_chars": f"{STRATEGIES}a_preview_shows_the_arguments_and_the_first_characters",
    },
    "summarize_strategy": SUMMARY,
    "two_phase_strategy": {**SUMMARY, "preview_chars": f"{RULES}a_pruning_strategy_protects_what_it_is_told_to"},
    "load_project_instructions": {
        "cwd": f"{U}project_instructions.py::test_the_nearest_folder_with_a_file_wins_and_in_it_the_first_name",
        "files": f"{U}project_instructions.py::test_the_nearest_folder_with_a_file_wins_and_in_it_the_first_name",
        "stop_at": f"{U}project_instructions.py::test_the_walk_ends_at_the_folder_with_git_and_at_stop_at",
        "max_chars": f"{U}project_instructions.py::test_long_text_is_cut_and_bad_bytes_are_replaced",
    },
    "create_web_fetch_tool": FETCHING,
    "create_http_tool": {
        **FETCHING,
        "sandbox": "wire/test_sandboxed_http.py::test_program_connects_to_the_address_that_was_checked_here",
    },
    "create_credential_broker": {
        "rules": f"{BROKER}path_form_goes_to_https_with_the_headers_of_the_host",
        "allow": f"{BROKER}other_hosts_get_403_before_a_lookup_and_a_connection",
        "allow_private": f"{BROKER}private_targets_are_refused_unless_listed",
        "resolver": f"{BROKER}name_is_looked_up_once_and_the_connection_goes_to_that_address",
        "timeout_ms": f"{BROKER}server_that_is_silent_or_away_is_an_answer",
    },
    "SubprocessSandbox": {
        "network": f"{SANDBOX}without_network_a_program_reaches_nothing",
        "broker": f"{BROKER}sandbox_reaches_only_allowed_hosts_and_only_through_the_broker",
        "cwd": f"{SANDBOX}result_is_that_of_the_program",
    },
    "SandboxShell": {
        "adapter": f"{SANDBOX}shell_tool_runs_in_a_sandbox",
        "cwd": f"{SANDBOX}shell_tool_runs_in_a_sandbox",
        "env": f"{SANDBOX}shell_tool_runs_in_a_sandbox",
    },
    "create_todo_tools": {
        "store": f"{U}tool_todo.py::test_store_and_listener_may_be_async",
        "on_change": f"{U}tool_todo.py::test_store_and_listener_may_be_async",
    },
    "create_fs_tools": {
        "fs": f"{FILES}lines_are_numbered",
        "read_only": f"{FILES}tools_and_their_marks",
        "max_read_lines": f"{FILES}cut_output_says_how_to_go_on",
        "max_output_chars": f"{FILES}cut_output_says_how_to_go_on",
        "max_results": f"{FILES}searches_are_bounded",
        "max_files_scanned": f"{FILES}searches_are_bounded",
        "ignore": f"{FILES}glob_finds_sorted_paths",
        "protect": f"{FILES}protected_paths_are_not_written",
        "needs_approval": f"{FILES}approval_is_asked_per_tool",
        "checkpoints": f"{U}workspace_checkpoints.py::test_rewind_restores_deletes_and_forgets",
    },
    "create_shell_tool": {
        "shell": f"{SHELL}command_runs_in_the_workspace",
        "name": f"{SHELL}command_runs_in_the_folder_given",
        "needs_approval": f"{SHELL}approval_is_asked_by_default",
        "allow": f"{SHELL}string_in_allow_admits_simple_commands_only",
        "deny": f"{SHELL}deny_looks_at_every_part",
        "default_timeout_ms": f"{SHELL}command_without_a_limit_of_its_own_gets_the_default_one",
        "max_timeout_ms": f"{SHELL}time_limit_kills_everything_the_command_started",
        "max_output_chars": f"{SHELL}output_keeps_head_and_tail",
        "cwd": f"{SHELL}command_runs_in_the_folder_given",
        "env": f"{SHELL}command_gets_only_harmless_variables",
        "inherit_env": f"{SHELL}command_gets_only_harmless_variables",
    },
    "WorkspaceCheckpoints": {
        "fs": f"{U}workspace_checkpoints.py::test_rewind_restores_deletes_and_forgets",
        "max_turns": f"{U}workspace_checkpoints.py::test_old_turns_are_dropped_and_cannot_be_gone_back_to",
        "max_file_bytes": f"{U}workspace_checkpoints.py::test_large_file_is_never_restored_nor_deleted",
        "store": f"{U}workspace_checkpoints.py::test_disk_keeps_modes_directories_and_backups",
    },
}


def allowed(refuse: Callable[..., Any]) -> set[str]:
    """What a call takes, as the error for an unknown keyword lists it."""
    with pytest.raises(ConfigurationError) as caught:
        refuse(nonsense=1)
    listed = re.search(r"Allowed: (.*)\.$", caught.value.detail)
    assert listed is not None
    return set(listed[1].split(", "))


def parameters(call: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(call).parameters) - SEAMS


async def existing() -> dict[str, set[str]]:
    """Every public option, by what takes it."""
    agent = agent_of("never")
    common = parameters(HTTPProvider.__init__)
    found = {
        "create_agent": set(OPTIONS),
        "agent.send": allowed(lambda **given: agent.stream("Hi", **given)),
        "session.send": allowed(lambda **given: agent.session().stream("Hi", **given)),
        "agent.session": allowed(agent.session) | {"id"},
        "approvals.resolve": parameters(agent.approvals.resolve),
        "session.compact": parameters(agent.session().compact),
        "session.fork": parameters(agent.session().fork),
        "agent.fork": parameters(agent.fork),
        "HTTPProvider": common,
    }
    for model in ("ModelSettings", "Limits", "RateLimits", "Retry", "Backoff", "Compaction", "ReasoningOptions"):
        found[model] = set(getattr(options, model).model_fields)
    found["ProjectInstructionsOptions"] = set(options.ProjectInstructionsOptions.model_fields)
    for name in lousho_ray.__all__:
        if name.endswith("Provider") and name != "LLMProvider":
            kind = getattr(lousho_ray, name)
            found[name] = parameters(kind.__init__) - (common if issubclass(kind, HTTPProvider) else set())
    for call in (*_public_calls(), builtin.create_web_fetch_tool, builtin.create_http_tool, todo.create_todo_tools):
        found[call.__name__] = parameters(call)
    for name in ("create_fs_tools", "create_shell_tool", "create_credential_broker"):
        found[name] = parameters(getattr(workspace, name))
    for kind in (workspace.WorkspaceCheckpoints, workspace.SubprocessSandbox, workspace.SandboxShell):
        found[kind.__name__] = parameters(kind.__init__)
    for kind in (lousho_ray.SqliteStore, lousho_ray.FileSessionStore):
        found[kind.__name__] = parameters(kind.__init__)
    return found


def _public_calls() -> Iterator[Callable[..., Any]]:
    """The public functions that make something with options."""
    makes = re.compile(r"with_|create_(?!agent$)|define_tool$|load_|.*_(store|strategy)$")
    for name in lousho_ray.__all__:
        if makes.match(name):
            yield getattr(lousho_ray, name)


@cache
def names_of_tests() -> frozenset[str]:
    """Every test there is, as `file::name`."""
    return frozenset(
        f"{path.relative_to(FOLDER).as_posix()}::{node.name}"
        for path in FOLDER.rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


async def test_every_public_option_has_a_test_that_fails_when_it_is_ignored() -> None:
    # LES-04
    listed = {owner: set(tests) for owner, tests in TESTS.items()}
    assert await existing() == listed


@pytest.mark.parametrize("owner", TESTS)
def test_the_tests_that_are_named_exist(owner: str) -> None:
    # LES-04
    assert set(TESTS[owner].values()) - names_of_tests() == set()
