"""`swarm k8s`: makes the Secrets that the manifests in k8s/ mount, and checks an overlay and its
cluster before it is applied. kustomize makes the manifests themselves.
"""
