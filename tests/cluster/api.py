"""A Kubernetes API server as the tests ask it: JSON over `kubectl proxy`, so that any kubeconfig
works, whatever signs its user in.
"""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

REQUEST_TIMEOUT_S = 120.0
PROXY_START_S = 120.0

Object = dict[str, Any]

PATHS = {
    "ConfigMap": "api/v1/configmaps",
    "Deployment": "apis/apps/v1/deployments",
    "Event": "api/v1/events",
    "Job": "apis/batch/v1/jobs",
    "Lease": "apis/coordination.k8s.io/v1/leases",
    "Namespace": "api/v1/namespaces",
    "Node": "api/v1/nodes",
    "PersistentVolume": "api/v1/persistentvolumes",
    "PersistentVolumeClaim": "api/v1/persistentvolumeclaims",
    "Pod": "api/v1/pods",
    "PriorityClass": "apis/scheduling.k8s.io/v1/priorityclasses",
    "ReplicaSet": "apis/apps/v1/replicasets",
    "RuntimeClass": "apis/node.k8s.io/v1/runtimeclasses",
    "Secret": "api/v1/secrets",
    "Service": "api/v1/services",
    "ServiceAccount": "api/v1/serviceaccounts",
    "StatefulSet": "apis/apps/v1/statefulsets",
    "StorageClass": "apis/storage.k8s.io/v1/storageclasses",
    "VolumeAttachment": "apis/storage.k8s.io/v1/volumeattachments",
}


class ApiError(Exception):
    """The server's answer was not a success. `code`: the HTTP status."""

    def __init__(self, code: int, words: str) -> None:
        super().__init__(f"{code}: {words}")
        self.code = code


class _OverSocket(http.client.HTTPConnection):
    """HTTP to a socket in a folder that nobody else may look into."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class Api:
    """Objects by kind, namespace and name. Each call has a connection of its own, so that any
    thread may make it.
    """

    def __init__(self, socket_path: Path) -> None:
        self._socket = socket_path

    def ask(self, method: str, path: str, body: Object | None = None, content: str = "application/json") -> Object:
        """One request. Raises ApiError when the server refuses it, OSError when it is away."""
        connection = _OverSocket(self._socket, REQUEST_TIMEOUT_S)
        try:
            text = None if body is None else json.dumps(body)
            connection.request(method, f"/{path}", text, {"Content-Type": content, "Accept": "application/json"})
            answer = connection.getresponse()
            said = answer.read().decode(errors="replace")
        finally:
            connection.close()
        if answer.status >= 300:
            raise ApiError(answer.status, said[:2000])
        found: Object = json.loads(said)
        return found

    def listed(self, kind: str, namespace: str | None = None, labels: dict[str, str] | None = None) -> list[Object]:
        query = {"labelSelector": ",".join(f"{key}={value}" for key, value in labels.items())} if labels else {}
        return list(self.ask("GET", f"{_path(kind, namespace)}?{urlencode(query)}")["items"])

    def get(self, kind: str, name: str, namespace: str | None = None) -> Object | None:
        """The object, None where there is none."""
        try:
            return self.ask("GET", _path(kind, namespace, name))
        except ApiError as error:
            if error.code == 404:
                return None
            raise

    def create(self, each: Object) -> Object:
        """Make an object; it is no error if one of its name is there."""
        metadata = each["metadata"]
        try:
            return self.ask("POST", _path(each["kind"], metadata.get("namespace")), each)
        except ApiError as error:
            if error.code == 409 and "AlreadyExists" in str(error):
                return self.ask("GET", _path(each["kind"], metadata.get("namespace"), metadata["name"]))
            raise

    def patch(self, kind: str, name: str, change: Object, namespace: str | None = None, part: str = "") -> Object:
        """A merge patch, of the object or of a part of it (`status`)."""
        path = _path(kind, namespace, name) + (f"/{part}" if part else "")
        return self.ask("PATCH", path, change, "application/merge-patch+json")

    def delete(
        self, kind: str, name: str, namespace: str | None = None, grace_s: int | None = None, uid: str | None = None
    ) -> None:
        """Delete an object; it is no error if there is none, or with `uid` if another has its
        name.
        """
        body: Object = {"kind": "DeleteOptions", "apiVersion": "v1"}
        body |= {} if grace_s is None else {"gracePeriodSeconds": grace_s}
        body |= {} if uid is None else {"preconditions": {"uid": uid}}
        try:
            self.ask("DELETE", _path(kind, namespace, name), body)
        except ApiError as error:
            if error.code not in (404, 409):
                raise

    def delete_all(self, kind: str, namespace: str) -> None:
        """Delete every object of a kind in a namespace, pods without their grace period."""
        body = {"kind": "DeleteOptions", "apiVersion": "v1"} | ({"gracePeriodSeconds": 0} if kind == "Pod" else {})
        self.ask("DELETE", _path(kind, namespace), body)

    def versions(self) -> set[str]:
        """Every `group/version` that the server knows."""
        groups = self.ask("GET", "apis")["groups"]
        return {"v1", *(version["groupVersion"] for group in groups for version in group["versions"])}


def _path(kind: str, namespace: str | None, name: str = "") -> str:
    front, _, plural = PATHS[kind].rpartition("/")
    inside = f"namespaces/{namespace}/" if namespace else ""
    return f"{front}/{inside}{plural}" + (f"/{quote(name)}" if name else "")


class Proxy:
    """`kubectl proxy` on a socket."""

    def __init__(self, kubectl: list[str], folder: Path) -> None:
        self.socket = folder / "api.sock"
        self._log = folder / "proxy.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*kubectl, "proxy", f"--unix-socket={self.socket}"], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def api(self) -> Api:
        """The server behind it, once it answers."""
        api, deadline = Api(self.socket), time.monotonic() + PROXY_START_S
        while True:
            try:
                api.ask("GET", "version")
                return api
            except (OSError, ApiError, ValueError) as error:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise RuntimeError(f"no answer from the cluster: {error}\n{self._log.read_text()}") from None
                time.sleep(0.1)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(10)
