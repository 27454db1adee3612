"""`lightning deploy`: writes the files to run a training as containers, in a cluster or on a cloud's machine."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer
from lightning.cli.output import AsJson, escape, print_json, print_table, say
from lightning.errors import ConfigError
from lightning.safe_text import counted

from lightning_deploy.agent_sources import Included, lock
from lightning_deploy.deploy_plan import DeployPlan, Options, checked_name, make_plan, sweep_plans
from lightning_deploy.render import Cloud, Written, diff, render, render_sweep, write
from lightning_deploy.smoke import smoke
from lightning_deploy.validators import Overlay, Verdict, check, check_cluster

PLAIN = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./-"


Target = Literal["docker", "compose", "k8s", "sky", "smoke"]
"""The targets of `lightning deploy`."""


def deploy(
    target: Annotated[
        Target,
        typer.Argument(
            metavar="TARGET",
            help="docker (images), compose (one machine), k8s (a cluster), sky (a cloud's machine), or smoke: run it here as "
            "processes, through one step.",
        ),
    ],
    train: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- AGENT --model MODEL --tasks FILE ...", help="The arguments of `lightning train`."),
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder for the files, below the current folder.")] = Path("deploy"),
    name: Annotated[str, typer.Option(help="Name of the deployment and of its run; default: the agent's module.")] = "",
    gpu: Annotated[str, typer.Option(help="The trainer's GPU: h100, h200 or a100.")] = "h100",
    clients: Annotated[int, typer.Option(help="Number of clients that run agents.", min=1)] = 2,
    image: Annotated[
        str, typer.Option(help="Where images are: registry.example.org/team, then /agent, /server and /trainer.")
    ] = "lightning",
    include: Annotated[
        list[Path] | None, typer.Option(metavar="PATH", help="Files that the agent opens; may be repeated.")
    ] = None,
    require: Annotated[
        list[str] | None,
        typer.Option(metavar="REQUIREMENT", help="What the agent needs and does not import, such as pkg[extra]."),
    ] = None,
    secret: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="A variable that the agent reads, beside those that its code names; by reference."
        ),
    ] = None,
    trainer_secret: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A variable that the trainer reads; by reference.")
    ] = None,
    no_secret: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="A file that seems to contain a secret, but does not.")
    ] = None,
    tag: Annotated[str, typer.Option(help="The images' tag; default: a digest of what goes into them.")] = "",
    cloud: Annotated[
        Literal["aws", "azure", "gcp", "kubernetes", "slurm"] | None,
        typer.Option(help="With sky: where; default: the cheapest that is configured."),
    ] = None,
    spot: Annotated[
        bool, typer.Option("--spot", help="With sky: a machine that may be taken away. Needs --store.")
    ] = False,
    store: Annotated[
        str, typer.Option(metavar="URL", help="With sky: a database elsewhere, without its password.")
    ] = "",
    sweep: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With sky: the runs of a sweep's file as a job group, in place of arguments. Needs --store.",
        ),
    ] = None,
    overlay: Annotated[Overlay, typer.Option(help="With k8s --apply: the kind of cluster.")] = "plain",
    open_network: Annotated[
        bool, typer.Option("--open-network", help="With k8s --apply: also where no network policy is enforced.")
    ] = False,
    show_diff: Annotated[bool, typer.Option("--diff", help="Show what would change, and write nothing.")] = False,
    run_check: Annotated[bool, typer.Option("--check", help="Validate the files by what is installed.")] = False,
    apply: Annotated[
        bool, typer.Option("--apply", help="Check the files, then run the target's script. The default only writes.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Also replace files that you have changed.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write the files of a deployment: images, Compose, Kubernetes or SkyPilot."""
    project = Path.cwd()
    _check_folder(out, project)
    _check_asked(target, ("sky",), {"--cloud": cloud, "--spot": spot, "--store": store, "--sweep": sweep})
    _check_asked(target, ("k8s",), {"--overlay": overlay != "plain", "--open-network": open_network})
    only_files = {"--diff": show_diff, "--check": run_check, "--apply": apply, "--force": force}
    _check_asked(target, ("docker", "compose", "k8s", "sky"), only_files)
    if target == "k8s" and "." not in image.partition("/")[0]:
        raise ConfigError(
            f"--image {image}: a cluster pulls images, so name a registry that you may push to, such as "
            "registry.example.org/team"
        )
    included = Included(tuple(include or ()), tuple(require or ()), tuple(no_secret or ()))
    secrets = tuple(secret or ()), tuple(trainer_secret or ())
    options = Options(gpu, clients, image, name, included, *secrets, tag)
    if (sweep is None) == (not train) or (sweep is not None and target != "sky"):
        raise ConfigError("give the arguments of `lightning train` after --, or with sky --sweep FILE: one of the two")
    place = Cloud(cloud or "", spot, store)
    if sweep is not None:
        plans = sweep_plans(sweep, options, project)
        plan = plans[0]
        files = render_sweep(plans, checked_name(sweep.stem), out, lock, place)
    else:
        plan = make_plan(train or (), options, project)
        if target == "smoke":
            _smoke(plan, out, as_json=as_json)
            return
        files = render(plan, target, out, lock, place)
    if show_diff:
        changes = "".join(diff(files, out))
        typer.echo(changes, nl=False)
        raise typer.Exit(1 if changes else 0)
    written = write(files, out, force=force)
    verdicts = check(target, out, (*plan.secrets, *plan.trainer_secrets)) if run_check or apply else []
    if as_json:
        print_json({"plan": plan, "folder": str(out), "files": written, "verdicts": verdicts})
    else:
        _show(plan, target, out, written, verdicts)
    if any(one.verdict == "failed" for one in verdicts):
        raise typer.Exit(1)
    if apply:
        _apply(plan, target, out, overlay, isolated=not open_network)


def _check_asked(target: Target, targets: Sequence[Target], given: Mapping[str, object]) -> None:
    """Raise `ConfigError` for given options that have no effect with this target."""
    options = [option for option, value in given.items() if value]
    if options and target not in targets:
        raise ConfigError(
            f"{', '.join(options)}: that goes with {', '.join(targets)}, and {target} has no use for it. Leave it out"
        )


def _check_folder(out: Path, project: Path) -> None:
    """Raise `ConfigError` for a folder of files that images cannot be made from."""
    if (
        out.is_absolute()
        or not (project / out).resolve().is_relative_to(project.resolve())
        or set(str(out)) - set(PLAIN)
    ):
        raise ConfigError(f"--out {out}: give a folder below {project}, of letters, digits, '_', '.' and '-'")


def _show(plan: DeployPlan, target: str, out: Path, written: Written, verdicts: list[Verdict]) -> None:
    machine = plan.machine
    clients = f"{counted(plan.clients, 'client')} of {counted(plan.concurrency, 'agent')}"
    say(f"{escape(plan.name)}: {clients}; a trainer with {machine.gpus} x {machine.gpu}")
    for use in machine.uses:
        say(f"  {use.role}: {use.used / 1e9:.0f} of {use.available / 1e9:.0f} GB of each GPU, estimated")
    for note in machine.notes:
        say(f"[yellow]note[/] {escape(note)}")
    for whose, names in (("agents", plan.secrets), ("the trainer", plan.trainer_secrets)):
        if names:
            say(f"  by reference, for {whose}: {escape(', '.join(names))}")
    say(f"{counted(len(written.written), 'file')} written to {escape(str(out))}, {len(written.unchanged)} unchanged")
    for name in written.kept:
        say(f"[yellow]kept[/] {escape(name)}: you have changed it (--diff shows how, --force replaces it)")
    if verdicts:
        colours = {"ok": "green", "failed": "red", "absent": "yellow"}
        print_table(
            ("validator", "file", "verdict", ""),
            [
                (one.validator, escape(one.file), f"[{colours[one.verdict]}]{one.verdict}", escape(one.text))
                for one in verdicts
            ],
        )
        absent = sorted({one.validator for one in verdicts if one.verdict == "absent"})
        if absent:
            say(f"[yellow]not checked[/] by {', '.join(absent)}: the table says what is missing")
    say(f"To run it: {escape(' '.join(_script(target, out)))}{' OVERLAY' if target == 'k8s' else ''} (or --apply)")


def _script(target: str, out: Path) -> list[str]:
    return ["sh", str(out / "docker" / "build.sh" if target == "docker" else out / target / "apply.sh")]


def _apply(plan: DeployPlan, target: str, out: Path, overlay: str, *, isolated: bool) -> None:
    command = _script(target, out)
    if target == "k8s":
        for line in check_cluster(plan.machine.gpus, isolated=isolated):
            say(escape(line))
        command.append(overlay)
    say(escape(f"running {' '.join(command)}"))
    ran = subprocess.run(command, check=False)  # noqa: S603 — the script that was written, without a shell line
    if ran.returncode:
        raise ConfigError(f"{' '.join(command)} ended with exit code {ran.returncode}")


def _smoke(plan: DeployPlan, out: Path, *, as_json: bool) -> None:
    folder = Path(tempfile.mkdtemp(prefix="lightning-smoke-"))
    files = render(plan, "docker", out, lambda *_: "")
    write({name: text for name, text in files.items() if name.startswith("scripts/")}, folder)
    found = smoke(plan, folder / "scripts", folder, lambda text: None if as_json else say(escape(text)))
    if as_json:
        print_json(found)
        return
    step, failed = f"{found.report['steps']} step of {counted(found.trained, 'token')}", found.report["failed"]
    say(
        f"[green]done[/]: {step} by {counted(found.clients, 'client')}, one of which was killed; "
        f"{counted(failed, 'rollout')} failed"
    )
    say(escape(f"logs and the run: {folder}"))
