"""What people on call look at, as code: dashboards, recording rules and alerts, rendered to the files that Kubernetes and Prometheus load.

Nothing here runs in a service; the metrics themselves are declared where they are counted.
"""
