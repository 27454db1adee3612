"""The recipes for several GPUs, without their frameworks: settings and their reasons, downloads, data, the calculator."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import sqlite3
import urllib.request
import zipfile
from pathlib import Path

import pytest
from lightning.cli.train import read_tasks
from lightning.errors import DataError
from lightning_examples.paper import calcx, fetch, musique, spider
from lightning_examples.paper.calcx import prepare as calcx_data
from lightning_examples.paper.calcx.calculator import calculator
from lightning_examples.paper.musique import prepare as musique_data
from lightning_examples.paper.recipe import CLUSTERS, HERE, TRAIN, VAL, full_size
from lightning_examples.paper.spider import prepare as spider_data
from lightning_examples.rag_openai_agents.retriever import load_corpus

HAND_MADE = Path(__file__).parent / "data"
NAMES = [Path(str(package.__file__)).parent.name for package in (spider, musique, calcx)]
FILES = sorted(HERE.rglob("*.toml"))
OF_VERL = [name for name, cluster in CLUSTERS.items() if cluster.engine == "verl"]


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(HERE)))
def test_every_number_has_its_reason(file: Path) -> None:
    before = ""
    for line in file.read_text().splitlines():
        if re.match(r"\w+ = ", line) and not line.endswith("["):
            assert "  # " in line or before.startswith("# "), f"{file.name}: {line!r} stands without a reason"
        before = line.strip()
    assert "Not run: no GPU was" in file.read_text().replace("\n# ", " ")


@pytest.mark.parametrize("cluster", OF_VERL)
@pytest.mark.parametrize("name", NAMES)
def test_settings_are_accepted_and_fit_together(name: str, cluster: str) -> None:
    found = full_size(name, cluster, ["engine.verl.address=first:6379"])
    assert found.engine.verl.address == "first:6379"
    assert found.engine.verl.world_size % found.engine.verl.nodes == 0
    assert (found.engine.lr, found.trainer.tasks_per_step, found.engine.dtype) == (1e-6, 32, "bfloat16")
    # Every agent that may be at work has a place, and no place can stay empty for ever.
    at_once = (found.trainer.max_staleness + 1) * found.trainer.tasks_per_step * 8
    assert found.trainer.tasks_per_step * 8 <= found.runner.concurrency <= at_once
    assert found.gateway.token_ttl >= found.runner.timeout
    args = found.policy_server.args
    assert 32 % int(args[args.index("--tensor-parallel-size") + 1]) == 0
    assert json.loads(args[args.index("--default-chat-template-kwargs") + 1]) == {"enable_thinking": False}


@pytest.mark.parametrize("name", NAMES)
def test_settings_of_one_gpu_are_accepted_and_fit_together(name: str) -> None:
    found = full_size(name, "1x1")
    assert (found.engine.lr, found.trainer.tasks_per_step, found.engine.dtype) == (1e-6, 32, "bfloat16")
    assert found.runner.concurrency <= found.trainer.tasks_per_step * 8
    assert found.gateway.token_ttl >= found.runner.timeout
    # vLLM sleeps while a step is taken only where nothing samples meanwhile.
    assert (found.trainer.max_staleness, found.engine.device, found.policy_server.device) == (0, "cuda", "cuda")
    args = found.policy_server.args
    assert json.loads(args[args.index("--default-chat-template-kwargs") + 1]) == {"enable_thinking": False}


@pytest.mark.parametrize("name", NAMES)
def test_what_is_learned_on_one_gpu_differs_by_the_age_of_tokens_alone(name: str) -> None:
    one, eight = (full_size(name, cluster).model_dump() for cluster in ("1x1", "1x8"))
    different = {key for key in one["trainer"] if one["trainer"][key] != eight["trainer"][key]}
    assert different == {"max_staleness", "keep_checkpoints"}
    assert {key for key in one["engine"] if one["engine"][key] != eight["engine"][key]} <= {"verl"}
    assert one["policy_server"]["max_model_len"] == eight["policy_server"]["max_model_len"]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_learned_does_not_depend_on_the_cluster(name: str) -> None:
    one, two = (full_size(name, cluster).model_dump() for cluster in ("1x8", "2x8"))
    assert one["engine"]["verl"]["world_size"] != two["engine"]["verl"]["world_size"]
    for key in ("steps", "tasks_per_step", "max_staleness", "eval_temperature", "seed"):
        assert one["trainer"][key] == two["trainer"][key]
    for key in ("lr", "betas", "weight_decay", "max_grad_norm", "warmup_steps", "lora", "dtype"):
        assert one["engine"][key] == two["engine"][key]
    assert one["policy_server"]["max_model_len"] == two["policy_server"]["max_model_len"]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")  # verl's own
def test_verl_accepts_the_settings(tmp_path: Path) -> None:
    """Whatever is under `engine.verl.*` is an option of verl's, for GPUs."""
    from lightning.engines.protocol import OptimizerConfig
    from lightning.testing.tiny_models import make_tiny_model
    from lightning_verl.device import choose

    choose("cpu")  # what verl looks at while it is imported; the settings are made for GPUs below
    from lightning_verl.settings import worker_config

    model = make_tiny_model(tmp_path / "model")
    for name in NAMES:
        for cluster in OF_VERL:
            found = full_size(name, cluster)
            optimizer = OptimizerConfig(lr=found.engine.lr, betas=found.engine.betas)
            made = worker_config(found, model, optimizer, seed=0, device="cuda")
            assert made.engine_config.strategy == "fsdp2"
            assert made.engine_config.max_token_len_per_gpu == found.engine.tokens_per_microbatch
            assert not made.engine_config.use_no_sync_for_gradient_accumulation
            assert made.engine_config.mixed_precision["param_dtype"] == "bf16"
            assert made.model_config.enable_gradient_checkpointing


# --- downloads --------------------------------------------------------------------------------------------------------


def zipped(file: Path, members: dict[str, str]) -> Path:
    with zipfile.ZipFile(file, "w") as archive:
        for name, text in members.items():
            archive.writestr(name, text)
    return file


def test_an_archive_is_downloaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    content = zipped(tmp_path / "there.zip", {"a": "1"}).read_bytes()

    def reply(url: str, timeout: float) -> io.BytesIO:
        asked.append(url)
        return io.BytesIO(content)

    monkeypatch.setattr(urllib.request, "urlopen", reply)
    archive = tmp_path / "new" / "data.zip"
    assert fetch.from_drive("the-id", archive) == fetch.from_drive("the-id", archive) == archive
    assert archive.read_bytes() == content
    assert len(asked) == 1
    assert "id=the-id&" in asked[0]


@pytest.mark.parametrize("wrong", [b"<html>Quota exceeded</html>", OSError("no route")])
def test_a_failed_download_says_what_to_do_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: bytes | OSError
) -> None:
    def reply(url: str, timeout: float) -> io.BytesIO:
        if isinstance(wrong, OSError):
            raise wrong
        return io.BytesIO(wrong)

    monkeypatch.setattr(urllib.request, "urlopen", reply)
    archive = tmp_path / "data.zip"
    with pytest.raises(DataError, match=r"open https://drive\.google\.com/file/d/the-id/view in a browser and save"):
        fetch.from_drive("the-id", archive)
    assert not archive.exists()


def test_the_folder_with_the_wanted_file_is_found(tmp_path: Path) -> None:
    archive = zipped(tmp_path / "a.zip", {"__MACOSX/data/x": "no", "inner/data/x": "yes", "inner/other": ""})
    for _ in range(2):
        assert (fetch.unpacked(archive, tmp_path / "out", "x") / "x").read_text() == "yes"
    with pytest.raises(DataError, match=r"a\.zip has no y"):
        fetch.unpacked(archive, tmp_path / "out", "y")
    (tmp_path / "b.zip").write_text("not a zip")
    with pytest.raises(DataError, match=r"b\.zip cannot be unpacked"):
        fetch.unpacked(tmp_path / "b.zip", tmp_path / "out2", "x")
    assert not (tmp_path / "out2").exists()


# --- data -------------------------------------------------------------------------------------------------------------


def test_spider_s_tasks_leave_out_references_that_fail(tmp_path: Path) -> None:
    root = tmp_path / "spider"
    database = root / "database" / "pets" / "pets.sqlite"
    database.parent.mkdir(parents=True)
    with contextlib.closing(sqlite3.connect(database)) as connection, connection:
        connection.executescript("CREATE TABLE pets (Age INTEGER); INSERT INTO pets VALUES (3), (4);")
    schema = {"db_id": "pets", "table_names_original": ["pets"], "column_names_original": [[-1, "*"], [0, "Age"]]}
    (root / "tables.json").write_text(json.dumps([schema]))
    right, wrong = "SELECT count(*) FROM pets", "SELECT Name FROM pets"
    rows = [{"db_id": "pets", "question": f"Q{index}?", "query": query} for index, query in enumerate([right, wrong])]
    for file in ("train_spider.json", "dev.json"):
        (root / file).write_text(json.dumps(rows))
    spider_data.convert(root, tmp_path)
    for file in (TRAIN, VAL):
        (task,) = read_tasks(tmp_path / file)
        assert task.expected == right
        assert task.input == {"question": "Q0?", "schema": "pets(Age)", "database": str(database)}


def test_musique_s_corpus_has_the_paragraphs_of_both_files_once(tmp_path: Path) -> None:
    source = Path(__file__).parent / "rag_musique.jsonl"
    for file in musique_data.FILES:
        shutil.copy(source, tmp_path / file)
    musique_data.convert(tmp_path, tmp_path)
    train, val = read_tasks(tmp_path / TRAIN), read_tasks(tmp_path / VAL)
    assert [task.input for task in train] == [task.input for task in val]
    assert train[0].expected == ["1960", "year 1960"]
    paragraphs = [p for line in source.read_text().splitlines() for p in json.loads(line)["paragraphs"]]
    corpus = load_corpus(tmp_path / musique_data.CORPUS)
    assert {(one.title, one.text) for one in corpus} == {(p["title"], p["paragraph_text"]) for p in paragraphs}
    assert len(corpus) == len(set(corpus)) < len(paragraphs)
    assert sorted(path.name for path in tmp_path.glob("corpus*")) == [musique_data.CORPUS]


def test_musique_s_held_out_questions_are_taken_from_all_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = json.loads((Path(__file__).parent / "rag_musique.jsonl").read_text().splitlines()[0])
    rows = [{**row, "id": f"{2 + number // 4}hop__{number}"} for number in range(12)]
    for file in musique_data.FILES:
        (tmp_path / file).write_text("".join(json.dumps(one) + "\n" for one in rows))
    monkeypatch.setattr(musique_data, "HELD_OUT", 5)
    musique_data.convert(tmp_path, tmp_path)
    chosen = [task.id for task in read_tasks(tmp_path / VAL)]
    assert len(chosen) == 5
    assert {name[0] for name in chosen} == {"2", "3", "4"}


def test_calc_x_s_tasks_are_a_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    everything = HAND_MADE / "calc_x.jsonl"
    calcx_data.convert(everything, everything, tmp_path)
    found = {task.id: task.expected for task in read_tasks(tmp_path / TRAIN)}
    assert found["ape210k__00000012"] == "2/3"
    assert found["svamp__chal-7"] == "6250"
    assert found == {task.id: task.expected for task in read_tasks(tmp_path / VAL)}
    monkeypatch.setattr(calcx_data, "TRAINED", 2)
    calcx_data.convert(everything, everything, tmp_path)
    assert len(read_tasks(tmp_path / TRAIN)) == 2


# --- the calculator ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 / 3 + 1 / 6", "1/2 = about 0.5"),
        ("0.1 + 0.2", "3/10 = about 0.3"),
        ("1,200 * 2", "2400"),
        ("20% * 50", "10"),
        ("(1 + 5%) ** 2 * 1000", "2205/2 = about 1102.5"),
        ("17 % 5", "2"),
        ("17 % (2 + 3)", "2"),
        ("17 // 5", "3"),
        ("2^10", "1024"),
        ("2 ** -2", "1/4 = about 0.25"),
        ("sqrt(2) ** 2", "2"),
        ("2 ** 0.5", "1.414213562"),
        ("-(3 - 5)", "2"),
        ("pi", "3.141592654"),
        ("+7", "7"),
    ],
)
def test_the_calculator_calculates(expression: str, value: str) -> None:
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "", "twelve", "1 +", "1 / 0", "0 ** -1", "sqrt(-1)", "(-8) ** (1/3)", "10 ** 31", "2 ** 65", "9 ** 9 ** 9", "1e400",
        "__import__('os').system('true')", "open('x')", "True", "'a' * 9", "sqrt(1, 2)", "sqrt(x=1)", "[1]", "1 if 1 else 2",
        "1" * 301, "(" * 150 + ")" * 150, "10 ** 30 * 10 ** 30", "exp(1000)", "1j",
    ],
)  # fmt: skip
def test_the_calculator_refuses(expression: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        calculator(expression)


@pytest.mark.timeout(20)
def test_a_tower_of_powers_does_not_occupy_the_calculator() -> None:
    tower = "1/3"
    while len(tower) < 280:
        tower = f"({tower})**64"
    assert calculator(tower) == "0"
