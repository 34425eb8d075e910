"""`swarm k8s check`: what in an overlay, or in the cluster that it is meant for, would stop it.

The rules are pure functions over the objects as Kubernetes writes them (`Overlay`, `Cluster`);
`kubectl` alone is asked, and only to read.
"""
