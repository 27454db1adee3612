"""What an image of an agent is made of, found without running it."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest
from lightning.errors import ConfigError
from lightning_deploy.agent_sources import find_sources


def test_files_libraries_and_variables_are_found(project: Path) -> None:
    found = find_sources("my_agent", project)
    assert found.paths == (Path("helpers"), Path("my_agent.py"))
    assert found.requirements == (f"openai=={metadata.version('openai')}",)
    assert found.variables == ("SEARCH_KEY",)


def test_a_change_of_any_file_changes_the_digest(project: Path) -> None:
    first = find_sources("my_agent", project).digest
    assert find_sources("my_agent", project).digest == first
    (project / "helpers" / "shots.txt").write_text("3 + 3 = 6\n")
    assert find_sources("my_agent", project).digest != first


def test_the_agent_is_not_run(project: Path) -> None:
    (project / "my_agent.py").write_text('open("ran", "w").close()\n\n\ndef solve(task, llm): ...\n')
    find_sources("my_agent", project)
    assert not (project / "ran").exists()


def test_an_import_that_nothing_has_is_named_with_its_place(project: Path) -> None:
    (project / "helpers" / "prompts.py").write_text("import os\nimport secret_sauce.core\n")
    with pytest.raises(ConfigError, match=r"helpers/prompts.py:2 imports secret_sauce.core: .*--include"):
        find_sources("my_agent", project)


@pytest.mark.parametrize(
    "code",
    [
        "try:\n    import secret_sauce\nexcept ImportError:\n    secret_sauce = None\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import secret_sauce\n",
    ],
)
def test_what_it_can_do_without_is_not_missed(project: Path, code: str) -> None:
    (project / "my_agent.py").write_text(code)
    assert find_sources("my_agent", project).requirements == ()


def test_what_it_can_do_without_is_there_where_it_is_here(project: Path) -> None:
    (project / "my_agent.py").write_text("try:\n    import openai\nexcept ImportError:\n    openai = None\n")
    assert find_sources("my_agent", project).requirements == (f"openai=={metadata.version('openai')}",)


def test_a_package_of_this_machine_is_refused(project: Path, install) -> None:
    folder = install("local_tools", modules={"local_tools": ""})
    (folder / "local_tools-1.0.dist-info" / "direct_url.json").write_text('{"url": "file:///x", "dir_info": {}}')
    (folder / "local_tools-1.0.dist-info" / "top_level.txt").write_text("local_tools\n")
    (project / "my_agent.py").write_text("import local_tools\n")
    find_by_module_anew()
    with pytest.raises(ConfigError, match=r"my_agent.py:1 imports local_tools, which is installed from a folder"):
        find_sources("my_agent", project)
    find_by_module_anew()


def find_by_module_anew() -> None:
    from lightning_deploy import agent_sources

    agent_sources._by_module.cache_clear()
    agent_sources._distributions.cache_clear()


@pytest.mark.parametrize(
    "line",
    [
        'KEY = "sk-proj-abcdefghijklmnopqrstuvwxT3BlbkFJabcdefghijklmnopqrst"',  # pragma: allowlist secret
        'password = "hunter2hunter2"',  # pragma: allowlist secret
        'url = "postgresql://me:verysecret@db/x"',  # pragma: allowlist secret
    ],
)
def test_a_secret_is_refused_with_its_place(project: Path, line: str) -> None:
    (project / "helpers" / "prompts.py").write_text(f"PROMPT = 1\n{line}\n")
    with pytest.raises(ConfigError, match=r"secret in helpers/prompts.py:2 .*by reference") as error:
        find_sources("my_agent", project)
    assert line.split('"')[1] not in str(error.value)


def test_files_that_no_import_names_come_along(project: Path) -> None:
    found = find_sources("my_agent", project, [Path("data/train.jsonl")])
    assert Path("data/train.jsonl") in found.paths
    with pytest.raises(ConfigError, match=r"\.\./elsewhere is outside of"):
        find_sources("my_agent", project, [Path("../elsewhere")])
    with pytest.raises(ConfigError, match=r"nowhere.txt is not there"):
        find_sources("my_agent", project, [Path("nowhere.txt")])


def test_an_installed_agent_is_a_requirement(project: Path) -> None:
    found = find_sources("openai.helpers", project)
    assert found.paths == ()
    assert found.requirements == (f"openai=={metadata.version('openai')}",)


def test_an_agent_that_is_nowhere_is_named(project: Path) -> None:
    with pytest.raises(ConfigError, match=r"the command:0 imports no_agent"):
        find_sources("no_agent", project)
