"""`dashinfer-vlm doctor`."""

from __future__ import annotations

import dataclasses
import json
import sys

import click

from dashinfer_vlm_core.cli.terminal import show_table
from dashinfer_vlm_core.hookspecs import Finding

from .checks import all_findings
from .engines import quiet


@click.command()
@click.option("--deep", is_flag=True, help="Also load the bundled model, and let it describe a picture.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def doctor(*, deep: bool, as_json: bool) -> None:
    """Say what is installed, what is missing, and how to mend it.

    Exits with 1 if something that is needed is broken; what is optional may be missing.
    """
    quiet()
    findings = list(all_findings(deep=deep))
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        _show(findings)
    sys.exit(1 if any(finding.status == "broken" for finding in findings) else 0)


def _show(findings: list[Finding]) -> None:
    show_table(("What", "Status", "Found"), [(found.name, found.status, found.detail) for found in findings])
    for found in findings:
        if found.fix:
            click.echo(f"\n{found.name}: {found.fix}")
