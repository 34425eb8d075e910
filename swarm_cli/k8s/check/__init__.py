"""`swarm k8s check`: finds what in an overlay, or in its cluster, would stop it.

The rules are pure functions over Kubernetes objects (`Overlay`, `Cluster`). The only program used
is `kubectl`, and only to read.
"""
