"""SkyPilot's own reading of the tasks that are written for it, in the environment that has SkyPilot."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from lightning_deploy.deploy_plan import Options, make_plan, sweep_plans
from lightning_deploy.render import Cloud, render, render_sweep, write
from lightning_deploy.validators import check

from tests.plugins.deploy.conftest import TRAIN

OUT = Path("deploy")
SPOT = Cloud("aws", spot=True, store="postgresql://me@db/x")


def written(project: Path, cloud: Cloud) -> Path:
    write(render(make_plan(TRAIN, Options(), project), "sky", OUT, lambda *_: "", cloud), OUT)
    return project / OUT


@pytest.mark.parametrize("cloud", [Cloud(), Cloud("azure"), Cloud("slurm"), SPOT], ids=str)
def test_skypilot_takes_the_task(project: Path, cloud: Cloud) -> None:
    verdicts = check("sky", written(project, cloud))
    assert [one.verdict for one in verdicts if one.validator == "skypilot"] == ["ok"], verdicts


def test_skypilot_takes_a_sweep_as_a_job_group(project: Path) -> None:
    train = " ".join(f"'{text}'" for text in TRAIN)
    (project / "lr.toml").write_text(f'train = "{train}"\nseeds = [0, 1]\n[settings]\n"engine.lr" = [1e-6, 5e-6]\n')
    plans = sweep_plans(project / "lr.toml", Options(), project)
    write(render_sweep(plans, "lr", OUT, lambda *_: "", Cloud("gcp", store="postgresql://me@db/x")), OUT)
    assert [one.verdict for one in check("sky", project / OUT) if one.validator == "skypilot"] == ["ok"]
    header, *tasks = yaml.safe_load_all((OUT / "sky" / "sweep.yaml").read_text())
    assert header == {"name": "lr", "execution": "parallel"}
    assert [task["name"] for task in tasks] == [f"lr-{lr}-seed{seed}" for seed in (0, 1) for lr in ("1e-06", "5e-06")]
    assert all(task["secrets"] == {"SEARCH_KEY": None, "PGPASSWORD": None} for task in tasks)
    assert "trainer.seed=1" in tasks[-1]["run"]
    assert '--store "$LIGHTNING_STORE"' in tasks[-1]["run"]


def test_skypilot_refuses_a_planted_mistake(project: Path) -> None:
    folder = written(project, SPOT)
    task = folder / "sky" / "task.yaml"
    task.write_text(task.read_text().replace("accelerators", "acelerators"))
    failed = [one for one in check("sky", folder) if one.verdict == "failed"]
    assert [one.validator for one in failed] == ["skypilot"]
    assert "acelerators" in failed[0].text
