"""Each promise of the project (its laws, what README and SECURITY.md say) names the tests that hold it, and they are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ATTACKS, SERVER = "tests/core/security", "tests/plugins/server"
SECURITY: dict[str, tuple[str, ...]] = {
    "An agent's API key opens little.": (
        f"{SERVER}/security/test_attacks.py::test_the_agents_key_opens_no_route_of_the_control_api",
        f"{SERVER}/security/test_attacks.py::test_an_attack_gets_what_the_table_says",
        "tests/core/gateway/test_access.py",
        "tests/core/gateway/test_every_dialect.py::test_a_key_that_was_refused_once_reaches_no_policy_server_again",
        "tests/plugins/server/test_auth.py::test_the_agents_key_of_a_rollout_is_no_token",
    ),
    "Tokens of the control API are scoped, hashed, and can be taken back.": (
        "tests/plugins/server/test_auth.py::test_a_scope_is_what_it_says",
        "tests/plugins/server/test_auth.py::test_only_an_admin_is_for_all_projects",
        "tests/plugins/server/test_auth.py::test_no_secret_is_kept_logged_or_repeated",
        "tests/plugins/server/test_auth.py::test_a_token_ends_when_its_time_is_over",
        "tests/plugins/server/test_auth.py::test_a_revoked_token_is_refused_by_every_server_within_a_second",
        f"{SERVER}/security/test_attacks.py::test_an_attack_gets_what_the_table_says",
    ),
    "Projects are kept apart.": (
        f"{SERVER}/security/test_projects.py::test_every_method_of_the_store_has_a_rule",
        f"{SERVER}/security/test_projects.py::test_what_is_anothers_answers_as_what_never_was",
        f"{SERVER}/security/test_projects.py::test_nothing_that_one_project_does_is_seen_by_another",
    ),
    "The servers' own secrets are told to nobody.": (
        f"{SERVER}/security/test_projects.py::test_secrets_are_told_to_nobody",
    ),
    "Servers bind loopback by default": (
        f"{SERVER}/security/test_exposure.py::test_every_default_address_is_loopback",
        f"{SERVER}/security/test_exposure.py::test_a_public_bind_is_refused_without_a_token",
        f"{SERVER}/security/test_exposure.py::test_a_server_asks_before_it_listens",
        "tests/core/policy_server/test_vllm_arguments.py",
    ),
    "vLLM's control routes answer their owner alone.": (
        "tests/core/policy_server/test_owner_secret.py::test_control_routes_answer_nobody_without_the_secret",
        "tests/core/policy_server/test_vllm.py::test_its_control_routes_answer_its_owner_alone",
    ),
    "Pages of other sites cannot reach a server on loopback.": (
        f"{ATTACKS}/test_limits.py::test_a_server_on_loopback_answers_to_its_names_only",
        f"{SERVER}/security/test_attacks.py::test_an_attack_gets_what_the_table_says",
    ),
    "One client cannot take the port from the others.": (
        f"{SERVER}/security/test_limits.py::test_a_slow_client_is_cut_off",
        f"{SERVER}/security/test_limits.py::test_headers_without_end_are_cut_off",
        f"{SERVER}/security/test_limits.py::test_a_client_that_leaves_its_answer_unread_is_cut_off",
        f"{SERVER}/security/test_limits.py::test_a_token_has_its_share_of_requests_and_others_have_theirs",
        f"{SERVER}/security/test_limits.py::test_trying_tokens_quickly_ends_soon_and_disturbs_no_good_one",
        "tests/adapters/otel/test_tracing_ingest.py::test_who_sends_no_token_can_bring_little",
        "tests/adapters/otel/test_tracing_ingest.py::test_few_requests_without_a_token_are_read_at_a_time",
        f"{SERVER}/security/test_attacks.py::test_an_attack_gets_what_the_table_says",
    ),
    "What others send is counted before it is parsed.": (
        "tests/core/test_memory_budget.py",
        f"{ATTACKS}/test_limits.py::test_a_body_is_counted_in_values_as_it_arrives",
        f"{ATTACKS}/test_limits.py::test_one_token_holds_half_of_the_memory_and_leaves_room_for_others",
        "tests/plugins/sandbox/test_hostile_agents.py::test_a_report_that_would_fill_the_runners_memory_is_not_parsed",
        f"{ATTACKS}/test_redaction.py::test_four_times_the_text_takes_about_four_times_as_long",
    ),
    "Requests do not choose where calls go.": (
        f"{ATTACKS}/test_upstreams.py::test_no_request_chooses_the_upstream",
        f"{SERVER}/security/test_upstreams.py::test_an_address_in_the_store_that_is_not_allowed_is_never_connected_to",
        f"{ATTACKS}/test_upstreams.py::test_redirects_are_not_followed",
        f"{ATTACKS}/test_upstreams.py::test_a_health_check_follows_no_redirect",
        f"{ATTACKS}/test_upstreams.py::test_no_credential_of_an_agent_is_passed_on",
    ),
    "Credentials are not stored.": (
        f"{ATTACKS}/test_redaction.py::test_no_credential_of_a_run_lies_in_its_database_or_in_a_log",
        f"{ATTACKS}/test_redaction.py::test_what_looks_like_a_credential_is_left_out",
        f"{ATTACKS}/test_redaction.py::test_a_plugin_is_asked_of_every_text",
        f"{ATTACKS}/test_redaction.py::test_a_plugin_that_fails_costs_the_text_and_not_the_secret",
    ),
    "No text steers your terminal.": (
        "tests/core/cli/test_output.py::test_whatever_is_printed_is_shown_and_not_obeyed",
        "tests/core/cli/test_output.py::test_logs_are_shown_and_not_obeyed",
        "tests/core/cli/test_output.py::test_no_command_lets_a_store_steer_the_terminal",
        "tests/plugins/resources/test_command.py::test_no_command_lets_a_store_steer_the_terminal",
        "tests/plugins/resources/test_command.py::test_a_file_gets_a_content_as_it_is_and_a_terminal_does_not",
    ),
    "A server is believed nothing.": (
        "tests/plugins/server/test_pull.py::test_a_hostile_answer_is_one_line_of_error",
        "tests/plugins/server/test_pull.py::test_no_byte_is_written_that_was_not_announced",
        "tests/plugins/server/test_pull.py::test_a_disk_is_not_filled",
        "tests/plugins/server/test_http_store.py::test_an_answer_without_end_is_not_kept_in_memory",
    ),
    "No pickle on the wire or in what is kept.": (
        f"{ATTACKS}/test_files.py::test_only_the_packing_of_agents_knows_pickle",
        f"{ATTACKS}/test_files.py::test_only_processes_of_agents_unpack_them",
        f"{ATTACKS}/test_files.py::test_nothing_loads_what_may_hold_code",
    ),
    "Files that data names stay in their folder": (
        "tests/plugins/prompts/test_files.py::test_a_name_leads_below_its_root_or_to_an_error",
        "tests/plugins/prompts/test_files.py::test_symbolic_links_are_refused",
        "tests/plugins/prompts/test_files.py::test_a_component_writes_its_prompt_in_the_runs_folder_only",
    ),
    "The record of a run configures nothing on your machine.": (
        "tests/plugins/branching/test_branch.py::test_the_record_of_a_run_names_nothing_that_this_machine_opens_or_runs",
        (
            "tests/plugins/branching/test_retrain.py::"
            "test_the_record_of_a_run_names_no_host_and_no_module_of_the_workers_that_train_it_again"
        ),
    ),
    "A program in a Harbor task sees neither the tests, other tasks, nor other rollouts": (
        "tests/plugins/command/test_harbor.py::test_other_tasks_rollouts_and_the_machine_s_tmp_are_not_there",
    ),
    "A task's text is an argument and never an option": (
        "tests/plugins/command/test_template.py::test_a_task_gives_a_program_no_option",
    ),
    "The console's token is in no command line.": (
        (
            "tests/plugins/console/test_command.py::"
            "test_a_browser_is_given_a_file_that_nobody_else_reads_and_a_token_for_one_use"
        ),
        "tests/plugins/console/test_gate.py::test_a_token_for_one_use_opens_the_console_once_also_from_a_file",
    ),
    "Nothing is acknowledged into a database file that was moved, removed or replaced.": (
        "tests/core/store/test_sqlite.py::test_nothing_is_acknowledged_into_a_file_that_is_not_at_its_place",
    ),
    "Agents can be kept in a sandbox": (
        "tests/plugins/sandbox/test_hostile_agents.py::test_an_attack",
        "tests/plugins/sandbox/test_sandbox.py::test_a_burglar_finds_nothing",
        "tests/plugins/sandbox/test_sandbox.py::test_a_burglar_who_waits_for_the_first_run_finds_nothing",
        "tests/plugins/sandbox/test_sandbox.py::test_hidden_folders_are_made_before_somebody_else_makes_them",
        "tests/plugins/sandbox/test_sandbox.py::test_agents_do_not_get_the_token_of_their_runner",
        "tests/plugins/sandbox/test_house.py::test_a_sandbox_that_nothing_here_could_be_is_refused",
        "tests/plugins/server/test_remote_runner.py::test_a_sandbox_for_agents_of_clients_is_theirs",
        "tests/plugins/sandbox/test_house.py::test_agents_in_a_sandbox_see_neither_the_run_nor_its_store",
    ),
}
LAWS: dict[str, tuple[str, ...]] = {
    "Tokens come only from the engine; names come only from the adapter; they meet in the gateway's record.": (
        "tests/core/gateway/test_calls.py::test_ids_are_exactly_the_ones_vllm_returned",
        "tests/core/gateway/test_real_dialects.py::test_ids_are_the_engines_where_the_text_would_give_others",
        "core/lightning/testing/adapter_contract.py::test_every_call_is_named",
        "tests/e2e/test_real_model.py::test_two_steps_of_it_train_exactly_what_vllm_sampled",
    ),
    "Fragmentation invariance.": (
        "tests/core/batch/test_weights.py::test_merging_changes_no_weight",
        "tests/core/engines/test_invariance.py::test_rows_order_and_microbatches_do_not_matter",
        "tests/core/engines/test_invariance.py::test_every_kind_of_step_has_one_gradient",
    ),
    "Shared prefixes are stored once.": (
        "tests/core/store/test_sqlite.py::test_shared_prefixes_are_stored_once",
        "tests/plugins/redis/test_store.py::test_shared_prefixes_are_stored_once",
        "tests/core/engines/test_tree.py::test_a_tree_computes_each_shared_token_once_and_sees_every_call",
    ),
    "Exactly once.": (
        "tests/core/gateway/test_streaming.py::test_the_last_bytes_leave_after_the_append",
        "tests/core/store/test_processes.py::test_what_was_acknowledged_survives_kill_9",
        "tests/core/store/test_contract.py::test_an_expired_lease_is_taken_over_and_its_holder_fenced",
        "tests/core/store/test_contract.py::test_a_rollout_enters_one_step_only",
        "tests/core/store/test_contract.py::test_a_declared_reuse_enters_as_many_steps_as_its_limit_says",
        "tests/core/store/test_contract.py::test_of_two_steps_that_reuse_a_rollout_at_once_one_is_refused",
        "tests/plugins/proof/test_reuse.py::test_each_violation_that_is_planted_is_found",
        "tests/core/trainer/test_loop.py::test_wherever_it_is_cut_a_resume_finishes_exactly_once",
        "tests/chaos/test_campaign.py::test_nothing_is_lost_invented_or_done_twice_whatever_is_killed",
    ),
    "A failed rollout is data, not a crash, and never a reward of 0.": (
        "tests/core/regressions/test_peer_faults.py::test_a_failure_has_no_reward",
        "tests/core/algorithms/test_lightning_rl.py::test_failed_rollouts_are_absent_not_zero",
        "tests/core/trainer/test_loop.py::test_failed_rollouts_are_counted_and_the_rest_is_trained",
        "tests/core/store/test_contract.py::test_infrastructure_faults_are_retried_then_fail",
    ),
    "The agent cannot cheat.": SECURITY["An agent's API key opens little."],
    "No silent change of behaviour.": (
        "tests/core/gateway/test_calls.py::test_unknown_fields_and_tools_pass_through_untouched",
        "tests/core/gateway/test_calls.py::test_who_decides_on_sampling",
        "tests/core/gateway/test_updates.py::test_a_request_that_arrives_during_an_update_waits",
        "core/lightning/testing/adapter_contract.py::test_agent_is_unchanged",
    ),
    "A branch begins as its parent did, or is void.": (
        "tests/plugins/branching/test_branches.py::test_only_what_follows_is_sampled_and_recorded",
        "tests/plugins/branching/test_branches.py::test_a_clock_in_a_prompt_makes_the_branch_void_by_name",
        "tests/plugins/branching/test_branches.py::test_another_chat_template_makes_branches_void",
        "tests/plugins/branching/test_tree_sampling.py::test_void_branches_are_counted_and_never_trained",
        "tests/plugins/branching/test_tree_sampling.py::test_the_audit_names_a_branch_that_is_none",
    ),
}
_LAW = dict(enumerate(LAWS.values(), 1))
README: dict[str, tuple[str, ...]] = {
    "Token-exact.": (
        *_LAW[1],
        "tests/core/policy_server/test_vllm.py::test_new_weights_serve_and_the_prefix_cache_is_not_stale",
    ),
    "Nothing is lost.": (
        *_LAW[4],
        "tests/e2e/test_survival.py::test_killing_the_trainer_then_interrupting_it_and_resuming_each_time",
        "tests/e2e/test_survival.py::test_killing_agents_then_vllm",
        "tests/plugins/samplers/test_async.py::test_an_audit_finds_what_was_changed",
    ),
    "A failed rollout is data, never a reward of 0.": _LAW[5],
    "The agent cannot cheat.": _LAW[6],
}
PAGES = {
    ("SECURITY.md", "## What holds"): SECURITY,
    ("docs/architecture.md", "## The laws"): LAWS,
    ("README.md", "## What you can rely on"): README,
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page[0])
def test_every_promise_names_its_tests(page: tuple[str, str]) -> None:
    name, heading = page
    said = (ROOT / name).read_text().partition(heading)[2].partition("\n## ")[0]
    assert re.findall(r"^(?:-|\d\.) \*\*(.+?)\*\*", said, re.MULTILINE) == list(PAGES[page])


@pytest.mark.parametrize("test", sorted({test for page in PAGES.values() for tests in page.values() for test in tests}))
def test_what_holds_a_promise_is_there(test: str) -> None:
    place, _, name = test.partition("::")
    text = (ROOT / place).read_text()
    assert f"def {name}(" in text if name else "def test_" in text, f"{test} is gone: who holds the promise now?"
