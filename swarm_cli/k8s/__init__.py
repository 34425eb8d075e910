"""`swarm k8s`: the Secrets that the manifests in k8s/ mount, and a look at an overlay and its
cluster before it is applied. The manifests themselves are kustomize's.
"""
