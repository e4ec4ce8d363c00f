"""`dashinfer-vlm doctor`."""

from __future__ import annotations

import dataclasses
import json
import sys

import click

from dashinfer_vlm_core.cli.terminal import show_table
from dashinfer_vlm_core.findings import Finding

from .checks import all_findings
from .engines import log_warnings_only


@click.command()
@click.option("--deep", is_flag=True, help="Also load the bundled model and have it describe an image.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def doctor(*, deep: bool, as_json: bool) -> None:
    """Check the installation, and report how to fix problems.

    Exits with 1 if a required part is broken. Optional parts may be missing.
    """
    log_warnings_only()
    findings = list(all_findings(deep=deep))
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        _show(findings)
    sys.exit(1 if any(finding.status == "broken" for finding in findings) else 0)


def _show(findings: list[Finding]) -> None:
    show_table(("Check", "Status", "Details"), [(finding.name, finding.status, finding.detail) for finding in findings])
    for finding in findings:
        if finding.fix:
            click.echo(f"\n{finding.name}: {finding.fix}")
