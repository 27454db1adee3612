"""Each promise of SECURITY.md names the tests that hold it, and they are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
HERE = "tests/core/security"
PROMISES: dict[str, tuple[str, ...]] = {
    "An agent's API key opens little.": (
        f"{HERE}/test_attacks.py::test_the_agents_key_opens_no_route_of_the_control_api",
        f"{HERE}/test_attacks.py::test_an_attack_gets_what_the_table_says",
        "tests/core/gateway/test_access.py",
        "tests/core/gateway/test_every_dialect.py::test_a_key_that_was_refused_once_reaches_no_policy_server_again",
        "tests/core/server/test_auth.py::test_the_agents_key_of_a_rollout_is_no_token",
    ),
    "Tokens of the control API are scoped, hashed, and can be taken back.": (
        "tests/core/server/test_auth.py::test_a_scope_is_what_it_says",
        "tests/core/server/test_auth.py::test_only_an_admin_is_for_all_projects",
        "tests/core/server/test_auth.py::test_no_secret_is_kept_logged_or_repeated",
        "tests/core/server/test_auth.py::test_a_token_ends_when_its_time_is_over",
        "tests/core/server/test_auth.py::test_a_revoked_token_is_refused_by_every_server_within_a_second",
        f"{HERE}/test_attacks.py::test_an_attack_gets_what_the_table_says",
    ),
    "Projects are kept apart.": (
        f"{HERE}/test_projects.py::test_every_method_of_the_store_has_a_rule",
        f"{HERE}/test_projects.py::test_what_is_anothers_answers_as_what_never_was",
        f"{HERE}/test_projects.py::test_nothing_that_one_project_does_is_seen_by_another",
    ),
    "The servers' own secrets are told to nobody.": (f"{HERE}/test_projects.py::test_secrets_are_told_to_nobody",),
    "Servers bind loopback by default": (
        f"{HERE}/test_exposure.py::test_every_default_address_is_loopback",
        f"{HERE}/test_exposure.py::test_a_public_bind_is_refused_without_a_token",
        f"{HERE}/test_exposure.py::test_a_server_asks_before_it_listens",
        "tests/core/policy_server/test_profiles.py",
    ),
    "Pages of other sites cannot reach a server on loopback.": (
        f"{HERE}/test_limits.py::test_a_server_on_loopback_answers_to_its_names_only",
        f"{HERE}/test_attacks.py::test_an_attack_gets_what_the_table_says",
    ),
    "One client cannot take the port from the others.": (
        f"{HERE}/test_limits.py::test_a_slow_client_is_cut_off",
        f"{HERE}/test_limits.py::test_headers_without_end_are_cut_off",
        f"{HERE}/test_limits.py::test_a_client_that_leaves_its_answer_unread_is_cut_off",
        f"{HERE}/test_limits.py::test_a_token_has_its_share_of_requests_and_others_have_theirs",
        f"{HERE}/test_limits.py::test_trying_tokens_quickly_ends_soon_and_disturbs_no_good_one",
        "tests/core/gateway/test_tracing_ingest.py::test_who_sends_no_token_can_bring_little",
        "tests/core/gateway/test_tracing_ingest.py::test_few_requests_without_a_token_are_read_at_a_time",
        f"{HERE}/test_attacks.py::test_an_attack_gets_what_the_table_says",
    ),
    "Requests do not choose where calls go.": (
        f"{HERE}/test_upstreams.py::test_no_request_chooses_the_upstream",
        f"{HERE}/test_upstreams.py::test_an_address_in_the_store_that_is_not_allowed_is_never_connected_to",
        f"{HERE}/test_upstreams.py::test_redirects_are_not_followed",
        f"{HERE}/test_upstreams.py::test_a_health_check_follows_no_redirect",
        f"{HERE}/test_upstreams.py::test_no_credential_of_an_agent_is_passed_on",
    ),
    "Credentials are not stored.": (
        f"{HERE}/test_redaction.py::test_no_credential_of_a_run_lies_in_its_database_or_in_a_log",
        f"{HERE}/test_redaction.py::test_what_looks_like_a_credential_is_left_out",
        f"{HERE}/test_redaction.py::test_a_plugin_is_asked_of_every_text",
        f"{HERE}/test_redaction.py::test_a_plugin_that_fails_costs_the_text_and_not_the_secret",
    ),
    "No pickle on the wire or in what is kept.": (
        f"{HERE}/test_files.py::test_only_the_packing_of_agents_knows_pickle",
        f"{HERE}/test_files.py::test_only_processes_of_agents_unpack_them",
        f"{HERE}/test_files.py::test_nothing_loads_what_may_hold_code",
    ),
    "Files that data names stay in their folder": (
        "tests/plugins/prompts/test_files.py::test_a_name_leads_below_its_root_or_to_an_error",
        "tests/plugins/prompts/test_files.py::test_symbolic_links_are_refused",
        "tests/plugins/prompts/test_files.py::test_a_component_writes_its_prompt_in_the_runs_folder_only",
    ),
    "Agents can be kept in a sandbox": (
        "tests/core/runner/test_sandbox.py::test_a_burglar_finds_nothing",
        "tests/core/runner/test_sandbox.py::test_a_burglar_who_waits_for_the_first_run_finds_nothing",
        "tests/core/runner/test_sandbox.py::test_hidden_folders_are_made_before_somebody_else_makes_them",
        "tests/core/runner/test_sandbox.py::test_agents_do_not_get_the_token_of_their_runner",
        "tests/core/runner/test_inline.py::test_a_sandbox_that_nothing_here_could_be_is_refused",
        "tests/core/runner/test_sandbox.py::test_a_sandbox_for_agents_of_clients_is_theirs",
        "tests/core/trainer/test_runs.py::test_agents_in_a_sandbox_see_neither_the_run_nor_its_store",
    ),
}


def test_every_promise_names_its_tests() -> None:
    holds = (ROOT / "SECURITY.md").read_text().partition("## What holds")[2].partition("\n## ")[0]
    assert re.findall(r"^- \*\*(.+?)\*\*", holds, re.MULTILINE) == list(PROMISES)


@pytest.mark.parametrize("promise", list(PROMISES))
def test_the_tests_are_there(promise: str) -> None:
    for test in PROMISES[promise]:
        place, _, name = test.partition("::")
        text = (ROOT / place).read_text()
        assert f"def {name}(" in text if name else "def test_" in text, f"{test} is gone: who holds the promise now?"
