"""`swarm k8s check`."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated

import typer

from swarm_cli.console import note, say
from swarm_cli.k8s.check.cluster import Cluster, current_context, read_cluster, rendered, why_no_cluster
from swarm_cli.k8s.check.configuration import configuration_findings
from swarm_cli.k8s.check.overlay import Finding, Overlay
from swarm_cli.k8s.check.rules import (
    class_findings,
    dns_findings,
    image_findings,
    machine_findings,
    model_findings,
    quota_findings,
    storage_findings,
)
from swarm_cli.k8s.check.secrets import mounted_findings
from swarm_cli.task_probe import TaskProbe


def check(
    overlay: Annotated[
        str, typer.Argument(metavar="OVERLAY", help="The overlay's folder, a file of rendered YAML, or - for standard input.")
    ],
    context: Annotated[str, typer.Option(help="Context of the kubeconfig.  [default: the current one]")] = "",
    cluster: Annotated[bool, typer.Option("--cluster/--no-cluster", help="Also look at the cluster.")] = True,
) -> None:
    """Find what in an overlay, or in your kubeconfig's cluster, would stop the swarm, before you
    run `kubectl apply`.

    Changes nothing, and reads each node's configuration as its pods would. Each finding is one
    line: `stops` or `note`, what is wrong, and the remedy. Exits with 1 if a finding stops the
    swarm or a part of it.

    Of a folder kustomize fetches what it names at other addresses, as `kubectl apply -k` would:
    look at `resources:` of a folder from somebody else, or ask for the rendered file.
    """
    objects = rendered(overlay)
    with TaskProbe() as apart:
        found = [*image_findings(objects), *configuration_findings(objects, apart), *model_findings(objects)]
    asked = current_context(context) if cluster else ""
    if asked:
        found += findings(objects, read_cluster(objects.namespace, asked), datetime.now(UTC))
    elif cluster:
        missing, remedy = why_no_cluster()
        note(f"{missing}, so no cluster was checked: {remedy}, or give --no-cluster")
    for each in sorted(found, key=lambda finding: not finding.stops):
        say(str(each))
    stopping = sum(each.stops for each in found)
    where = f"{overlay} on {asked}" if asked else overlay
    note(f"{where}: {stopping} of {len(found)} findings would stop it" if stopping else f"{where}: no finding would stop it")
    if stopping:
        raise typer.Exit(1)


def findings(overlay: Overlay, cluster: Cluster, now: datetime) -> list[Finding]:
    """The findings of all rules about an overlay and a cluster."""
    return [
        *class_findings(overlay, cluster),
        *quota_findings(overlay, cluster),
        *mounted_findings(overlay, cluster, now),
        *storage_findings(overlay, cluster),
        *machine_findings(overlay, cluster),
        *dns_findings(overlay, cluster),
        *_unread(cluster),
    ]


def _unread(cluster: Cluster) -> Iterator[Finding]:
    for kind, why in sorted(cluster.unread.items()):
        what = "DNS pods" if kind == "dns" else kind
        yield Finding(False, f"{what} could not be read ({why}), so they were not checked", "ask for the right to list them")
