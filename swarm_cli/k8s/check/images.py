"""Checks that every image is named and can be pulled."""

from __future__ import annotations

import re
from collections.abc import Iterator

from swarm_cli.k8s.check.findings import Finding, listed
from swarm_cli.k8s.check.overlay import Overlay

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_NOTHING = "sha256:" + "0" * 64
_FROM_MAKE = "`make images REGISTRY=... PUSH=1` writes the digests of what it pushed into k8s/components/images"


def findings(overlay: Overlay) -> Iterator[Finding]:
    """Findings about placeholders, malformed digests, moving tags, and images without a
    registry.
    """
    images = {container["image"] for workload in overlay.workloads() for container in workload.containers}
    placeholders = {image for image in images if image.startswith("registry.invalid/") or image.endswith(_NOTHING)}
    if placeholders:
        yield Finding(True, f"no image is named yet ({listed(placeholders, 1)})", _FROM_MAKE)
    for image in sorted(images - placeholders):
        name, at, digest = image.partition("@")
        if at and not _DIGEST.fullmatch(digest):
            yield Finding(True, f"image {image} has an invalid digest: it needs sha256: and 64 hexadecimal digits", _FROM_MAKE)
        elif not at and ":" not in name.rsplit("/", 1)[-1]:
            if "/" not in name:
                what = f"no entry under `images` of the kustomization matches the image {image}, so no registry has it"
                yield Finding(True, what, f"correct the entry's name to `{name}`, or add one with newName and digest")
                continue
            yield Finding(True, f"image {image} has neither a tag nor a digest, so it is whatever was pushed last", _FROM_MAKE)
    if local := {image for image in images if image.startswith("localhost/")}:
        remedy = "load them with `kind load docker-image`, `k3d image import` or `minikube image load`"
        yield Finding(False, f"images of localhost must be on every machine ({listed(local, 2)})", remedy)
