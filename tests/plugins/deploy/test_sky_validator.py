"""SkyPilot's own reading of the tasks that are written for it, in the environment that has SkyPilot."""

from __future__ import annotations

from pathlib import Path

import pytest
from lightning_deploy.deploy_plan import Options, make_plan
from lightning_deploy.files import write
from lightning_deploy.render import Cloud, render
from lightning_deploy.validators import check

from tests.plugins.deploy.conftest import TRAIN

OUT = Path("deploy")
SPOT = Cloud("aws", spot=True, store="postgresql://me@db/x")


def written(project: Path, cloud: Cloud) -> Path:
    write(render(make_plan(TRAIN, Options(), project), "sky", OUT, lambda *_: "", cloud), OUT)
    return project / OUT


@pytest.mark.parametrize(
    "cloud", [Cloud(), Cloud("azure"), Cloud("gcp"), Cloud("kubernetes"), Cloud("slurm"), SPOT], ids=str
)
def test_skypilot_takes_the_task(project: Path, cloud: Cloud) -> None:
    verdicts = check("sky", written(project, cloud))
    assert [one.verdict for one in verdicts if one.validator == "skypilot"] == ["ok"], verdicts


def test_skypilot_refuses_a_planted_mistake(project: Path) -> None:
    folder = written(project, SPOT)
    task = folder / "sky" / "task.yaml"
    task.write_text(task.read_text().replace("accelerators", "acelerators"))
    failed = [one for one in check("sky", folder) if one.verdict == "failed"]
    assert [one.validator for one in failed] == ["skypilot"]
    assert "acelerators" in failed[0].text
