"""What an image of an agent is made of, found without running it."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest
from lightning.errors import ConfigError
from lightning_deploy.agent_sources import Included, find_sources


def test_files_libraries_and_variables_are_found(project: Path) -> None:
    found = find_sources("my_agent", project, Included())
    assert found.paths == (Path("helpers"), Path("my_agent.py"))
    assert found.requirements == (f"openai=={metadata.version('openai')}",)
    assert found.variables == ("SEARCH_KEY",)


def test_a_change_of_any_file_changes_the_digest(project: Path) -> None:
    first = find_sources("my_agent", project, Included()).digest
    assert find_sources("my_agent", project, Included()).digest == first
    (project / "helpers" / "shots.txt").write_text("3 + 3 = 6\n")
    assert find_sources("my_agent", project, Included()).digest != first


def test_the_agent_is_not_run(project: Path) -> None:
    (project / "my_agent.py").write_text('open("ran", "w").close()\n\n\ndef solve(task, llm): ...\n')
    find_sources("my_agent", project, Included())
    assert not (project / "ran").exists()


def test_an_import_that_nothing_has_is_named_with_its_place(project: Path) -> None:
    (project / "helpers" / "prompts.py").write_text("import os\nimport secret_sauce.core\n")
    with pytest.raises(ConfigError, match=r"helpers/prompts.py:2 imports secret_sauce.core: .*--include"):
        find_sources("my_agent", project, Included())


@pytest.mark.parametrize(
    "code",
    [
        "try:\n    import secret_sauce\nexcept ImportError:\n    secret_sauce = None\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import secret_sauce\n",
    ],
)
def test_what_it_can_do_without_is_not_missed(project: Path, code: str) -> None:
    (project / "my_agent.py").write_text(code)
    assert find_sources("my_agent", project, Included()).requirements == ()


def test_what_it_can_do_without_is_there_where_it_is_here(project: Path) -> None:
    (project / "my_agent.py").write_text("try:\n    import openai\nexcept ImportError:\n    openai = None\n")
    assert find_sources("my_agent", project, Included()).requirements == (f"openai=={metadata.version('openai')}",)


def test_a_package_of_this_machine_is_refused(project: Path, install) -> None:
    folder = install("local_tools", modules={"local_tools": ""})
    (folder / "local_tools-1.0.dist-info" / "direct_url.json").write_text('{"url": "file:///x", "dir_info": {}}')
    (folder / "local_tools-1.0.dist-info" / "top_level.txt").write_text("local_tools\n")
    (project / "my_agent.py").write_text("import local_tools\n")
    find_by_module_anew()
    with pytest.raises(ConfigError, match=r"my_agent.py:1 imports local_tools, which is installed from a folder"):
        find_sources("my_agent", project, Included())
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
        find_sources("my_agent", project, Included())
    assert line.split('"')[1] not in str(error.value)


def test_files_that_no_import_names_come_along(project: Path) -> None:
    found = find_sources("my_agent", project, Included((Path("data/train.jsonl"),)))
    assert Path("data/train.jsonl") in found.paths
    with pytest.raises(ConfigError, match=r"\.\./elsewhere is outside of"):
        find_sources("my_agent", project, Included((Path("../elsewhere"),)))
    with pytest.raises(ConfigError, match=r"nowhere.txt is not there"):
        find_sources("my_agent", project, Included((Path("nowhere.txt"),)))


def test_an_installed_agent_is_a_requirement(project: Path) -> None:
    found = find_sources("openai.helpers", project, Included())
    assert found.paths == ()
    assert found.requirements == (f"openai=={metadata.version('openai')}",)


def test_an_agent_that_is_nowhere_is_named(project: Path) -> None:
    with pytest.raises(ConfigError, match=r"the command:0 imports no_agent"):
        find_sources("no_agent", project, Included())


@pytest.mark.parametrize(
    ("code", "read"),
    [
        ('key = os.environ["SEARCH_KEY"]', ("SEARCH_KEY",)),
        ('key = os.getenv("SEARCH_KEY")', ("SEARCH_KEY",)),
        ('key = os.environ.get("SEARCH_KEY", "none")', ()),
        ('os.environ["TOKENIZERS_PARALLELISM"] = "false"', ()),
        ('where = os.environ["HOME"] + os.environ["PATH"] + os.environ["OPENAI_API_KEY"]', ()),
    ],
)
def test_only_what_must_be_set_by_somebody_is_asked_for(project: Path, code: str, read: tuple[str, ...]) -> None:
    (project / "my_agent.py").write_text(f"import os\n{code}\n")
    assert find_sources("my_agent", project, Included()).variables == read


def test_files_that_one_of_several_imports_takes_come_along(project: Path) -> None:
    (project / "fast.py").write_text("import helpers.prompts\n")
    (project / "slow.py").write_text("")
    (project / "my_agent.py").write_text(
        "try:\n    from fast import f\nexcept ImportError:\n    from slow import f\n"
        "import sys\nif sys.version_info < (3, 11):\n    import tomli_of_old\n"
    )
    found = find_sources("my_agent", project, Included())
    assert found.paths == (Path("fast.py"), Path("helpers"), Path("my_agent.py"), Path("slow.py"))


def test_a_package_may_lie_in_src(project: Path) -> None:
    (project / "src" / "mine").mkdir(parents=True)
    (project / "src" / "mine" / "__init__.py").write_text("")
    (project / "src" / "mine" / "agent.py").write_text("from mine import tools\n")
    assert find_sources("mine.agent", project, Included()).paths == (Path("src/mine"),)


def test_a_folder_without_init_does_not_hide_a_library(project: Path) -> None:
    (project / "openai").mkdir()
    (project / "openai" / "try_it.py").write_text("")
    found = find_sources("my_agent", project, Included())
    assert found.requirements == (f"openai=={metadata.version('openai')}",)
    assert Path("openai") not in found.paths


def test_lightning_itself_is_in_every_image(project: Path) -> None:
    (project / "my_agent.py").write_text("import lightning\nimport lightning_langchain\n")
    assert find_sources("my_agent", project, Included(requirements=("uvloop[dev]",))).requirements == ("uvloop[dev]",)


def test_data_that_looks_random_is_data_and_a_key_in_it_is_a_key(project: Path) -> None:
    data = project / "helpers" / "ids.json"
    data.write_text('{"id": "da39a3ee5e6b4b0d3255bfef95601890afd80709"}\n')
    find_sources("my_agent", project, Included())
    data.write_text('{"key": "AKIAIOSFODNN7EXAMPLE"}\n')  # pragma: allowlist secret
    with pytest.raises(ConfigError, match=r"helpers/ids.json:1 \(AWS Access Key\).*--no-secret"):
        find_sources("my_agent", project, Included())
    find_sources("my_agent", project, Included(no_secret=(Path("helpers/ids.json"),)))


def test_what_git_would_hide_is_in_no_image(project: Path) -> None:
    (project / "helpers" / ".env").write_text('KEY="hunter2hunter2"\n')
    (project / "helpers" / "node_modules").mkdir()
    (project / "helpers" / "node_modules" / "k.js").write_text('password = "hunter2hunter2"\n')
    find_sources("my_agent", project, Included())  # not looked at, and excluded by the .dockerignore
